"""Processes of their own, which compile Triton kernels instead of interpreting them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def processes_that_compile(number: int, cache: Path | None = None) -> ProcessPoolExecutor:
    """Makes processes that call functions of importable modules.

    Args:
        cache: Triton's cache folder; None for the usual one.
    """
    return ProcessPoolExecutor(number, get_context("spawn"), _set_up, ("" if cache is None else str(cache),))


def compile_in_own_process(
    cache: Path, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Calls a function in one such process."""
    with processes_that_compile(1, cache) as pool:
        return pool.submit(function, *args, **options).result()


def _set_up(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 wants to be told
    if cache:
        os.environ["TRITON_CACHE_DIR"] = cache
