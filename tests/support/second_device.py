"""A second device without a GPU: tensors that say they are on `meta`, hold their numbers in host memory, and refuse to
be combined with tensors of the host, as a GPU's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from compress.common.workers import Workers

SECOND = torch.device("meta")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class OnSecond(Tensor):
    """A tensor on the second device."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnSecond:
        return Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=SECOND,
        )

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:
        return f"OnSecond({self.numbers!r})"

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @property
    def data(self) -> OnSecond:
        return OnSecond(self.numbers)

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, OnSecond):
            raise RuntimeError("a parameter on one device was given numbers on another")
        self.numbers = new.numbers.contiguous()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class SecondDevice(TorchDispatchMode):
    """While it is entered, what is made on `meta` holds numbers.

    Attributes:
        arrivals: elements of each tensor that was copied to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[int] = []

    def __enter__(self) -> SecondDevice:
        self._literals = _Literals()
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _COPIES[0] and kwargs.get("device") == SECOND and not isinstance(args[0], OnSecond):
            self.arrivals.append(args[0].numel())
        return _run(function, args, kwargs)


class _Literals(TorchFunctionMode):
    """`torch.tensor` makes tensors of `meta` without asking anybody."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") == SECOND:
            return OnSecond(torch.tensor(*args, **{**kwargs, "device": "cpu"}))
        return function(*args, **kwargs)


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    seconds = [each for each in tensors if isinstance(each, OnSecond)]
    others = [each for each in tensors if not isinstance(each, OnSecond) and (each.dim() or each.device == SECOND)]
    if seconds and others and function not in _COPIES and "index" not in function.__name__:
        raise RuntimeError(f"{function} got tensors of two devices: {[tuple(each.shape) for each in tensors]}")
    wanted = kwargs.get("device")
    on_second = bool(seconds) if wanted is None else torch.device(wanted) == SECOND
    if wanted is not None and on_second:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if function is torch.ops.aten.copy_.default:
        on_second = isinstance(args[0], OnSecond)
    bare_args, bare_kwargs = tree_map(lambda leaf: leaf.numbers if isinstance(leaf, OnSecond) else leaf, (args, kwargs))
    found = function(*bare_args, **bare_kwargs)
    same = {id(each.numbers): each for each in seconds}
    return tree_map(lambda leaf: _wrapped(leaf, same) if isinstance(leaf, Tensor) and on_second else leaf, found)


def _wrapped(numbers: Tensor, same: dict[int, OnSecond]) -> Tensor:
    """In place results are the tensors that were given."""
    if id(numbers) in same:
        return same[id(numbers)]
    return OnSecond(numbers) if numbers.device.type == "cpu" else numbers


class SameThread(Workers):
    """Workers that take turns in the calling thread, where what is made on the second device holds numbers."""

    def map(self, work: Any, tasks: Any, size: Any = None) -> Iterator[Any]:
        yield from (self._run(work, task) for task in tasks)

    in_turn = map
