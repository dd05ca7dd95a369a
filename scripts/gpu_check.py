"""Runs everything that needs an NVIDIA GPU; `scripts/gpu_check.sh` starts it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from checking.parts import PART_SECONDS, newest_archive, parts
from checking.steps import run_part


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="correctness, kernels, models; default: all")
    parser.add_argument("--dry-run", action="store_true", help="print the steps, their limits and their commands")
    parser.add_argument("--cache", type=Path, help="kernels compiled before; default: the newest in gpu_check and OUT")
    options = parser.parse_args(arguments)
    out = Path(os.environ.get("OUT", "gpu_check"))
    archive = options.cache or newest_archive(Path("gpu_check"), out)
    known = parts(sys.executable, out, Path(os.environ["TRITON_CACHE_DIR"]), archive)
    if unknown := [name for name in options.parts if name not in known]:
        sys.exit(f"error: {unknown[0]} is no part. Parts: {', '.join(known)}.")
    passed = True
    for name in options.parts or known:
        if options.dry_run:
            for step in known[name]:
                print(name, step.name, step.seconds, shlex.join(step.command), sep="\t")
        else:
            passed &= run_part(known[name], out / name, PART_SECONDS, {"part": name}, archive)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
