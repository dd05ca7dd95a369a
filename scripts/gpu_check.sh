#!/usr/bin/env bash
# Runs everything that needs an NVIDIA GPU, in three parts of under ten minutes each.
#   scripts/gpu_check.sh                all parts
#   scripts/gpu_check.sh tests          correctness: kernels, CUDA graphs, compute-sanitizer
#   scripts/gpu_check.sh kernels        speed of single kernels, and the tuner
#   scripts/gpu_check.sh models         speed of whole models
#   scripts/gpu_check.sh --dry-run      prints the steps, their limits in seconds and their commands
# A step that fails or runs out of time does not stop the others; the status is 1 in the end. Logs, figures and
# summary.json of each part are written to gpu_check/PART as it goes on.
#   PYTHON   interpreter; default: .venv/bin/python if there is one, else python3
#   OUT      folder instead of gpu_check
# Triton's cache is one folder ($TRITON_CACHE_DIR) for all steps. The part `tests` packs it into triton_cache.tar.gz;
# unpacked at the same path on another machine it saves compiling again.
set -uo pipefail

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$repository" || exit 1
python="${PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python="$repository/.venv/bin/python"; } || python=python3
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/compress-triton-cache}"
top="${OUT:-gpu_check}"
dry_run="" parts=()
for argument in "$@"; do
    case "$argument" in
        --dry-run) dry_run=yes ;;
        tests | kernels | models) parts+=("$argument") ;;
        *) printf 'error: %s is no part. Parts: tests, kernels, models.\n' "$argument" >&2 && exit 2 ;;
    esac
done
[ "${#parts[@]}" -gt 0 ] || parts=(tests kernels models)

# step NAME SECONDS COMMAND...: runs it with its output in a file, and records its status.
step() {
    local name="$1" limit="$2" begun=$SECONDS status
    shift 2
    if [ -n "$dry_run" ]; then
        printf '%s\t%s\t%s\t%s\n' "$part" "$name" "$limit" "$*"
        return
    fi
    printf '== %s\n' "$name"
    timeout --kill-after 10 "$limit" "$@" > "$out/$name.txt" 2>&1
    status=$?
    tail -n 3 "$out/$name.txt"
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - begun))" "$limit" >> "$out/steps.tsv"
}

# skipped NAME REASON: records a step that cannot run here.
skipped() {
    if [ -n "$dry_run" ]; then
        printf '%s\t%s\t-\t%s\n' "$part" "$1" "$2"
    else
        printf '%s\t%s\t0\t0\n' "$1" "$2" >> "$out/steps.tsv"
    fi
}

run_tests() {
    local pytest=("$python" -m pytest -p no:cacheprovider --continue-on-collection-errors -m "")
    # Compiling takes most of the time, so kernel tests share all cores. Those below size pools by the free memory.
    local workers on_gpu
    workers="$(($(getconf _NPROCESSORS_ONLN) > 4 ? $(getconf _NPROCESSORS_ONLN) - 2 : 2))"
    mapfile -t on_gpu < <(find tests/runtime/backends/triton -name 'test_*.py' -not -name 'test_real_shapes.py' | sort)
    step kernels 160 "${pytest[@]}" -n "$workers" --dist worksteal "${on_gpu[@]}" tests/runtime/backends/torch/test_semi_structured.py \
        tests/compress/methods/test_column_solver_triton.py tests/compress/common/test_ieee_div.py
    step graphs 200 "${pytest[@]}" tests/runtime/runner/test_cuda_graphs.py tests/runtime/runner/test_captured_kernels.py \
        tests/runtime/runner/test_tokens_like_on_cpu.py tests/runtime/backends/triton/test_real_shapes.py
    if command -v compute-sanitizer > /dev/null; then
        # Without torch's cache each tensor is an allocation of its own, whose ends are checked.
        for tool in memcheck racecheck; do
            step "$tool" 75 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 \
                "$python" scripts/sanitize_kernels.py
        done
    else
        skipped memcheck "compute-sanitizer is not installed"
        skipped racecheck "compute-sanitizer is not installed"
    fi
    [ -n "$dry_run" ] || tar -czf "$out/triton_cache.tar.gz" -C "$TRITON_CACHE_DIR" . 2> /dev/null
}

run_kernels() {
    local shapes=(28672x4096 4096x14336)
    step bench 240 "$python" scripts/bench_kernels.py gpu --shapes "${shapes[@]}" --tokens 1 8 16 64 128 256 2048 \
        --kernels "int4 g128" int8 --contexts 4096 32768 --json "$out/bench.json"
    step tune 240 "$python" scripts/tune_kernels.py --shapes "${shapes[@]}" --out "$out/table.json"
    if command -v ncu > /dev/null; then
        step ncu 55 ncu --section SpeedOfLight --kernel-name 'regex:gemm|product|attention' --launch-count 4 \
            "$python" scripts/bench_kernels.py gpu --shapes "${shapes[0]}" --tokens 1 --kernels "int4 g128" --contexts 4096
    else
        skipped ncu "ncu is not installed"
    fi
}

run_models() {
    local sizes=(--batches 1 8 --requests 32 --rounds 1)
    step small 180 "$python" scripts/bench_kernels.py gpu-models --shape 1.1b "${sizes[@]}" \
        --json "$out/small.json" --markdown "$out/small.md"
    step large 355 "$python" scripts/bench_kernels.py gpu-models --shape 8b "${sizes[@]}" \
        --json "$out/large.json" --markdown "$out/large.md"
}

if [ -z "$dry_run" ]; then
    "$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "error: there is no NVIDIA GPU here")' || exit 1
fi
status=0
for part in "${parts[@]}"; do
    out="$top/$part"
    [ -n "$dry_run" ] || { rm -rf "$out" && mkdir -p "$out"; }
    "run_$part"
    [ -n "$dry_run" ] || "$python" scripts/check_summary.py "$out" || status=1
done
exit "$status"
