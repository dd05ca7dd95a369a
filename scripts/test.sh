#!/usr/bin/env bash
# Sets up everything and runs the quick tier: lint, format, types, import contracts, language, tests. See docs/testing.md.
#   scripts/test.sh              the tests to run before a commit
#   scripts/test.sh --all        the full tier too, without a limit of time
#   scripts/test.sh ARGUMENTS    are given to pytest, for example: scripts/test.sh tests/runtime -x
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

pytest_arguments=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then
        pytest_arguments+=(-m "" --hypothesis-profile full --timeout 3600)
    else
        pytest_arguments+=("$argument")
    fi
done

lint() {
    local status=0
    say "ruff" && ruff check . || status=1
    ruff format --check . || status=1
    say "mypy" && mypy || status=1
    say "import-linter" && lint-imports || status=1
    say "language" && python scripts/check_language.py || status=1
    return "$status"
}

set_up test
set_up_browser
cd "$repository"
# Like the command lines do: torch's threads sleep while they wait instead of keeping cores from servers under test.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
# A test a core, and a thread a test: what tests compute is too small to be shared out. On a GPU they would take each
# other's memory.
workers="$(getconf _NPROCESSORS_ONLN)"
if command -v nvidia-smi >/dev/null; then
    workers=0
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The linters run beside the tests; what they say follows.
lint_output="$(mktemp)"
trap 'rm -f "$lint_output"' EXIT
lint >"$lint_output" 2>&1 &
linters=$!
say "pytest"
tests_status=0
pytest --numprocesses "$workers" --maxprocesses 4 --dist worksteal ${pytest_arguments[@]+"${pytest_arguments[@]}"} || tests_status=$?
lint_status=0
wait "$linters" || lint_status=$?
cat "$lint_output"
[ "$tests_status" = 0 ] || exit "$tests_status"
exit "$lint_status"
