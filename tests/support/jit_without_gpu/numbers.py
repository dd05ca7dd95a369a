"""Operations that are other, or slow, for tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx.experimental import _config

READERS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "unique")


@contextmanager
def reading_zeros() -> Iterator[None]:
    """Whoever reads a tensor of the device `meta` reads zeros."""
    with ExitStack() as stack:
        for name in READERS:
            stack.enter_context(patch.object(Tensor, name, _zeros_for_meta(getattr(Tensor, name))))
        # Where places are looked for, they are all of them.
        stack.enter_context(patch.object(_config, "meta_nonzero_assume_all_nonzero", True))
        stack.enter_context(patch.object(Tensor, "copy_", _copied(Tensor.copy_)))
        stack.enter_context(patch.object(Tensor, "new_empty", _made(Tensor.new_empty)))
        yield


def _zeros_for_meta(read: Callable[..., Any]) -> Callable[..., Any]:
    def reader(self: Tensor, *args: Any, **options: Any) -> Any:
        return read(torch.zeros_like(self, device="cpu") if self.is_meta else self, *args, **options)

    return reader


def _copied(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        return self.zero_() if source.is_meta and not self.is_meta else copy(self, source, non_blocking)

    return copied


def _made(new_empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes empty tensors as fast as a GPU has them: torch computes their form in Python."""

    def made(self: Tensor, *size: Any, **options: Any) -> Tensor:
        if not self.is_meta:
            return new_empty(self, *size, **options)
        return torch.empty(*size, **{"dtype": self.dtype, "device": self.device} | options)

    return made
