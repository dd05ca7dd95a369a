"""Devices of a run, and threads that share out its work among them."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from queue import SimpleQueue
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compress.common.device import on_device
from compress.common.errors import is_out_of_memory

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Worker:
    """One of the threads of `Workers`. `number`: its place among them."""

    number: int
    device: torch.device


Work = Callable[[Worker, Task], Result]


class Workers:
    """Threads that compute independent tasks, each on a device of its own.

    A task never depends on the worker that computes it, and results come in the order of the tasks. So sums over
    results, and the bytes of a run, do not depend on the number of workers. A single worker is the calling thread.

    Args:
        devices: a device for each worker; the first also computes what is not shared out. CPU workers divide the
            threads of torch.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.all = tuple(Worker(number, device) for number, device in enumerate(devices))
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.all:
            self._free.put(worker)

    @property
    def device(self) -> torch.device:
        """Device of the first worker."""
        return self.all[0].device

    @property
    def num_threads(self) -> int:
        """Threads of torch of each worker."""
        return max(1, torch.get_num_threads() // len(self.all)) if self.device.type == "cpu" else 1

    def __str__(self) -> str:
        return ",".join(str(worker.device) for worker in self.all)

    def map(
        self, work: Work[Task, Result], tasks: Sequence[Task], size: Callable[[Task], int] = lambda _: 0
    ) -> Iterator[Result]:
        """Yields the results of all tasks. Raises what `work` raises; MemoryError names the device. `size`: expected
        duration of a task in any unit; several workers begin with the longest."""
        if len(self.all) == 1:
            yield from (self._run(work, task) for task in tasks)
            return
        longest = sorted(range(len(tasks)), key=lambda number: -size(tasks[number]))
        begun = {number: self._threads.submit(self._run, work, tasks[number]) for number in longest}
        with _given_up(begun.values()):
            for number in range(len(tasks)):
                yield begun.pop(number).result()

    def in_turn(self, work: Work[Task, Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yields as `map`, for large results: begins a task only while fewer results than workers wait to be taken."""
        if len(self.all) == 1:
            yield from (self._run(work, task) for task in tasks)
            return
        begun: deque[Future[Result]] = deque()
        with _given_up(begun):
            for task in tasks:
                if len(begun) == len(self.all):
                    yield begun.popleft().result()
                begun.append(self._threads.submit(self._run, work, task))
            while begun:
                yield begun.popleft().result()

    def _run(self, work: Work[Task, Result], task: Task) -> Result:
        worker = self._free.get()
        try:
            with torch.no_grad(), on_device(worker.device):
                return work(worker, task)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                reason = (str(error).splitlines() or ["out of memory"])[0]
                raise MemoryError(f"{worker.device}: {reason}") from error
            raise
        finally:
            self._free.put(worker)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        threads, share, before = ThreadPoolExecutor(len(self.all), "worker"), self.num_threads, torch.get_num_threads()
        begun = Barrier(len(self.all) + 1)

        def begin() -> None:
            torch.set_num_threads(share)
            begun.wait()

        for _ in self.all:
            threads.submit(begin)
        begun.wait()
        torch.set_num_threads(before)  # threads that begin later get the number that was set last
        return threads


@contextmanager
def _given_up(begun: Collection[Future[Any]]) -> Iterator[None]:
    """Cancels tasks that are left after an error, and waits for those that run."""
    try:
        yield
    finally:
        for future in begun:
            future.cancel()
        wait(begun)


def moved(value: Any, device: torch.device) -> Any:
    """Returns an argument of a module with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict | UserDict):
        return type(value)({key: moved(each, device) for key, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(moved(each, device) for each in value)
    return value


def module_on(module: nn.Module, device: torch.device) -> nn.Module:
    """Returns a copy of a module on `device`. It shares memory with the module on the same device, but not its
    parameters: assigning to one does not change the other."""
    known: dict[int, Any] = {}
    for owner in module.modules():
        plain = (value for value in vars(owner).values() if isinstance(value, Tensor))
        for tensor in chain(owner.parameters(recurse=False), owner.buffers(recurse=False), plain):
            there = tensor.detach().to(device)
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(there, requires_grad=False) if is_parameter else there
    return copy.deepcopy(module, known)
