#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in under ten minutes: correctness of all kernels on it, then their speeds.
#   scripts/gpu_check.sh             in the environment of scripts/test.sh
#   PYTHON=python scripts/gpu_check.sh
#   scripts/gpu_check.sh --dry-run   prints the parts, their limits in seconds and their commands
# A part that fails or runs out of time does not keep the others from running; the status is 1 in the end. What each
# printed, the figures and summary.json are in gpu_check/.
set -uo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repository" || exit 1
python="${PYTHON:-$repository/.venv/bin/python}"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
dry_run=""
[ "${1:-}" = --dry-run ] && dry_run=yes
results=gpu_check/parts.tsv
tests=("$python" -m pytest -p no:cacheprovider -m "")
small=(tests/runtime/backends/triton/test_linear.py tests/runtime/backends/triton/test_attention.py)
few=(-k "whole_numbers or neighbours or touched" -x)

# part NAME SECONDS COMMAND...: runs it, notes how it ended.
part() {
    local name="$1" limit="$2" begun=$SECONDS status
    shift 2
    if [ -n "$dry_run" ]; then
        printf '%s\t%s\t%s\n' "$name" "$limit" "$*"
        return
    fi
    printf '== %s\n' "$name"
    timeout --kill-after 10 "$limit" "$@" > "gpu_check/$name.txt" 2>&1
    status=$?
    tail -n 3 "gpu_check/$name.txt"
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - begun))" "$limit" >> "$results"
}

# skipped NAME WHY: notes a part that cannot run here.
skipped() {
    if [ -n "$dry_run" ]; then
        printf '%s\t-\t%s\n' "$1" "$2"
    else
        printf '%s\t%s\t0\t0\n' "$1" "$2" >> "$results"
    fi
}

if [ -z "$dry_run" ]; then
    "$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "error: there is no NVIDIA GPU here")' || exit 1
    rm -rf gpu_check
    mkdir gpu_check
fi

mapfile -t on_gpu < <(find tests/runtime/backends/triton -name 'test_*.py' -not -name 'test_real_shapes.py' | sort)
beside=(tests/compress/methods/test_column_solver_triton.py tests/compress/common/test_ieee_div.py
    tests/runtime/backends/torch/test_semi_structured.py tests/runtime/runner/test_cuda_graphs.py
    tests/runtime/runner/test_captured_kernels.py tests/runtime/runner/test_tokens_like_on_cpu.py)
part kernels 180 "${tests[@]}" "${on_gpu[@]}" "${beside[@]}"
part real-shapes 60 "${tests[@]}" tests/runtime/backends/triton/test_real_shapes.py
if command -v compute-sanitizer > /dev/null; then
    # Without torch's cache each tensor is an allocation of its own, whose ends are seen.
    for tool in memcheck racecheck; do
        part "$tool" 50 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
            "${tests[@]}" "${small[@]}" "${few[@]}"
    done
else
    skipped memcheck "compute-sanitizer is not there"
    skipped racecheck "compute-sanitizer is not there"
fi
part bench-kernels 100 "$python" scripts/bench_kernels.py gpu --shapes 8192x8192 28672x4096 --tokens 1 16 256 2048 \
    --contexts 4096 32768 --json gpu_check/kernels.json
part bench-gpu 160 "$python" scripts/bench_kernels.py gpu-models --shape 1.1b --batches 1 8 --requests 32 --rounds 1 \
    --json gpu_check/models.json --markdown gpu_check/models.md

[ -n "$dry_run" ] || exec "$python" scripts/benchmarking/check_summary.py "$results" gpu_check/summary.json
