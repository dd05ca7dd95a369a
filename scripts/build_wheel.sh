#!/usr/bin/env bash
# Builds into dist/ what a release consists of: a source distribution and, from it, wheels with compiled kernels for Linux. Then
# installs the wheel in new environments without a compiler, one for each Python of 3.11 to 3.13 on PATH, and compresses,
# evaluates and runs the demo model there. See "A release" in CONTRIBUTING.md.
#   scripts/build_wheel.sh              for this processor, and for 64-bit ARM where aarch64-linux-gnu-gcc is
#   scripts/build_wheel.sh --no-smoke   without trying the wheel
set -euo pipefail

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "${repository:?}"

cross_compiler=aarch64-linux-gnu-gcc
tested=0
report=()
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

run() {
    printf '$ %s\n' "$*"
    "${alone[@]}" "$@"
}

# build_wheel PROCESSOR SEARCH_PATH: builds a wheel of the source distribution with the first compiler on the search path and
# sets `wheel`.
build_wheel() {
    local folder="$work/wheel-$1"
    PATH="$2" "$builder/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" "$sources"
    wheel="$(echo "$folder"/*-manylinux_*_"$1".whl)"
    if [ ! -e "$wheel" ]; then
        say "error: no library for Linux on $1 was compiled: $(basename "$folder"/*.whl). python -m compress.cpu.build says why."
        return 1
    fi
    check_tag
    mv "$wheel" dist/
    wheel="$repository/dist/$(basename "$wheel")"
    say "built $wheel"
}

# check_tag: compares the tag of a wheel with what auditwheel reads from the symbols of its library.
check_tag() {
    local platform found
    platform="$(basename "$wheel" .whl)"
    platform="${platform##*-}"
    if [ ! -x "$builder/bin/auditwheel" ]; then
        report+=("$platform: not checked by auditwheel, because pip cannot install it")
        return
    fi
    found="$("$builder/bin/auditwheel" show "$wheel" | tr '\n' ' ')"
    if [[ "$found" != *"platform tag: \"$platform\""* ]]; then
        say "error: the tag $platform is not what auditwheel finds: $found"
        return 1
    fi
    report+=("$platform: auditwheel agrees")
}

# try_with PYTHON: installs the wheel in a new environment, outside of the checkout, and does the main job there.
try_with() {
    local name="$1" venv="$work/$1" path
    if ! path="$("$name" -c 'import sys; print(sys.executable)' 2>/dev/null)"; then
        report+=("$name: not tested, because there is none on PATH")
        return
    fi
    "$path" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --no-deps "$wheel"
    if ! "$venv/bin/python" -m pip install --quiet --only-binary :all: "$wheel" 2>"$work/pip.log"; then
        report+=("$name: not tested, because pip cannot install what it needs: $(grep -m 1 '^ERROR' "$work/pip.log")")
        return
    fi
    say "trying the wheel with $("$path" --version)"
    do_main_job "$venv/bin" "$work/$name-job"
    report+=("$name: tested ($("$path" --version), $(basename "$wheel"))")
    tested=$((tested + 1))
    rm -rf "$venv"
}

# do_main_job PROGRAMS FOLDER: with nothing but these programs on PATH, so without a compiler.
do_main_job() {
    local alone=(env -i "HOME=$work" "PATH=$1" OMP_WAIT_POLICY=passive)
    mkdir "$2"
    cd "$2"
    run compress --help >/dev/null
    run runtime --help >/dev/null
    run compress quantize --method rtn --bits 4
    run compress eval --ppl --tokens 4096
    run runtime generate packed --prompt "It was a bright cold day" --max-tokens 16 --temperature 0
    run python -I "$repository/scripts/check_installed.py" packed
    cd "$repository"
}

builder="$work/builder"
"$(find_python)" -m venv "$builder"
"$builder/bin/python" -m pip install --quiet "hatchling>=1.24"
"$builder/bin/python" -m pip install --quiet auditwheel 2>/dev/null || true
rm -rf dist
"$builder/bin/python" -m hatchling build --target sdist --directory dist
sources="$(echo "$repository"/dist/*.tar.gz)"

if command -v "$cross_compiler" >/dev/null && [ "$(uname -m)" != aarch64 ]; then
    mkdir "$work/cross"
    ln -s "$(command -v "$cross_compiler")" "$work/cross/cc"
    build_wheel aarch64 "$work/cross:$PATH"
    report+=("64-bit ARM: built and not tested, because this processor cannot run it")
elif [ "$(uname -m)" != aarch64 ]; then
    report+=("64-bit ARM: not built, because there is no $cross_compiler on PATH: apt install gcc-aarch64-linux-gnu")
fi
build_wheel "$(uname -m)" "$PATH"
if [ "${1:-}" = --no-smoke ]; then
    report+=("the wheel was not tested (--no-smoke)")
else
    for minor in 11 12 13; do
        try_with "python3.$minor"
    done
fi

printf '\n%s\n' "${report[@]}"
ls -l dist
if [ "$tested" = 0 ] && [ "${1:-}" != --no-smoke ]; then
    say "error: the wheel was not tested with any Python."
    exit 1
fi
