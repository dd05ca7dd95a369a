#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU: correctness of all kernels on it, then their speeds. Figures go to gpu_check/.
#   scripts/gpu_check.sh            in the environment of scripts/test.sh
#   PYTHON=python scripts/gpu_check.sh
set -euo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repository"
python="${PYTHON:-$repository/.venv/bin/python}"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "error: there is no NVIDIA GPU here")'
mkdir -p gpu_check
echo "== correctness"
"$python" -m pytest -p no:cacheprovider tests/runtime/kernels 2>&1 | tee gpu_check/tests.txt
echo "== memory errors on small shapes"
if command -v compute-sanitizer > /dev/null; then
    compute-sanitizer --error-exitcode 1 "$python" -m pytest -p no:cacheprovider -x \
        tests/runtime/kernels/gpu/test_gpu_linears.py -k "whole_numbers or neighbours" 2>&1 | tail -n 5
else
    echo "compute-sanitizer is not there: not checked"
fi
echo "== speeds"
"$python" scripts/bench_kernels.py --json gpu_check/kernels.json
