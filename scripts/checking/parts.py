"""Steps of the check on a GPU, in three parts of under nine minutes each."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from checking.steps import Step

REPOSITORY = Path(__file__).parents[2]
PART_SECONDS = 525
"""For all steps of a part: nine minutes without the start, and a step that has to be killed."""
ARCHIVE = "kernels.tar.xz"
CACHE_SECONDS = {"unpack": 15, "pack": 25}
"""A thousand kernels took 8 s of processor time to pack, and 6 to unpack."""
ON_GPU, WHOLE_GPU = r"\bgpu\b[,):]|torch\.cuda\.is_available\(\)", r"mark\.whole_gpu\b"
"""Patterns of files with tests that run kernels, by the fixture `gpu` or only where there is one, and with tests that
take all of its memory."""
SHAPES = ("28672x4096", "4096x14336")
"""The two largest linears of a decoder layer of 8 billion parameters."""
TOKENS = (1, 16, 64, 256, 8, 128, 2048)


def newest_archive(*folders: Path) -> Path | None:
    """The newest archive of kernels that lies in one of some folders, or that a part has written there."""
    found = {file for folder in folders for each in (ARCHIVE, f"*/{ARCHIVE}") for file in folder.glob(each)}
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def parts(python: str, out: Path, kernels: Path, archive: Path | None) -> Mapping[str, tuple[Step, ...]]:
    """Steps by part.

    Args:
        out: each part writes into a folder of its name in here.
        kernels: Triton's cache folder.
        archive: compiled kernels that were brought along; it need not exist.
    """

    def cache(verb: str, file: Path) -> Step:
        return Step(
            verb, CACHE_SECONDS[verb], (python, "scripts/checking/kernel_archive.py", verb, str(kernels), str(file))
        )

    facts = Step("facts", 25, (python, "scripts/checking/facts.py"), is_required=True)
    begin = (facts, cache("unpack", archive)) if archive is not None and archive.is_file() else (facts,)
    made = {"correctness": correctness, "kernels": kernel_speed, "models": model_speed}
    return {
        name: (*begin, *steps(python, out / name, cache("pack", out / name / ARCHIVE))) for name, steps in made.items()
    }


def correctness(python: str, out: Path, pack: Step) -> tuple[Step, ...]:
    """Kernels, CUDA graphs and answers; and, without the memory of others, what takes all of the GPU."""
    tiny = (python, "scripts/sanitize_kernels.py")
    return (
        Step("tiny", 65, tiny),
        Step("tests", 215, tests(python, workers(), "not whole_gpu", ON_GPU), environment=FOR_TESTS),
        pack,
        Step("whole-gpu", 50, tests(python, 1, "whole_gpu", WHOLE_GPU), environment=FOR_TESTS),
        *(Step(tool, 65, sanitized(tool, tiny), SANITIZER, environment=UNCACHED) for tool in ("memcheck", "racecheck")),
    )


SANITIZER = "compute-sanitizer"
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Without torch's cache each tensor is an allocation of its own, whose ends are checked."""


def sanitized(tool: str, command: tuple[str, ...]) -> tuple[str, ...]:
    return SANITIZER, "--tool", tool, "--error-exitcode", "1", *command


FOR_TESTS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests/support'}"}


def workers() -> int:
    """Processes that compile and run tests: all cores but two."""
    return max(2, (os.cpu_count() or 1) - 2)


def tests(python: str, processes: int, chosen: str, pattern: str) -> tuple[str, ...]:
    """Both tiers of the tests in files with a pattern. A worker that a kernel breaks or blocks is replaced."""
    shown = ("-v", "-v", "--tb", "short", "-p", "no:cacheprovider", "-p", "shared_gpu")
    limits = ("--continue-on-collection-errors", "--timeout", "100", "--timeout-method", "thread")
    shared = ("-n", str(processes), "--dist", "worksteal", "-m", chosen)
    return (python, "-m", "pytest", *shown, *limits, *shared, *files_with(pattern))


def files_with(pattern: str) -> list[str]:
    """Test files with a pattern, wherever they are."""
    found = (file for file in sorted((REPOSITORY / "tests").rglob("test_*.py")) if re.search(pattern, file.read_text()))
    return [str(file.relative_to(REPOSITORY)) for file in found]


def kernel_speed(python: str, out: Path, pack: Step) -> tuple[Step, ...]:
    bench = (python, "scripts/bench_kernels.py", "gpu")
    measured = ("--shapes", *SHAPES, "--tokens", *map(str, TOKENS), "--json", str(out / "bench.json"))
    tune = (python, "scripts/tune_kernels.py", "--shapes", *SHAPES, "--out", str(out / "table.json"))
    few = ("--shapes", SHAPES[0], "--tokens", "1", "64", "--contexts", "4096", "--batches", "16")
    return (
        Step("bench", 220, (*bench, *measured)),
        Step("tune", 170, tune),
        pack,
        Step("ncu", 60, (*PROFILER, *bench, "--kernels", "int4 g128", "--no-peers", *few), PROFILER[0]),
    )


PROFILER = (
    *("ncu", "--clock-control", "none", "--kernel-name", "regex:a16|paged|gemm$"),
    *("--filter-mode", "per-launch-config", "--launch-count", "1"),
    *("--section", "SpeedOfLight", "--section", "LaunchStats", "--section", "Occupancy"),
)
"""One launch of each of our kernels in each configuration, at the clocks that the GPU has by itself."""


def model_speed(python: str, out: Path, pack: Step) -> tuple[Step, ...]:
    bench = (python, "scripts/bench_kernels.py", "gpu-models", "--requests", "32", "--rounds", "1")

    def step(name: str, seconds: int, shape: str) -> Step:
        files = ("--json", str(out / f"{name}.json"), "--markdown", str(out / f"{name}.md"))
        return Step(name, seconds, (*bench, "--shape", shape, "--most-seconds", str(seconds * 2 // 5), *files))

    return step("small", 130, "1.1b"), step("large", 320, "8b"), pack
