"""Kernels of measurements, compiled beforehand and several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from runtime.backends.triton.compilation import TritonCompiler

CANNOT = (RuntimeError, ValueError, NotImplementedError, ImportError)
"""Errors of kernels that do not support a request, in addition to those of Triton."""


def triton_errors() -> tuple[type[Exception], ...]:
    """Returns Triton's errors for kernels that do not compile or do not fit, which are not RuntimeErrors."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


def compile_ahead(calls: Iterable[Callable[[], object]], device: torch.device) -> int:
    """Compiles the kernels that some calls launch; returns how many no cache had.

    Launches are left out, so nothing may depend on their results. What cannot run or be compiled says so when it is
    measured.
    """
    compiler, errors = TritonCompiler(), (*CANNOT, *triton_errors())

    def tried(call: Callable[[], object]) -> Callable[[], None]:
        def attempt() -> None:
            with suppress(*errors):
                call()

        return attempt

    def launch() -> None:
        for call in calls:
            tried(call)()

    builds = compiler.missing(launch, device)
    return compiler.compile([tried(build) for build in builds], device, lambda done, all: None)
