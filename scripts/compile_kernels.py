"""Compiles every GPU kernel in every configuration that launches ask for, without a GPU, and checks the machine code.

Host wrappers run over empty tensors and their launches are recorded; each distinct one is compiled. For each
architecture: nothing may spill, shared memory must fit, products must be on tensor cores, weights must be loaded in
wide words, and packed codes must not be converted one by one. Each result is printed as it comes; Ctrl-C ends with the
results so far. Exits with status 1 when something fails or is missing.

    python scripts/compile_kernels.py
    python scripts/compile_kernels.py --arch 90 --only skinny --json kernels.json
    python scripts/compile_kernels.py --slice 3/40
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from benchmarking.builds import Build, Built, all_builds, build, worst_of_each_kernel
from benchmarking.tables import print_with_markdown, write_json
from rich.console import Console

ARCHITECTURES = (80, 90)


def one_of_many(text: str) -> slice:
    """The builds that "3/40" names: the third and every 40th after it."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"{text}: there is no such slice")
    return slice(number - 1, None, count)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, help="compute capabilities: 80 90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--slice", type=one_of_many, default=slice(None), metavar="K/N", help="one Nth of the builds")
    parser.add_argument("--combinations", action="store_true", help="every launch of kernels with many, too: hours")
    parser.add_argument("--list", action="store_true", help="print the builds instead of compiling them")
    parser.add_argument("--json", type=Path, help="write registers, memory and instructions here")
    return parser.parse_args(arguments)


def compile_all(builds: Sequence[Build], jobs: int) -> Iterator[Built]:
    """Yields results as they come; builds that have not begun when the consumer stops are cancelled."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        for done in as_completed([pool.submit(build, each) for each in builds]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def print_all(builds: Sequence[Build], jobs: int, console: Console) -> list[Built]:
    """Compiles and prints until all is done or Ctrl-C is pressed."""
    results: list[Built] = []
    try:
        for result in compile_all(builds, jobs):
            results.append(result)
            style = "bold red" if result.problems else None
            console.print(f"{len(results)}/{len(builds)} {result}", style=style, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"interrupted: {len(builds) - len(results)} builds are missing")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
    known = [
        each for arch in options.arch for each in all_builds(arch, options.combinations) if options.only in each.name
    ]
    builds = known[options.slice]
    if options.list:
        console.print("\n".join(f"sm_{each.arch} {each.name}" for each in builds), markup=False, soft_wrap=True)
        return 0
    results = print_all(builds, options.jobs, console)
    failed = sum(bool(result.problems) for result in results)
    if results:
        print_with_markdown("The most that a build takes", worst_of_each_kernel(results), console)
    console.print(f"{len(results)} builds, {failed} failed")
    if options.json:
        write_json(options.json, {"builds": [asdict(result) for result in results]})
    return 0 if results and len(results) == len(builds) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
