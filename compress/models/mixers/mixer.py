"""Base of the descriptions of mixers."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from compress.common.errors import ToolkitError
from compress.models.cuts import REMEDY, Cuts
from compress.models.linear import Linear
from compress.models.norm import Norm

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class StateField:
    """One tensor of the state of one sequence in one layer. `is_exact`: computed in float32 at least, because every
    token changes it a little, and kept so unless another dtype is asked for; else in the dtype of activations."""

    shape: tuple[int, ...]
    is_exact: bool = False

    def nbytes(self, itemsize: int, state_itemsize: int = FLOAT32) -> int:
        """Bytes, where activations take `itemsize` each, and exact states are kept in `state_itemsize`."""
        exact = max(itemsize, FLOAT32) if state_itemsize == FLOAT32 else state_itemsize
        return math.prod(self.shape) * (exact if self.is_exact else itemsize)


class Mixer:
    """A mixer of tokens: attention, or one that keeps a state of fixed size for each sequence.

    Attributes:
        name: prefix of its tensors inside of a block.
        qkv: linears that read the residual stream, but those that stay dense.
        output: the linear that adds to the residual stream.
        inlined: module of transformers whose parts files hold in the mixer itself; "" for none.
    """

    __slots__ = ()
    name: str
    qkv: tuple[Linear, ...]
    output: Linear
    activation: str = ""
    inlined: ClassVar[str] = ""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are computed, but those that stay dense."""
        return *self.qkv, self.output

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Norms inside of it."""
        return ()

    @property
    def routers(self) -> tuple[Linear, ...]:
        """Linears that stay dense."""
        return ()

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every other tensor, by name."""
        return {}

    @property
    def state_fields(self) -> dict[str, StateField]:
        """Tensors of the state of one sequence, by name."""
        return {}

    @property
    def joined_convs(self) -> tuple[str, ...]:
        """Names in files of the convolutions that transformers holds as one, `conv1d`; () where files do, too."""
        return ()

    def cut(self, cuts: Cuts) -> Self:
        """Returns the part of a rank, which ranks sum with those of others. Raises ToolkitError: no rule of cuts, or
        fewer heads or channels than ranks."""
        raise ToolkitError(f"ranks cannot share {self.name}, a {type(self).__name__} without a method `cut`", REMEDY)


class ConvolvedMixer(Mixer):
    """A mixer with a short causal convolution, over the last `kernel` tokens."""

    __slots__ = ()
    kernel: int
    conv_part: ClassVar[str] = "conv1d"

    @property
    @abstractmethod
    def conv_size(self) -> int:
        """Channels of the convolution."""

    @property
    def has_conv_bias(self) -> bool:
        return False

    @property
    def conv(self) -> str:
        """Name of the weight of the convolution."""
        return f"{self.name}.{self.conv_part}.weight"

    @property
    def bias(self) -> str:
        """Name of the bias of the convolution; "" for none."""
        return f"{self.name}.{self.conv_part}.bias" if self.has_conv_bias else ""

    def cut_conv(self, cuts: Cuts, *channels: slice) -> None:
        """Cuts the convolution."""
        for name in filter(None, (self.conv, self.bias)):
            cuts.vector(name, *channels)

    @property
    def own_vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every other tensor but those of the convolution, by name."""
        return {}

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        found = {self.conv: (self.conv_size, 1, self.kernel), self.bias: (self.conv_size,)}
        return self.own_vectors | {name: shape for name, shape in found.items() if name}

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of the state in addition to the last inputs of the convolution; () for none."""
        return ()

    @property
    def state_fields(self) -> dict[str, StateField]:
        matrix = {"matrix": StateField(self.matrix, is_exact=True)} if self.matrix else {}
        return {"window": StateField((self.kernel - 1, self.conv_size))} | matrix
