"""4-bit codes that are places in a table of 16 numbers, with a float32 scale per block: NF4 and FP4 of bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from compress.checkpoint.scheme import Headers, Scheme, register
from compress.checkpoint.weights.base import StoredTensors
from compress.checkpoint.weights.codebooks import NF4, NF4_VALUES, TableFloatWeight, read_table
from compress.common.errors import SchemeError

FP4_VALUES = tuple(sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3))
"""The number of each code of FP4: a sign, two bits of exponent and one of mantissa, divided by the largest."""
BLOCK_SIZES = tuple(2**power for power in range(5, 13))
SCALE_BITS = 32
TABLES = {"nf4": (NF4, NF4_VALUES), "fp4": ("4-bit bitsandbytes float", FP4_VALUES)}
"""Kind of codes and their numbers, by the type of a quantization state."""


@register("bnb4")
@dataclass(frozen=True, slots=True)
class Bnb4(Scheme):
    """`W ~ code_values[qweight] * scales`, with scales of blocks of columns.

    Attributes:
        kind: `nf4` or `fp4`.
        block: columns that share a scale.
    """

    kind: str = "nf4"
    block: int = 64

    suffixes = (".weight_packed", ".weight_scale")
    mark = ".weight_scale"
    bits = 4
    structure = "the layout of bitsandbytes' 4-bit blocks"

    def __post_init__(self) -> None:
        if self.kind not in TABLES or self.block not in BLOCK_SIZES:
            raise SchemeError(
                f"bitsandbytes has no 4-bit {self.kind!r} in blocks of {self.block}",
                f"Use {' or '.join(TABLES)} in blocks of {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}",
            )

    @property
    def group_size(self) -> int:
        return self.block

    @property
    def numbers(self) -> str:
        return TABLES[self.kind][0]

    @property
    def code_values(self) -> tuple[float, ...]:
        return TABLES[self.kind][1]

    def num_groups(self, in_features: int) -> int:
        if in_features % self.block:
            raise SchemeError(
                f"blocks of {self.block} numbers cross the ends of rows of {in_features}",
                "Quantize it again from its dense checkpoint",
            )
        return in_features // self.block

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        return out_features * (in_features * self.bits + self.num_groups(in_features) * SCALE_BITS)

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return out_features * (in_features + self.num_groups(in_features) * SCALE_BITS // 8)

    def __str__(self) -> str:
        return f"w{self.bits}a16 {self.kind} g{self.block}"

    def fields(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.block, self.key: self.kind}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Bnb4:
        for name, value in {"bits": 4, "symmetric": True, "activation_bits": None}.items():
            if fields.get(name, value) != value:
                raise SchemeError(f"4-bit blocks have no {name}={fields[name]}", f"Leave {name} out beside {cls.key}")
        return cls(str(fields[cls.key]), int(fields["group_size"]))

    def found(self, module: str, headers: Headers) -> Scheme:
        """The size of blocks, from the numbers of codes and of scales, unless these contradict each other."""
        codes, scales = f"{module}.weight", f"{module}.weight.absmax"
        if codes not in headers or scales not in headers:
            return self
        numbers, blocks = 2 * headers.tensor_nbytes(codes), prod(headers.shape(scales))
        return replace(self, block=next((size for size in BLOCK_SIZES if -(-numbers // size) == blocks), self.block))

    def read(self, stored: StoredTensors) -> TableFloatWeight:
        weight = read_table(stored, self)
        return replace(weight, scales=weight.scales.float())

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        rows, groups = stored[".weight_scale"].shape
        return rows, groups * self.block
