"""Compiles the C sources into one shared library inside of this package: `python -m compress.cpu.build`.

With `--instruction-set NAME` the library uses no set above that one, whatever the machine has: what is tested on this
machine is then what runs on an older one, in every process.

Uses the standard library only, because the package's build imports it before anything else is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compress.common.errors import ToolkitError

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "c"
LIBRARY = FOLDER / ("libnative.dylib" if sys.platform == "darwin" else "libnative.so")
COMPILERS = ("cc", "gcc", "clang")
# Contraction stays off: what is a fused multiply-add is written so, or sums would differ between compilers.
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi", f"-I{SOURCES}"),
)


def find_compiler() -> str | None:
    """The first C compiler on PATH."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def source_digest() -> str:
    """Hashes all sources and headers. It is compiled in, so that an outdated library is recognized."""
    digest = hashlib.sha256()
    for file in sorted(file for file in SOURCES.rglob("*") if file.suffix in (".c", ".h", ".inc")):
        digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(target: Path = LIBRARY, most: str | None = None) -> Path:
    """Compiles `target`, which appears whole or not at all. Raises ToolkitError: no compiler, or one that fails; a
    folder that cannot be written. `most`: name of the fastest instruction set to use (`binding.INSTRUCTION_SETS`); None
    for all that the machine has."""
    defined = [f'-DNATIVE_DIGEST="{source_digest()}"', *([f"-DMOST_INSTRUCTION_SET={most.upper()}"] if most else [])]
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".native-") as folder:
            # Those that take longest to compile first, so that nothing waits for them in the end.
            sources = sorted(
                SOURCES.rglob("*.c"), key=lambda each: (each.parent.name not in ("attention", "linear"), each)
            )
            objects = {source: f"{folder}/{index}.o" for index, source in enumerate(sources)}
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda pair: compile_c([*defined, "-c", str(pair[0]), "-o", pair[1]]), objects.items()))
            built = Path(folder) / target.name
            compile_c(["-shared", *objects.values(), "-o", str(built)])
            os.replace(built, target)
    except OSError as error:
        remedy = (
            "Run python -m compress.cpu.build as the user who installed this, or pip install it where you may write"
        )
        raise ToolkitError(f"cannot write {target} ({error.strerror})", remedy) from error
    return target


def compile_c(arguments: list[str]) -> None:
    """Runs the compiler with this project's flags. Raises ToolkitError: no compiler, or one that fails."""
    compiler = find_compiler()
    if compiler is None:
        raise ToolkitError(
            f"no C compiler on PATH (tried {', '.join(COMPILERS)})",
            "Install one, for example with 'apt install gcc', then run python -m compress.cpu.build",
        )
    result = subprocess.run([compiler, *FLAGS, *arguments, "-lm"], capture_output=True, text=True, check=False)
    if result.returncode:
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip())
        raise ToolkitError(f"{compiler} failed: {first}", "Use GCC 11 or Clang 14, or newer")
    sys.stderr.write(result.stderr)


def main() -> int:
    """Entry point of the module."""
    from compress.cpu.binding import INSTRUCTION_SETS  # which imports this module

    parser = argparse.ArgumentParser(description="Compiles the CPU kernels into one library inside of the package.")
    parser.add_argument("--instruction-set", choices=INSTRUCTION_SETS[:-1], help="the fastest to use (default: all)")
    try:
        print(build(most=parser.parse_args().instruction_set))
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
