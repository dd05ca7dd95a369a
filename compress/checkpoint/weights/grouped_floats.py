"""Rounding of floats of 4 and 8 bits in groups that share a scale, which several forms have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from compress.checkpoint.scheme import FixedScheme
from compress.checkpoint.weights.base import Weight
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.float_scales import ScaleSearch
    from compress.checkpoint.grids import FloatGrid

    MakeWeight = Callable[[Tensor, Tensor], Weight]
    """Makes a weight of codes `[O, I]`, uint8, and `[O, G]` what a search found."""


class GroupedFloats(FixedScheme):
    """Floats with one scale per row and group of columns, which has a fixed size.

    Attributes:
        scale_bits: width of a stored scale.
    """

    __slots__ = ()
    scale_bits: ClassVar[int] = 8
    is_exact_size = True
    has_grid = True
    structure = ""

    @property
    def note(self) -> str:
        return f"{self} is read by this runtime, vLLM and transformers (in bfloat16 alone): inputs keep 16 bits here"

    @abstractmethod
    def search(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> tuple[ScaleSearch, MakeWeight]:
        """The search for the scales of `weight [O, I]`, and what makes a weight of its results.

        Args:
            scale_dtype: of stored scales that are plain numbers; None is bfloat16.
        """

    def num_groups(self, in_features: int) -> int:
        if in_features % self.group_size:
            raise SchemeError(
                f"{self.word} groups of {self.group_size} do not divide {in_features} input features",
                "Leave the layer out with --ignore",
            )
        return in_features // self.group_size

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * (in_features * self.bits + self.num_groups(in_features) * self.scale_bits)

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return out_features * (in_features + self.num_groups(in_features))

    def __str__(self) -> str:
        return f"w{self.bits}a16 {self.word} g{self.group_size}"

    def grid(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> FloatGrid[Weight]:
        self.num_groups(weight.shape[1])
        search, make = self.search(weight, scale_dtype)
        return self._grid(search, make, search.best(weight, self.group_size, importance, inputs))

    def round(self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None) -> Weight:
        return self.grid(weight, importance, scale_dtype).encode(weight)

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
        search, make = self.search(weight, scale_dtype)
        return self._grid(search, make, search.in_range(weight, self.group_size)).encode(weight).dequantize()

    def _grid(self, search: ScaleSearch, make: MakeWeight, found: Tensor) -> FloatGrid[Weight]:
        from compress.checkpoint.grids import FloatGrid

        return FloatGrid(search.numbers, search.steps_of(found), self.group_size, lambda codes: make(codes, found))
