"""How many threads this process may keep busy: its cores, the share of them that its control group grants, and the
number that its user allows OpenMP, which is what PyTorch goes by."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
GROUPS = Path("/sys/fs/cgroup")


def available_threads() -> int:
    """Physical cores that this process may run on, fewer where a quota or OMP_NUM_THREADS grants less. At least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    # Two threads on one core share its units: products gain nothing from the second.
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, math.ceil(min(len(cores), quota(), openmp_limit())))


def openmp_limit() -> float:
    """What OMP_NUM_THREADS says of the outermost level; infinity where it is not set to a number."""
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
