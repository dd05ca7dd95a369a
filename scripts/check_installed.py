"""Fails unless the installed package, and not a checkout, answers by the compiled kernels that came with it:
`python -I check_installed.py packed/`, in an environment without a C compiler. Part of build_wheel.sh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import cast

from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set
from compress.cpu.build import LIBRARY, find_compiler
from runtime.core.request import SamplingParams
from runtime.llm import LLM
from runtime.runner.runner import ModelRunner

PROMPT = "It was a bright cold day"


def problems(checkpoint: str) -> Iterator[str]:
    """Yields what differs from an installed wheel that computes in C."""
    if compiler := find_compiler():
        yield f"there is a compiler: {compiler}"
    if not LIBRARY.is_relative_to(Path(sys.prefix).resolve()):
        yield f"the library is not in the environment: {LIBRARY}"
    if absence():
        yield absence()
        return
    llm = LLM(checkpoint)
    runner = cast(ModelRunner, llm.engine.runner)
    for line in (*runner.decoder.description, f"attention kernel {runner.kernels.describe()}"):
        if not any(name in line for name in ("activations: ", "kernel cpu", "CpuOps")):
            yield f"not computed by a kernel in C: {line}"
    [answer] = llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0))
    if answer.finish_reason != "length" or not answer.text.strip():
        yield f"no answer but {answer}"
    print(f"{PROMPT}{answer.text}")


def main() -> int:
    """Entry point of the script."""
    found = list(problems(sys.argv[1]))
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    if not found:
        kernels = INSTRUCTION_SETS[best_instruction_set()]
        print(f"compress-runtime {version('compress-runtime')}, kernels in C by {kernels}: {LIBRARY}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
