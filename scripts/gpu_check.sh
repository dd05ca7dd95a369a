#!/usr/bin/env bash
# Answers questions about speed and correctness on an NVIDIA GPU, each within minutes of a rented card.
#   scripts/gpu_check.sh                     quick: tests, a model, a profile, and the main tables, in under four minutes
#   scripts/gpu_check.sh QUESTION...         models, forms, pages, serve, compress, mixtures, sanitize, overlap: one each
#   scripts/gpu_check.sh --dry-run [...]     prints the steps, their limits in seconds and their commands
#   scripts/gpu_check.sh --rehearse [...]    runs the same steps on a CPU, at tiny sizes
#   scripts/gpu_check.sh --cache FILE [...]  begins with compiled kernels; default: the newest kernels.tar.xz in gpu_check,
#                                            OUT, or the folder of a question in one of them
# A step that fails or runs out of time does not stop the others; the status is 1 in the end. Each question writes four
# files into gpu_check/QUESTION as it goes on: summary.json says what passed, failed or ran out of time, rows.jsonl has
# every figure from the moment it was measured, log.txt what was printed, and kernels.tar.xz the kernels that were
# compiled: the next run finds them there, also on another machine of this kind to which gpu_check is copied. Packages in
# gpu_check/packages (pip install --target) are found, too.
#   PYTHON   interpreter; default: .venv/bin/python if there is one, else python3
#   OUT      folder instead of gpu_check
set -uo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repository" || exit 1
python="${PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python="$repository/.venv/bin/python"; } || python=python3
export PYTHONPATH="$repository:$repository/gpu_check/packages${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/compress-triton-cache}"
exec "$python" scripts/gpu_check.py "$@"
