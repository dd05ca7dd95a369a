"""Answers questions that need an NVIDIA GPU; `scripts/gpu_check.sh` starts it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from checking.questions import CARD, QUESTIONS, TINY, Check, newest_archive, steps_of
from checking.steps import run_steps


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"{', '.join(QUESTIONS)}; default: quick")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the steps with this in their names alone")
    parser.add_argument("--dry-run", action="store_true", help="print the steps, their limits and their commands")
    parser.add_argument("--rehearse", action="store_true", help="run the same steps on a CPU, at tiny sizes")
    parser.add_argument("--cache", type=Path, help="kernels compiled before; default: the newest in gpu_check and OUT")
    options = parser.parse_args(arguments)
    out = Path(os.environ.get("OUT", "gpu_check"))
    archive = options.cache or newest_archive(Path("gpu_check"), out)
    asked = options.questions or ["quick"]
    if unknown := [name for name in asked if name not in QUESTIONS]:
        sys.exit(f"error: {unknown[0]} is not a question. Questions: {', '.join(QUESTIONS)}.")
    passed = True
    for name in asked:
        check = Check(sys.executable, out / name, TINY if options.rehearse else CARD)
        try:
            steps = steps_of(name, check, os.environ["TRITON_CACHE_DIR"], archive, options.only)
        except ValueError as error:
            sys.exit(f"error: {error}")
        if options.dry_run:
            for step in steps:
                print(name, step.name, step.seconds, shlex.join(step.command), sep="\t")
        else:
            passed &= run_steps(steps, check.out, {"question": name}, archive)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
