"""A checkpoint read with fewer bits than it is stored with: rounded to nearest, module by module, when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scales import encode, search_scales
from compress.checkpoint.scheme import Scheme


@dataclass(frozen=True)
class RoundedCheckpoint(PackedCheckpoint):
    """`source` with the modules of `schemes` rounded to them, under the scales with the least squared error.

    Everything else is as in the source. Nothing is written.
    """

    source: PackedCheckpoint

    @classmethod
    def of(cls, source: PackedCheckpoint, schemes: Mapping[str, Scheme]) -> RoundedCheckpoint:
        return cls(source.path, source.config, source.files, dict(schemes), source)

    def packed_weight(self, module: str) -> IntegerWeight:
        """Rounds the module's stored weight. Raises CheckpointError as the source does, NumericsError for NaN."""
        stored = self.source.weight(module)
        dense = stored if isinstance(stored, Tensor) else stored.dequantize()
        return encode(dense, search_scales(dense, self.schemes[module]), self.schemes[module])

    def shape(self, module: str) -> tuple[int, int]:
        return self.source.shape(module)
