"""Compiles every GPU kernel in every configuration that can be chosen, without a GPU, and checks what comes out.

For each architecture: nothing may spill, shared memory must fit, products must be on tensor cores, weights must be
loaded in wide words, and packed codes must not be converted one by one. Exits with status 1 when something fails.

    python scripts/compile_kernels.py
    python scripts/compile_kernels.py --arch 90 --only narrow --json kernels.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from benchmarking.kernel_builds import Build, Built, all_builds, build
from benchmarking.tables import write_json
from rich.console import Console

ARCHITECTURES = (80, 90)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, help="compute capabilities: 80 90")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--every", type=int, default=1, help="of the builds, only every so many")
    parser.add_argument("--json", type=Path, help="write registers, memory and instructions here")
    return parser.parse_args(arguments)


def compile_all(builds: Sequence[Build], jobs: int) -> list[Built]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(build, builds))


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
    builds = [each for arch in options.arch for each in all_builds(arch) if options.only in each.name]
    results = compile_all(builds[:: options.every], options.jobs)
    for result in results:
        console.print(str(result), style="bold red" if result.problems else None)
    failed = sum(bool(result.problems) for result in results)
    console.print(f"{len(results)} builds, {failed} failed")
    if options.json:
        write_json(options.json, {"builds": [asdict(result) for result in results]})
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
