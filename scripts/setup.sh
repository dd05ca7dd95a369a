# Sourced by test.sh, demo.sh and build_wheel.sh. Leaves the repository's own environment in .venv, installs into it what changed.
# shellcheck shell=bash

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "error: no Python 3.11, 3.12 or 3.13 on PATH. Install one of them, for example with 'apt install python3 python3-venv'."
    return 1
}

# set_up [EXTRA]: creates .venv and installs the project (editable) with an optional extra.
set_up() {
    local extra="${1:-}" venv="$repository/.venv" python wanted
    if [ ! -x "$venv/bin/python" ]; then
        python="$(find_python)"
        say "creating $venv with $("$python" --version)"
        if ! "$python" -m venv "$venv"; then
            rm -rf "$venv"
            say "error: $python cannot make virtual environments. Install its venv module, for example with 'apt install python3-venv'."
            return 1
        fi
    fi
    wanted="$(cat "$repository/pyproject.toml" "$repository"/compress/cpu/c/*/* | cksum) $extra"
    if [ "$(cat "$venv/installed-$extra" 2>/dev/null)" != "$wanted" ]; then
        say "installing the project${extra:+ with [$extra]} into $venv (the first time takes some minutes)"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$repository${extra:+[$extra]}"
        printf '%s' "$wanted" >"$venv/installed-$extra"
    fi
    PATH="$venv/bin:$PATH"
    export PATH
}

# set_up_browser: the tests of the server's page want one. Never fatal: without a browser they are skipped.
set_up_browser() {
    local name
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" >/dev/null && return
    done
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing chromium with apt-get for the tests of the server's page"
        if { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium fonts-dejavu-core; } \
            </dev/null >/dev/null 2>&1 && command -v chromium >/dev/null; then
            return
        fi
        say "apt-get could not install it"
    fi
    say "no chromium here: the tests of the page in a browser are skipped"
}
