"""Launches of Triton kernels, recorded without a GPU.

Host wrappers run over empty tensors of real sizes, and Triton's own binder tells which build each launch would compile.
Nothing is compiled and nothing is launched.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

Choice = tuple[str, Any]


@dataclass(frozen=True)
class Launch:
    """One build that a launch asks for: the kernel and all that its machine code depends on.

    Attributes:
        module, kernel: qualified name.
        types: Triton type of every run-time argument, such as `*bf16` or `i32`.
        aligned: run-time arguments that are multiples of 16.
        constants: compile-time arguments, and integers equal to 1.
        options: `num_warps` and `num_stages`.
        tried: launched only by `tune_kernels.py`, which passes over a build that spills or does not fit.
    """

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    aligned: frozenset[str]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]
    tried: bool = field(default=False, compare=False)

    @property
    def choices(self) -> tuple[Choice, ...]:
        alignment = ((f"{name}%16", name in self.aligned) for name, _ in self.types)
        return (*self.constants, *self.options, *self.types, *alignment)


class _Device:
    """Stands for a GPU in Triton's runtime: one of each architecture, numbered by it."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)


class Recorder:
    """Collects distinct launches in the order in which they are first made."""

    def __init__(self) -> None:
        self.launches: dict[Launch, None] = {}
        self.tried = False

    def __call__(self, *, fn: Any, compile: Mapping[str, Any], **_: Any) -> bool:
        """Implements Triton's `jit_cache_hook`. True: the launch is handled."""
        names = [param.name for param in fn.jit_function.params]
        constants = {names[index]: value for (index,), value in compile["constants"].items()}
        launch = Launch(
            fn.module,
            fn.name,
            tuple((name, kind) for name, kind in compile["signature"].items() if kind != "constexpr"),
            frozenset(names[index] for (index,), value in compile["configs"][0].items() if value),
            tuple(constants.items()),
            tuple((name, compile[name]) for name in ("num_warps", "num_stages")),
            self.tried,
        )
        self.launches.setdefault(launch)
        return True


@contextmanager
def recorded(arch: int) -> Iterator[Recorder]:
    """Records launches as a GPU of an architecture would compile them, instead of making them."""
    from triton import knobs
    from triton.runtime import driver

    recorder = Recorder()
    driver.set_active(_Device(arch))
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = recorder
        yield recorder


def cover(launches: Sequence[Launch], at_once: int) -> list[Launch]:
    """Few launches of one kernel among which every `at_once` choices that come together in some launch come together.

    Greedy: the launch with the most unseen combinations comes next. The order of the result is that of `launches`.
    """
    shown = [set(combinations(choices, at_once)) for choices in varying_choices(launches)]
    unseen = set().union(*shown)
    heap = [(-len(each), index) for index, each in enumerate(shown)]
    heapq.heapify(heap)
    chosen = []
    while unseen:
        gain, index = heapq.heappop(heap)
        new = shown[index] & unseen
        if len(new) == -gain:
            unseen -= new
            chosen.append(index)
        elif new:
            heapq.heappush(heap, (-len(new), index))
    return [launches[index] for index in sorted(chosen)]


def varying_choices(launches: Sequence[Launch]) -> list[tuple[Choice, ...]]:
    """The choices of each launch of one kernel that not all of them make; one of those that always come together."""
    makers: dict[Choice, int] = {}
    for index, launch in enumerate(launches):
        for choice in launch.choices:
            makers[choice] = makers.get(choice, 0) | 1 << index
    different: dict[int, Choice] = {}
    for choice, mask in makers.items():
        different.setdefault(mask, choice)
    different.pop((1 << len(launches)) - 1, None)
    return [tuple(choice for mask, choice in different.items() if mask >> index & 1) for index in range(len(launches))]


def by_kernel(launches: Iterable[Launch]) -> dict[str, list[Launch]]:
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(launch.kernel, []).append(launch)
    return groups
