"""Questions that a rented GPU answers within minutes: the steps of each, sorted by worth, with their limits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from checking.steps import Step

REPOSITORY = Path(__file__).parents[2]
ARCHIVE, ROWS = "kernels.tar.xz", "rows.jsonl"
"""Files of a question: the kernels that were compiled, and figures, a line of JSON each."""
ON_GPU, WHOLE_GPU = r"\bgpu\b[,):]|torch\.cuda\.is_available\(\)", r"mark\.whole_gpu\b"
"""Patterns of files with tests that run kernels, by the fixture `gpu` or only where there is one, and with tests that
take all of its memory."""
FOR_TESTS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests/support'}"}
WEB = ("fastapi", "uvicorn", "aiohttp")


@dataclass(frozen=True)
class Sizes:
    """Sizes of all steps: those for a card, or tiny ones by which a CPU rehearses them.

    Attributes:
        models, compression: options of `bench_kernels.py gpu-models` and `bench_compress.py`.
        served: shape of a model whose tokens all have a text.
        loads, stub: options of `gpu-serve`, and of `bench_serve.py streaming`, whose model costs nothing.
        mixtures: shapes with how many of their layers.
        shapes, tokens: of linears.
        contexts, batches, span: keys, sequences, and tokens of a chunk of a prompt, of attention.
        replays: of captured steps whose kernels overlap.
        tests: files; none: all that use a GPU.
        patience: factor of the limits.
    """

    device: str
    models: tuple[str, ...]
    served: str
    loads: tuple[str, ...]
    stub: tuple[str, ...]
    mixtures: tuple[tuple[str, str], ...]
    compression: tuple[str, ...]
    shapes: tuple[str, ...]
    tokens: tuple[str, ...]
    contexts: tuple[str, ...]
    batches: tuple[str, ...]
    span: str
    replays: str
    tests: tuple[str, ...] = ()
    patience: int = 1


CARD = Sizes(
    "cuda",
    ("--shape", "8b", "--rounds", "1", "--requests", "64"),
    "8b-8k",
    (),
    ("--clients", "64", "--requests", "128"),
    (("30b-a3b", "12"), ("9b-hybrid", "16")),
    ("--shape", "8b", "--layers", "2", "--num-calibration-samples", "128", "--max-seq-length", "2048"),
    ("28672x4096", "4096x14336"),
    ("1", "16", "64", "256", "8", "2048"),
    ("4096", "32768"),
    ("1", "16"),
    "2048",
    "1000",
)
TINY = Sizes(
    "cpu",
    ("--shape", "tiny", "--short"),
    "tiny",
    ("--load", "1", "2", "8", "4", "--load", "2", "4", "8:16", "4:8"),
    ("--clients", "2", "--requests", "2", "--tokens", "8"),
    (("tiny-mixture", "2"), ("tiny-hybrid", "4")),
    ("--shape", "tiny", "--num-calibration-samples", "2", "--max-seq-length", "64"),
    ("128x256",),
    ("1", "20"),
    ("16",),
    ("1",),
    "8",
    "3",
    ("tests/runtime/backends/triton/test_split_join.py",),
    patience=10,
)


@dataclass(frozen=True)
class Check:
    """Makes the steps of a question, whose files lie in `out`."""

    python: str
    out: Path
    sizes: Sizes = CARD

    def bench(self, name: str, seconds: int, script: str, *options: str, packages: tuple[str, ...] = ()) -> Step:
        """Returns a step of a benchmark that writes rows."""
        command = (self.python, f"scripts/{script}.py", *options, "--device", self.sizes.device)
        interpreted = {"TRITON_INTERPRET": "1"} if self.sizes.device == "cpu" and "gpu" in options else {}
        rows = ("--rows", str(self.out / ROWS))
        return Step(name, seconds, (*command, *rows), environment=interpreted, packages=packages)

    def model(self, name: str, seconds: int, *options: str) -> Step:
        given = (*self.sizes.models, "--most-seconds", str(seconds * self.sizes.patience - 5), *options)
        return self.bench(name, seconds, "bench_kernels", "gpu-models", *given)

    def tables(self, name: str, seconds: int, kernels: tuple[str, ...], pages: tuple[str, ...] = ()) -> Step:
        """Returns a step with linears by some kernels, and attention over some forms of pages."""
        linears = ("--shapes", *self.sizes.shapes, "--tokens", *self.sizes.tokens, "--no-peers")
        attention = ("--contexts", *self.sizes.contexts, "--batches", *self.sizes.batches, "--span", self.sizes.span)
        chosen = ("--kernels", *kernels, "--pages", *pages)
        return self.bench(name, seconds, "bench_kernels", "gpu", *chosen, *linears, *attention)

    def tests(self, name: str, seconds: int, processes: int, chosen: str, pattern: str) -> Step:
        """Returns a step of both tiers of tests. A worker that a kernel breaks or blocks is replaced."""
        shown = ("-v", "-v", "--tb", "short", "-p", "no:cacheprovider", "-p", "shared_gpu")
        limits = ("--continue-on-collection-errors", "--timeout", "60", "--timeout-method", "thread")
        files = self.sizes.tests or files_with(pattern)
        shared = ("-n", str(min(processes, len(files))), "--dist", "worksteal", "-m", chosen)
        command = (self.python, "-m", "pytest", *shown, *limits, *shared, *files)
        return Step(name, seconds, command, environment=FOR_TESTS)

    def cache(self, verb: str, folder: str, archive: Path) -> Step:
        """Returns a step that unpacks or packs a thousand compiled kernels, which took 6 and 8 s."""
        command = (self.python, "scripts/checking/kernel_archive.py", verb, folder, str(archive))
        return Step(verb, 12 if verb == "unpack" else 20, command)


def files_with(pattern: str) -> list[str]:
    """Test files with a pattern, wherever they are."""
    found = (file for file in sorted((REPOSITORY / "tests").rglob("test_*.py")) if re.search(pattern, file.read_text()))
    return [str(file.relative_to(REPOSITORY)) for file in found]


def workers() -> int:
    """Processes that compile and run tests: all cores but two."""
    return max(2, (os.cpu_count() or 1) - 2)


def quick(check: Check) -> tuple[Step, ...]:
    """Returns steps for every change: tests, a model with the profile of a mixed step, the two main tables."""
    return (
        check.tests("tests", 92, workers(), "not whole_gpu", ON_GPU),
        check.model("model", 62, "--contenders", "engine int4", "--profile"),
        check.tables("tables", 36, ("int4 g128",), ("int4", "16bit")),
    )


def models(check: Check) -> tuple[Step, ...]:
    names = ("engine int4", "engine bf16", "engine int4, int4 KV", "transformers, continuous batching", "engine int8")
    return tuple(check.model(name, 85, "--contenders", name) for name in names)


def forms(check: Check) -> tuple[Step, ...]:
    return (
        check.tables("humming", 90, ("int4 g128", "humming int4 g128", "int8", "humming int8")),
        check.tables("eight bits", 110, ("fp8 w8a8", "w8a8", "fp8", "fp8 blocks", "mxfp8")),
        check.tables("four bits", 90, ("nvfp4", "nf4", "iq4_nl", "int2 g64")),
        check.tables("exl3", 40, ("exl3",)),
    )


def pages(check: Check) -> tuple[Step, ...]:
    return (check.tables("pages", 90, (), ("int4", "int8", "fp8", "16bit")),)


def serve(check: Check) -> tuple[Step, ...]:
    given = ("gpu-serve", "--shape", check.sizes.served, *check.sizes.loads)
    stub = (check.python, "scripts/bench_serve.py", "streaming", *check.sizes.stub)
    return check.bench("http", 120, "bench_kernels", *given, packages=WEB), Step("stub", 70, stub, packages=WEB)


def compress(check: Check) -> tuple[Step, ...]:
    methods = ("--methods", "gptq", "awq", "signround", "--most-seconds", str(140 * check.sizes.patience))
    return (check.bench("methods", 450, "bench_compress", *check.sizes.compression, *methods),)


def mixtures(check: Check) -> tuple[Step, ...]:
    return tuple(
        check.model(shape, 120, "--shape", shape, "--layers", layers, "--contenders", "engine int4", "--profile")
        for shape, layers in check.sizes.mixtures
    )


def sanitize(check: Check) -> tuple[Step, ...]:
    """Returns steps that look for accesses beyond tensors and races, and tests that take all of the memory."""
    tiny = (check.python, "scripts/sanitize_kernels.py")
    # Without torch's cache each tensor is an allocation of its own, whose ends are checked.
    uncached, tool = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "compute-sanitizer"
    return (
        Step("tiny", 65, tiny),
        *(
            Step(kind, 120, (tool, "--tool", kind, "--error-exitcode", "1", *tiny), needs=tool, environment=uncached)
            for kind in ("racecheck", "memcheck")
        ),
        check.tests("whole-gpu", 60, 1, "whole_gpu", WHOLE_GPU),
    )


def overlap(check: Check) -> tuple[Step, ...]:
    """Returns steps that replay steps of kernels that overlap, and look for races in them."""
    given = ("--shape", check.sizes.served, "--replays", check.sizes.replays)
    tool, tiny = "compute-sanitizer", ("scripts/check_overlap.py", "--shape", "tiny", "--replays", "2")
    racecheck = (tool, "--tool", "racecheck", "--error-exitcode", "1", check.python, *tiny)
    return (
        check.bench("replays", 130, "check_overlap", *given),
        Step("racecheck", 60, (*racecheck, "--device", check.sizes.device), needs=tool),
    )


QUESTIONS: Mapping[str, Callable[[Check], tuple[Step, ...]]] = {
    each.__name__: each for each in (quick, models, forms, pages, serve, compress, mixtures, sanitize, overlap)
}


def steps_of(question: str, check: Check, kernels: str, archive: Path | None, only: str = "") -> tuple[Step, ...]:
    """Returns the steps of a question, between those that read and write compiled kernels.

    Args:
        kernels: Triton's cache folder.
        archive: compiled kernels that were brought along; it need not exist.
        only: part of the names of the steps to keep.

    Raises:
        ValueError: no step has such a name.
    """
    asked = [step for step in QUESTIONS[question](check) if only in step.name]
    if not asked:
        raise ValueError(f"{question} has no step with {only!r} in its name")
    facts = Step("facts", 15, (check.python, "scripts/checking/facts.py", check.sizes.device), is_required=True)
    begin = (check.cache("unpack", kernels, archive),) if archive is not None and archive.is_file() else ()
    steps = facts, *begin, *asked, check.cache("pack", kernels, check.out / ARCHIVE)
    return tuple(replace(step, seconds=step.seconds * check.sizes.patience) for step in steps)


def newest_archive(*folders: Path) -> Path | None:
    """Returns the newest archive of kernels that lies in one of some folders, or that a question has written there."""
    found = {file for folder in folders for each in (ARCHIVE, f"*/{ARCHIVE}") for file in folder.glob(each)}
    return max(found, key=lambda file: file.stat().st_mtime, default=None)
