"""Weights in the layout of a kernel, as files keep them from one start to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from compress.common.errors import CheckpointError
from runtime.backends.base import Linear

LAYOUT_VERSION = 2
"""Version of the bytes of all layouts. Whoever changes one raises it, so that files of the old one are not misread."""


@dataclass(frozen=True, slots=True)
class PreparedWeight:
    """A weight `[O, I]` that a kernel multiplies by as it is.

    Attributes:
        tensors: by names of the layout.
        bits: that a code or number takes, or two trellis codes.
        group: inputs that share a scale.
    """

    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]
    bits: int
    group: int

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """Raises CheckpointError for a tensor that is missing, or has another shape or dtype."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            found = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise self.refusal(f"{name} {found}, not {dtypes[0]} {list(shape)}")

    def refusal(self, problem: str) -> CheckpointError:
        """Returns the error for tensors that do not fit the shape."""
        return CheckpointError(f"a prepared weight {list(self.shape)} has {problem}", "Run runtime prepare again")


@runtime_checkable
class Preparable(Protocol):
    """Linear whose memory can be written to a file."""

    def prepared(self) -> PreparedWeight:
        """Returns its tensors, which are not copied."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that files keep.

    Attributes:
        restore: makes a linear of a prepared weight, without a copy, and a bias `[O]`. Raises CheckpointError for
            tensors that do not fit the shape.
    """

    name: str
    restore: Callable[[PreparedWeight, Tensor | None], Linear]
