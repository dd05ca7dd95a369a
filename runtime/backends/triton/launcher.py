"""Launches of Triton kernels that cost the host a few microseconds. Triton's own way takes ten times as long: it binds
the arguments, specializes each and formats them as a key again for every launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

WAITS = "WAITS"
"""Constant of kernels that can overlap: whether they wait for those before them, see `common.wait_for_inputs`."""
_overlapping = ContextVar("overlapping", default=False)
_one_after_the_other: ContextVar[Collection[str]] = ContextVar("one_after_the_other", default=())

ONES = ((1, 1, 1), (1, 1), (1,), ())
"""Numbers of programs that a grid of this length leaves out."""


@contextmanager
def overlapping(enabled: bool) -> Iterator[None]:
    """Launches the block's kernels that can so that each starts before the one ahead of it has ended, and waits itself
    (programmatic dependent launch). All others are launched as usual, after all that was launched before."""
    token = _overlapping.set(enabled)
    try:
        yield
    finally:
        _overlapping.reset(token)


@contextmanager
def left_out(names: Collection[str]) -> Iterator[None]:
    """Keeps kernels of some names from overlapping in the block, neither with those ahead of them nor with those after
    them, to find the one that must not."""
    token = _one_after_the_other.set(names)
    try:
        yield
    finally:
        _one_after_the_other.reset(token)


class Launcher:
    """A kernel that is launched as Triton launches it, by `kernel[grid](*arguments, **constants)`, but faster.

    The decorator stands above `triton.jit`. Run-time arguments are given by place, constants and options by name.

    Attributes:
        function: the kernel as Triton wraps it.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._bound: dict[tuple[Any, ...], BoundKernel] = {}

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        key = (*constants, *constants.values())
        bound = self._bound.get(key)
        if bound is None:
            if named := set(constants) & set(run_time_names(self.function)):
                raise TypeError(f"run-time arguments {sorted(named)} are given by name, not by place")
            bound = self._bound[key] = BoundKernel(self.function, constants)
        bound(grid, *arguments)

    def bind(self, **given: Any) -> BoundKernel:
        """Returns the kernel with constants, options, and those run-time arguments that stay the same, such as weights:
        tensors among them must keep their memory."""
        return BoundKernel(self.function, given)


class BoundKernel:
    """A kernel with some of its arguments given; called with a grid and the other run-time arguments in their order.

    The compiled kernel of a launch is looked up by what Triton would specialize it for. In the interpreter, and while
    hooks look at launches, Triton launches it.
    """

    __slots__ = (
        *("_compiled", "_function", "_given", "_is_compiled", "_left_out", "_open", "_open_places", "_values"),
        *("_can_overlap", "_waiting", "name"),
    )

    def __init__(self, function: Any, given: dict[str, Any]) -> None:
        self._function, self._given, self.name = function, given, function.fn.__name__
        self._open = [name for name in run_time_names(function) if name not in given]
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._left_out: set[tuple[Any, ...]] = set()
        self._can_overlap = can_overlap(function) and WAITS not in given
        self._waiting: BoundKernel | None = None
        self._is_compiled = isinstance(function, JITFunction)
        if self._is_compiled:
            self._values = [_passed(given.get(param.name)) for param in function.params]
            self._open_places = [(p.num, not p.do_not_specialize) for p in function.params if p.name in self._open]

    def __call__(self, grid: Sequence[int], *arguments: Any) -> None:
        if self._can_overlap and _overlapping.get() and self.name not in _one_after_the_other.get():
            if self._waiting is None:
                self._waiting = BoundKernel(self._function, self._given | {WAITS: True, "launch_pdl": True})
            self._waiting(grid, *arguments)
            return
        if not self._is_compiled:
            self._launch_by_triton(grid, arguments)
            return
        active, hooks = driver.active, knobs.runtime
        device, values = active.get_current_device(), self._values.copy()
        key = (device, *launch_key(self._open_places, arguments, values))
        found = self._compiled.get(key)
        if found is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            if key in self._left_out and hooks.jit_cache_hook is not None:
                return  # the hook has seen it; Triton would take half a millisecond to show it again
            kernel = self._launch_by_triton(grid, arguments)
            if kernel is None:
                self._left_out.add(key)
            else:
                self._compiled[key] = direct_launch(kernel, len(values))
            return
        launch, constants, is_flat = found
        stream = active.get_current_stream(device)
        if is_flat:
            launch(*grid, *ONES[len(grid)], stream, *constants, *values)
        else:
            launch(*grid, *ONES[len(grid)], stream, *constants, values)

    def _launch_by_triton(self, grid: Sequence[int], arguments: Sequence[Any]) -> Any:
        """The compiled kernel; None in the interpreter, or where a hook of Triton took the launch."""
        named = self._given | dict(zip(self._open, arguments, strict=True))
        placed = [named.pop(name) for name in run_time_names(self._function)]
        return self._function[tuple(grid)](*placed, **named)


class DirectLaunch(NamedTuple):
    """A launch that is called with three sizes of a grid, a stream, constants and arguments.

    Attributes:
        is_flat: arguments are given one by one, not as one sequence.
    """

    call: Callable[..., None]
    constants: tuple[Any, ...]
    is_flat: bool


def direct_launch(kernel: Any, num_arguments: int) -> DirectLaunch:
    """Finds what Triton's launcher of a compiled kernel calls, and with which constants.

    Triton's launcher is Python that makes room for kernels which need some, in 1.5 microseconds also where none does.
    A copy of it is called with marks in place of a grid, a stream and arguments, and shows where it passes them on.
    Where it does anything else with them, it is called itself.
    """
    constants = kernel.function, kernel.packed_metadata, None, None, None
    whole = DirectLaunch(kernel.run, constants, True)
    passed: list[tuple[Any, ...]] = []
    place, arguments = tuple(object() for _ in range(4)), tuple(object() for _ in range(num_arguments))
    try:
        launcher = copy(kernel.run)
        launcher.launch = lambda *given: passed.append(given)
        launcher(*place, *constants, *arguments)
    except (AttributeError, TypeError):  # it has no such function, or computes with the grid to make room
        return whole
    given = passed[0] if len(passed) == 1 else ()
    if given[:4] == place and given[-num_arguments:] == arguments:
        return DirectLaunch(kernel.run.launch, given[4:-num_arguments], True)
    if given[:4] == place and given[-1] == arguments:
        return DirectLaunch(kernel.run.launch, given[4:-1], False)
    return whole


def launch_key(places: Sequence[tuple[int, bool]], arguments: Sequence[Any], values: list[Any]) -> list[Any]:
    """Finds what a launch is specialized for; puts the arguments into `values`, at their places, as they are passed.

    Triton compiles for the type of every argument; for pointers and integers that are multiples of 16; and for integers
    that are 1, unless the argument is not to be specialized. The key may tell launches apart that Triton does not.

    Args:
        places: index in the signature, and whether integers are specialized.

    Raises:
        TypeError: an argument is neither a tensor nor a number nor None.
    """
    key: list[Any] = []
    for (place, specializes), argument in zip(places, arguments, strict=True):
        kind = type(argument)
        if kind is int:
            values[place] = argument
            if not specializes:
                key.append(argument >> 31)  # the type, 32 or 64 bits
            else:
                key.append(None if argument == 1 else (argument >> 31, argument & 15))
        elif kind is float or argument is None or kind is bool:
            values[place] = argument
            key.append(kind)
        elif isinstance(argument, Tensor):
            pointer = values[place] = argument.data_ptr()
            key += argument.dtype, pointer & 15
        else:
            raise TypeError(f"{kind.__name__} is not an argument of a kernel: give tensors, numbers or None")
    return key


def can_overlap(function: Any) -> bool:
    """Whether a kernel has a way to wait for those ahead of it."""
    return WAITS in inspect.signature(function.fn).parameters


def run_time_names(function: Any) -> list[str]:
    """Names of a kernel's arguments that are not compile-time constants."""
    parameters = inspect.signature(function.fn).parameters.values()
    return [each.name for each in parameters if "constexpr" not in str(each.annotation)]


def _passed(argument: Any) -> Any:
    """An argument as the compiled launcher takes it fastest: a tensor by its address."""
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
