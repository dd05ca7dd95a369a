#!/usr/bin/env bash
# Sets up everything and runs all checks: lint, format, types, import arrows, tests.
#   scripts/test.sh              what continuous integration runs
#   scripts/test.sh --all        the slow tests too
#   scripts/test.sh ARGUMENTS    are given to pytest, for example: scripts/test.sh tests/runtime -x
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

pytest_arguments=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then
        pytest_arguments+=(-m "slow or not slow")
    else
        pytest_arguments+=("$argument")
    fi
done

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
say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "import-linter"
lint-imports
say "pytest"
pytest --numprocesses "$workers" --maxprocesses 4 --dist worksteal ${pytest_arguments[@]+"${pytest_arguments[@]}"}
