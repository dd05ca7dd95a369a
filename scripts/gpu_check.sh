#!/usr/bin/env bash
# Runs everything that needs an NVIDIA GPU, in three parts of under nine minutes each.
#   scripts/gpu_check.sh                     all parts
#   scripts/gpu_check.sh correctness         kernels, CUDA graphs and answers; compute-sanitizer
#   scripts/gpu_check.sh kernels             speed of single kernels, and the tuner
#   scripts/gpu_check.sh models              speed of whole models
#   scripts/gpu_check.sh --dry-run           prints the steps, their limits in seconds and their commands
#   scripts/gpu_check.sh --cache FILE PART   begins with compiled kernels; default: the newest kernels.tar.xz in gpu_check,
#                                            OUT, or the folder of a part in one of them
# A step that fails or runs out of time does not stop the others; the status is 1 in the end. Each part writes at most
# eight files into gpu_check/PART as it goes on: summary.json says what passed, failed or ran out of time, also when the
# part is killed. Its file kernels.tar.xz has the kernels that were compiled: the next part finds them there, also on
# another machine of this kind to which gpu_check is copied.
#   PYTHON   interpreter; default: .venv/bin/python if there is one, else python3
#   OUT      folder instead of gpu_check
set -uo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repository" || exit 1
python="${PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python="$repository/.venv/bin/python"; } || python=python3
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/compress-triton-cache}"
exec "$python" scripts/gpu_check.py "$@"
