"""Integers of 2 to 8 bits with one scale per row and group of input columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import GROUP_SIZES, MAX_BITS, MIN_BITS, Activations, Scheme, register
from compress.checkpoint.weights.base import StoredTensors, cast_exactly, check_activation_order, row_scales
from compress.checkpoint.weights.coded import INT, Coded, CodedWeight, Scales
from compress.checkpoint.weights.packing import num_words, pack_bits, unpack_bits
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


INPUTS = Activations.INT8, Activations.INT4
"""Rounding of inputs that integers are multiplied by."""


@register("bits")
@dataclass(frozen=True, slots=True)
class Int(Coded):
    """`W ~ (qweight - zero_points) * scales`, one scale per row and group.

    Attributes:
        bits: width of a code, 2 to 8.
        group_size: input columns that share one scale; None means one scale for the whole row (per channel).
        symmetric: zero point fixed at `2 ** (bits - 1)`; scales may be negative (signed full range).
        activations: rounding of the inputs (W8A8, W4A8, W4A4); None for 16-bit inputs.
    """

    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = True
    activations: Activations | None = None

    suffixes = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight")
    mark = ".weight_scale"
    word = "int"
    numbers = INT
    scales = Scales("", "integers")
    structure = ""
    readers = ""
    is_exact_size = False

    def __post_init__(self) -> None:
        if self.bits not in range(MIN_BITS, MAX_BITS + 1):
            remedy = "Choose --bits 4, 3, 2 or 8; half bits are for --method trellis"
            raise SchemeError(f"bits={self.bits} is not a whole number from {MIN_BITS} to {MAX_BITS}", remedy)
        if self.group_size is not None and self.group_size < 1:
            raise SchemeError(f"group size {self.group_size} is not positive", "Choose --group-size 128, 64 or 32")
        if self.activations not in (None, *INPUTS):
            raise SchemeError(f"integers with {self.activations} activations are not supported", "Use int8 activations")

    @property
    def is_packed(self) -> bool:
        """Whether codes are stored as a stream of bits, not as bytes, which engines expect of W8A8 per channel."""
        return not self.activations or (self.bits, self.group_size, self.symmetric) != (MAX_BITS, None, True)

    @property
    def as_symmetric(self) -> Int:
        return replace(self, symmetric=True)

    @property
    def num_shapes(self) -> int:
        return 1 if self.is_packed else 0

    def num_blocks(self, in_features: int) -> int:
        size = self.columns(in_features)
        if in_features % size:
            fitting = [size for size in GROUP_SIZES if in_features % size == 0]
            remedy = f"Use --group-size {fitting[-1]}" if fitting else "Use per-channel groups (--group-size -1)"
            raise SchemeError(
                f"group size {size} does not divide {in_features} input features",
                f"{remedy}, or leave the layer out with --ignore",
            )
        return in_features // size

    def check(self, shape: tuple[int, int]) -> None:
        self.num_groups(shape[1])

    @property
    def title(self) -> str:
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{group} {'sym' if self.symmetric else 'asym'}"

    @property
    def entry(self) -> int:
        return self.bits

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Int:
        given = {name: fields[name] for name in ("bits", "group_size", "symmetric") if name in fields}
        return cls(**given, activations=Activations.from_bits(fields.get("activation_bits"), *INPUTS))

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        unpacked = stored.optional(".weight")
        rows, columns = stored[".weight_shape"].tolist() if unpacked is None else unpacked.shape
        return rows, columns

    def read(self, stored: StoredTensors) -> CodedWeight:
        packed = stored.optional(".weight_packed")
        scale = stored[".weight_scale"]
        codes = self.unsigned(stored, ".weight") if packed is None else self._packed_codes(stored, packed)
        rows, columns = codes.shape
        groups = self.num_groups(columns)
        check_activation_order(stored.module, stored.optional(".weight_g_idx"), columns, self.group_size)
        return self.weight(codes, row_scales(scale, rows, groups), self.read_zeros(stored, rows, groups))

    def unsigned(self, stored: StoredTensors, suffix: str) -> Tensor:
        """Returns stored int8 codes as unsigned ones. Raises CheckpointError for another dtype."""
        import torch

        signed = stored[suffix]
        if signed.dtype != torch.int8:
            raise CheckpointError(f"{stored.module}{suffix} should hold int8 codes, but is {signed.dtype}")
        return (signed.to(torch.int16) + self.zero).to(torch.uint8)

    def _packed_codes(self, stored: StoredTensors, packed: Tensor) -> Tensor:
        rows, columns = stored[".weight_shape"].tolist()
        if packed.shape != (rows, num_words(columns, self.bits)):
            raise CheckpointError(
                f"{stored.module}.weight_packed is {list(packed.shape)}, but {rows} x {columns} codes of {self.bits} "
                f"bits pack to {[rows, num_words(columns, self.bits)]}",
                "Write it again with compressed-tensors 0.16 or newer: before, 3, 5, 6 and 7 bits had another layout",
            )
        return unpack_bits(packed, self.bits, columns, 1)

    def read_zeros(self, stored: StoredTensors, rows: int, groups: int) -> Tensor | None:
        """Returns the zero points `[O, G]` of a stored layer; None where all are the midpoint."""
        import torch

        zero = None if self.symmetric else stored.optional(".weight_zero_point")
        if zero is None:
            return None if self.symmetric else torch.full((rows, groups), self.zero, dtype=torch.uint8)
        if zero.dtype == torch.int32:
            return unpack_bits(zero, self.bits, rows, 0)
        return (zero.to(torch.int16) + self.zero).to(torch.uint8).reshape(rows, groups)

    def name_problems(self, module: str, suffixes: set[str]) -> list[str]:
        problems = []
        if {".weight", ".weight_packed"} <= suffixes:
            problems.append(f"{module} is stored both dense and packed")
        if self.symmetric and ".weight_zero_point" in suffixes:
            problems.append(f"{module} is symmetric, but stores zero points")
        return problems

    def tensors(self, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        import torch

        if not self.is_packed:
            return {
                ".weight": (weight.qweight ^ 0x80).view(torch.int8),
                ".weight_scale": self.stored_scales(weight, dtype),
            }
        return self.packed(weight, weight.qweight, dtype)

    def packed(self, weight: CodedWeight, codes: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns stored tensors with these codes `[O, C]`, all of the weight or some of each row."""
        import torch

        stored = {
            ".weight_packed": pack_bits(codes, self.bits, 1),
            ".weight_scale": cast_exactly(weight.scales, dtype),
            ".weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        zeros = {} if weight.zeros is None else {".weight_zero_point": pack_bits(weight.zeros, self.bits, 0)}
        return stored | zeros

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:
        from compress.checkpoint.scale_search import round_in_range

        return round_in_range(weight, self, scale_dtype)


def integers(scheme: Scheme | None) -> Int:
    """The scheme of codes that a method rounds to. Raises SchemeError unless they are integers."""
    if isinstance(scheme, Int):
        return scheme
    raise SchemeError(f"integers are wanted, not {scheme or '16-bit values'}", "Use method rtn, or integer bits")
