"""Loads the compiled library and counts the threads it may use: the process's cores, the share of them that its control
group grants, and OMP_NUM_THREADS, which PyTorch follows too."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from compress.common.errors import ToolkitError
from compress.cpu.build import LIBRARY, source_digest
from compress.cpu.memory_nodes import memory_nodes, processor_masks

CPUS = Path("/sys/devices/system/cpu")
GROUPS = Path("/sys/fs/cgroup")


def available_threads() -> int:
    """Physical cores that this process may run on, fewer where a quota or OMP_NUM_THREADS grants less. At least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    # Two threads on one core share its units: products gain nothing from the second.
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, math.ceil(min(len(cores), quota(), openmp_limit())))


def openmp_limit() -> float:
    """Limit that OMP_NUM_THREADS sets for the outermost level; infinity where it is not set to a number."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return (outermost.isdigit() and int(outermost)) or math.inf


def quota(groups: Path = GROUPS, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time that control groups (version 2 or 1) grant, the tightest on the way up; infinity for all."""
    granted = math.inf
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            granted = min(granted, *(_quota_v2(folder) for folder in _upwards(groups, path)))
        elif "cpu" in controllers.split(","):
            granted = min(granted, *(_quota_v1(folder) for folder in _upwards(groups / "cpu", path)))
    return granted


def _upwards(root: Path, path: str) -> list[Path]:
    """The folders of a group and its parents. Inside of a container the path may not exist; its root does."""
    folder = root / path.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _quota_v2(folder: Path) -> float:
    limit, _, period = _text(folder / "cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdigit() else math.inf


def _quota_v1(folder: Path) -> float:
    limit, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else math.inf


def _siblings(cpu: int) -> str:
    return _text(CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


X86_SETS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
ARM_SETS = ("scalar", "neon", "neon_dotprod", "neon_i8mm", "amx_emulated")
INSTRUCTION_SETS = ARM_SETS if platform.machine() in ("aarch64", "arm64") else X86_SETS
"""Names for this kind of processor, from the slowest to the fastest, as `dispatch.h` numbers them. The last one
is matrix tiles in plain C, for tests; it is never the best."""
EMULATED = len(INSTRUCTION_SETS) - 1
BEST = -1
"""In place of an instruction set: the fastest this machine has."""

_REBUILD = "run python -m compress.cpu.build"

logger = logging.getLogger("compress.cpu")


@cache
def library() -> ctypes.CDLL | None:
    """The library with its thread pool sized for this machine, or None; `absence` says why."""
    return _load()[0]


def function(name: str, *argtypes: Any) -> Callable[..., int]:
    """Returns a function of the library that returns a status. Raises ValueError if the library is not built."""
    native = library()
    if native is None:
        raise ValueError("there is no compiled library")
    found: ctypes._NamedFuncPointer = getattr(native, name)
    found.argtypes, found.restype = argtypes, ctypes.c_int
    return found


@cache
def _job(name: str) -> Callable[..., int]:
    return function(name, ctypes.c_void_p, ctypes.c_int)


def run_job(name: str, job: ctypes.Structure, instruction_set: int = BEST) -> None:
    """Calls a function of the library that reads one structure. Raises ValueError: the library is not built, or the
    function refuses, as where this machine lacks the instruction set."""
    if _job(name)(ctypes.byref(job), instruction_set):
        raise ValueError(f"{name} cannot run with instruction set {instruction_set}")


TYPES = {
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "pointer": ctypes.c_void_p,
}


def struct_fields(*runs: str | tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the `_fields_` of a structure, in the order of its header.

    Args:
        runs: fields of one type in a row, such as `int64 rows columns`, and single ones of other types.
    """
    fields: list[tuple[str, Any]] = []
    for run in runs:
        kind, *names = run.split() if isinstance(run, str) else ("",)
        fields += [(name, TYPES[kind]) for name in names] if isinstance(run, str) else [run]
    return tuple(fields)


@cache
def absence() -> str:
    """Returns the reason why the library is missing, with a remedy; empty if it is available."""
    return _load()[1]


def best_instruction_set() -> int:
    """Index in `INSTRUCTION_SETS` of the fastest this machine has; -1 without the library."""
    native = library()
    return -1 if native is None else int(native.native_best_instruction_set())


def tiles_refusal() -> str:
    """Why this process multiplies no matrix tiles (AMX); empty when it does."""
    native = library()
    if native is None:
        return absence()
    native.native_tiles_refusal.restype = ctypes.c_char_p
    return str(native.native_tiles_refusal().decode())


def set_threads(count: int) -> int:
    """Threads that share one call from now on, the calling one included; 0 asks for as many as this machine lends.
    Raises ToolkitError: the library is not built."""
    native = library()
    if native is None:
        raise ToolkitError("there are no CPU kernels", absence())
    return int(native.pool_set_threads(count or available_threads()))


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    native, reason = _open()
    if native is None:
        logger.warning("%s (until then PyTorch computes in their place, more slowly)", reason)
    else:
        native.pool_set_threads(available_threads())
        nodes = memory_nodes()
        if len(nodes) > 1:
            native.nodes_set(len(nodes), processor_masks(nodes))
    return native, reason


def _open() -> tuple[ctypes.CDLL | None, str]:
    if not LIBRARY.exists():
        return None, f"the CPU kernels are not compiled: {_REBUILD}"
    try:
        native = ctypes.CDLL(str(LIBRARY))
        native.native_digest.restype = ctypes.c_char_p
        digest = native.native_digest().decode()
    except (OSError, AttributeError) as error:
        return None, f"the CPU kernels cannot be loaded ({error}): {_REBUILD}"
    if digest != source_digest():
        return None, f"the CPU kernels are older than their sources: {_REBUILD}"
    return native, ""
