"""Versions and hardware of the machine, memory and time of this process, and work in a process of its own."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console

from benchmarking.tables import Rows, describe
from compress.common.cli import let_threads_sleep
from compress.common.errors import ToolkitError
from runtime.bench.figures import processor_name


def environment() -> dict[str, Any]:
    """Versions, hardware and the load of other work, for comparison with other machines."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "load at the start": f"{os.getloadavg()[0]:.1f}",
    }


def open_console(width: int = 160, **facts: Any) -> Console:
    """Returns a console for figures, on which the environment and further facts are printed."""
    console = Console(width=width, highlight=False)
    console.print(describe(environment() | facts), markup=False)
    return console


def weights_sha256(model: Path) -> str:
    """Hash of the weight files of a model folder, in name order."""
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


Result = TypeVar("Result")


def in_own_process(work: Callable[..., Result], *arguments: object) -> Result:
    """Runs `work(*arguments)` in a fresh interpreter and returns its result; both must be picklable.

    Threads of PyTorch sleep there while they wait, as those of the commands do.
    """
    let_threads_sleep()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def within(seconds: int, work: Callable[..., Result], *arguments: object) -> Result:
    """Returns `work(*arguments)`; kills the process if that takes longer. 0: no limit."""
    signal.alarm(seconds)  # whatever waits for a device does not hear of an exception
    result = work(*arguments)
    signal.alarm(0)
    return result


def attempt(seconds: int, rows: Rows, work: Callable[..., Result], *arguments: object) -> Result | None:
    """Returns `work(*arguments)` of a fresh interpreter, or None for work that fails or takes longer, whose row says
    why. 0: no limit."""
    try:
        return in_own_process(within, seconds, work, *arguments)
    except BrokenProcessPool:
        rows.add(error=f"its process was killed, or took {seconds} s")
    except Exception as error:  # whatever is measured may raise anything: that is the finding
        rows.add(error=(str(error).splitlines() or [type(error).__name__])[0][:200])
    return None


def peak_host_bytes() -> int:
    """The most memory this process ever had resident, mapped files among it."""
    status = Path("/proc/self/status")
    if status.is_file():
        # Unlike getrusage, VmHWM does not carry over the parent's peak.
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_device_bytes() -> int | None:
    """The most GPU memory torch ever held in this process; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def leave_with(main: Callable[[], int]) -> NoReturn:
    """Runs a script and leaves the process: with its status, or 1 and one line for a ToolkitError."""
    try:
        sys.exit(main())
    except ToolkitError as error:
        sys.exit(f"error: {error}")


def process_ids(parent: int) -> list[int]:
    """Returns the processes that a process and its children started."""
    children: list[int] = []
    for file in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):  # the thread ended
            children += map(int, file.read_text().split())
    return [*children, *(each for child in children for each in process_ids(child))]


def process_seconds(pid: int) -> float:
    """Processor time of a process so far, in ticks of the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._processor


def take_turns(
    sides: Mapping[str, Callable[[int], object]],
    seconds: float = 0.0,
    rounds: int = 3,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """Returns milliseconds of the calls of each side, which take turns and get the number of the turn.

    Args:
        seconds: how long all of it may take.
        rounds: that are made at least, after a first one that warms up and does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    deadline = time.monotonic() + seconds
    for turn in itertools.count():
        for name, call in sides.items():
            begin = clock()
            call(turn)
            taken[name].append(1e3 * (clock() - begin))
        if turn >= rounds and time.monotonic() > deadline:
            break
    return {name: times[1:] for name, times in taken.items()}


def median_ratio(slow: Sequence[float], quick: Sequence[float]) -> float:
    """Returns the median over turns of how many times as fast one side is."""
    return statistics.median(old / new for old, new in zip(slow, quick, strict=True))
