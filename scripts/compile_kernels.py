"""Compiles every GPU kernel that served decoders of many families and forms launch, without a GPU, and checks the
machine code.

Decoders of real sizes are served without numbers: each goes through its warm-up, prompts, decodes and sampling, and
Triton compiles what it would on that GPU. For each architecture: nothing may spill, shared memory must fit, products
must be on tensor cores, weights must be loaded in wide words, packed codes must not be converted one by one, and no
step after the warm-up may need another build. Each result is printed as it comes; Ctrl-C ends with the results so far.
Exits with status 1 when something fails or is missing.

    python scripts/compile_kernels.py
    python scripts/compile_kernels.py --arch 90 --cases mixture latents --json kernels.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarking.gpu.builds import RULES, Built, inspect, worst_of_each_kernel
from benchmarking.gpu.other_launches import OTHERS, launch_others
from benchmarking.gpu.without_gpu import A100, CASES, H200, Build, Card, processes_that_compile, serve
from benchmarking.tables import print_with_markdown, write_json
from rich.console import Console

CARDS = {80: A100, 90: H200}


@dataclass(frozen=True)
class Found:
    """Builds of one case on one GPU.

    Attributes:
        problem: why there are no more; empty where all is well.
    """

    case: str
    builds: list[Build] = field(default_factory=list)
    problem: str = ""


def builds_of(case: str, card: Card) -> Found:
    """Serves a case; an error is a problem like any other."""
    try:
        if case in OTHERS:
            return Found(case, launch_others(case, card))
        served = serve(case, card)
    except Exception as error:  # whatever the compiler raises is the finding
        return Found(case, problem=f"fails: {str(error)[-500:]}")
    late = ", ".join(build.kernel for build in served.late)
    return Found(case, served.builds, late and f"{late} compiled after the warm-up")


def results_of(pool: Executor, cards: Sequence[Card], cases: Sequence[str]) -> Iterator[Built]:
    """Yields every build once, and a result for each case that fails, as they come."""
    seen = set()
    servings = [pool.submit(builds_of, case, card) for card in cards for case in cases]
    with ThreadPoolExecutor(2) as threads:  # the tools that take machine code apart are programs of their own
        for found in (each.result() for each in as_completed(servings)):
            if found.problem:
                yield Built(found.case, 0, 0, 0, 0, problems=(found.problem,))
            builds = {build.identity: build for build in found.builds if build.identity not in seen}
            seen |= builds.keys()
            yield from threads.map(inspect, builds.values())


def print_all(results: Iterator[Built], console: Console) -> tuple[list[Built], bool]:
    """Prints results until there are no more or Ctrl-C is pressed; returns them, and whether they are all."""
    done: list[Built] = []
    try:
        for result in results:
            done.append(result)
            style = "bold red" if result.problems else None
            console.print(f"{len(done)} {result}", style=style, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("interrupted: the rest is missing")
        return done, False
    return done, True


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(CARDS), choices=CARDS, help="compute capabilities")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="PART", help="those whose name contains a part")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--list", action="store_true", help="print the names of the cases instead")
    parser.add_argument("--json", type=Path, help="write registers, memory and instructions here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
    cases = [name for name in (*CASES, *OTHERS) if any(part in name for part in options.cases)]
    if options.list:
        console.print("\n".join(cases), markup=False, soft_wrap=True)
        return 0
    with processes_that_compile(options.jobs) as pool:
        results, complete = print_all(results_of(pool, [CARDS[arch] for arch in options.arch], cases), console)
        pool.shutdown(cancel_futures=True)
    built = [result for result in results if result.arch]
    missing = set(RULES) - {result.kernel for result in built} if options.cases == [""] else set()
    if built:
        print_with_markdown("The most that a build takes", worst_of_each_kernel(built), console)
    failed = sum(bool(result.problems) for result in results)
    console.print(f"{len(built)} builds, {failed} failed" + "".join(f"; {kernel} is missing" for kernel in missing))
    if options.json:
        write_json(options.json, {"builds": [asdict(result) for result in results]})
    return 0 if complete and built and not failed and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
