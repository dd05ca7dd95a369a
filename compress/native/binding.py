"""The compiled library, loaded when it is first asked for; None where there is none, which is logged once."""

from __future__ import annotations

import ctypes
import logging
import platform
from functools import cache

from compress.checkpoint.errors import ToolkitError
from compress.native.build import LIBRARY, source_digest
from compress.native.threads import available_threads

INSTRUCTION_SETS = (
    ("scalar", "neon", "neon_dotprod")
    if platform.machine() in ("aarch64", "arm64")
    else ("scalar", "avx2", "avx512", "avx512_bf16")
)
"""Of this kind of processor, from the slowest to the fastest, as `dispatch.h` numbers them."""
BEST = -1
"""In place of an instruction set: the fastest this machine has."""

_REBUILD = "run python -m compress.native.build"

logger = logging.getLogger("compress.native")


@cache
def library() -> ctypes.CDLL | None:
    """The library with its thread pool sized for this machine, or None; `absence` says why."""
    return _load()[0]


@cache
def absence() -> str:
    """Why there is no library and what mends it; empty when there is one."""
    return _load()[1]


def best_instruction_set() -> int:
    """Index in `INSTRUCTION_SETS` of the fastest this machine has; -1 without the library."""
    native = library()
    return -1 if native is None else int(native.native_best_instruction_set())


def set_threads(count: int) -> int:
    """Threads that share one call from now on, the calling one included; 0 asks for as many as this machine lends.

    Raises:
        ToolkitError: there is no library.
    """
    native = library()
    if native is None:
        raise ToolkitError("there are no native kernels", absence())
    return int(native.pool_set_threads(count or available_threads()))


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    native, reason = _open()
    if native is None:
        logger.warning("%s (until then PyTorch computes in their place, more slowly)", reason)
    else:
        native.pool_set_threads(available_threads())
    return native, reason


def _open() -> tuple[ctypes.CDLL | None, str]:
    if not LIBRARY.exists():
        return None, f"the native kernels are not compiled: {_REBUILD}"
    try:
        native = ctypes.CDLL(str(LIBRARY))
        native.native_digest.restype = ctypes.c_char_p
        digest = native.native_digest().decode()
    except (OSError, AttributeError) as error:
        return None, f"the native kernels cannot be loaded ({error}): {_REBUILD}"
    if digest != source_digest():
        return None, f"the native kernels are older than their sources: {_REBUILD}"
    return native, ""
