"""What verification found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor that was not quantized, and why."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class StructureReport:
    """What a checkpoint holds, and what is wrong with it.

    Attributes:
        format: `compressed-tensors`, `gptq`, `awq`, `compress-runtime` or `dense`.
        problems: one line each; empty when the structure is sound.
        quantized: scheme of every quantized module, as text.
        dense: every other tensor.
        num_parameters: weights of the model, quantized or not.
        num_quantized: weights in quantized modules.
        quantized_bytes: stored codes, scales and zero points.
        total_bytes: size of the weight files.
        notes: checks that could not be made, and why.
    """

    path: str
    format: str
    problems: tuple[str, ...]
    quantized: dict[str, str]
    dense: tuple[DenseTensor, ...]
    num_parameters: int
    num_quantized: int
    quantized_bytes: int
    total_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per quantized weight; 0 when nothing is quantized."""
        return 8 * self.quantized_bytes / self.num_quantized if self.num_quantized else 0.0

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits per weight of the whole model, headers and dense tensors included."""
        return 8 * self.total_bytes / self.num_parameters if self.num_parameters else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        figures = {"bits_per_weight": self.bits_per_weight, "bits_per_parameter": self.bits_per_parameter}
        return {"ok": self.ok, **asdict(self), **figures}
