"""Runs a command as on a processor that has less than this one: `python scripts/instruction_sets.py avx2 pytest FILE`.

The compiled library is rebuilt so that it uses no faster instructions, which holds in every process that loads it;
PyTorch and the libraries under it are told the same by their own variables. The library is built in full afterwards.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set

ROOT = Path(__file__).resolve().parents[1]
ALL = "all"
"""In place of a set: whatever the machine has."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Instructions of a kind of processor, in the names of those that use them.

    Attributes:
        needed: set of the compiled library without which a machine cannot run this one.
        library: the fastest that the compiled library then uses.
        torch: value of ATEN_CPU_CAPABILITY.
        onednn: value of ONEDNN_MAX_CPU_ISA.
        mkl: value of MKL_CBWR.
    """

    needed: str
    library: str
    torch: str
    onednn: str
    mkl: str

    def variables(self) -> dict[str, str]:
        return {"ATEN_CPU_CAPABILITY": self.torch, "ONEDNN_MAX_CPU_ISA": self.onednn, "MKL_CBWR": self.mkl}


SETS = {
    "plain": InstructionSet("scalar", "scalar", "default", "SSE41", "COMPATIBLE"),
    "avx2": InstructionSet("avx2", "avx2", "avx2", "AVX2", "AVX2"),
    # The compiled library takes AVX-512 together with products of bytes only.
    "avx512": InstructionSet("avx512", "avx2", "avx512", "AVX512_CORE", "AVX512"),
    "avx512_vnni": InstructionSet("avx512", "avx512", "avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512_bf16": InstructionSet("avx512_bf16", "avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512"),
}


def available(best: int) -> list[str]:
    """Names of the sets below the fastest of a machine, an index as `best_instruction_set` returns it, and `ALL`."""
    known = INSTRUCTION_SETS[: best + 1]
    return [name for name, each in SETS.items() if each.needed in known and each.library != known[-1]] + [ALL]


def build_library(folder: Path, name: str) -> bool:
    """Compiles the library of a checkout for a set. Returns whether that succeeded."""
    limit = [] if name == ALL else ["--instruction-set", SETS[name].library]
    command = [sys.executable, "-m", "compress.cpu.build", *limit]
    return not subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}).returncode


@contextmanager
def forced(name: str) -> Iterator[Mapping[str, str]]:
    """Environment of commands that run as on a processor with no more than a set; they load the limited library."""
    if name == ALL:
        yield os.environ
        return
    try:
        if not build_library(ROOT, name):
            sys.exit(f"the library cannot be compiled for {name}")
        yield os.environ | SETS[name].variables()
    finally:
        build_library(ROOT, ALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=available(best_instruction_set()))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with forced(options.name) as environment:
        return subprocess.run(options.command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
