"""The table of forms: one class of attributes for each, without methods unless sizes of the form vary.

Adding a class here, or anywhere else with `register`, is all that a form needs to be rounded, stored, verified,
exported and served by the kernels of its kind of codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import Activations, Headers, Scheme, register
from compress.checkpoint.weights.base import row_scales
from compress.checkpoint.weights.coded import EXPONENTS, FLOAT8_SCALES, TABLE, CodedWeight, Scales
from compress.checkpoint.weights.layouts import Blocks, ByteFloats, PackedCodes
from compress.common.errors import SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""4-bit floats by code: a sign, 2 bits of exponent and 1 of mantissa."""
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Numbers that a normal distribution takes equally often (QLoRA, arXiv:2305.14314, appendix E)."""
BNB_FP4_VALUES = tuple(sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3))
"""FP4 of bitsandbytes: a sign, two bits of exponent and one of mantissa, divided by the largest."""
IQ4_NL_VALUES = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
"""Levels of GGUF's iq4_nl; none is 0."""
FRACTIONS = (1.0, *(1 + 0.02 * step for step in (*range(-1, -16, -1), 1, 2)))
"""Parts of the scale that spans a group which are tried."""
FACTORS = tuple(2 ** (step / 8) for step in range(8))
"""Factors of the scale that spans a row or block of 8-bit floats."""
NEIGHBOURS = (0, *(sign * step for step in range(1, 7) for sign in (-1, 1)))
"""Neighbours of the 8-bit float that clips nothing: from about half to twice of it."""
ENGINES = "is read by this runtime, vLLM and transformers (bfloat16 only): inputs keep 16 bits here"
BNB_TABLES = {"nf4": NF4_VALUES, "fp4": BNB_FP4_VALUES}
"""Numbers of codes by the type of a quantization state of bitsandbytes."""
BNB_BLOCKS = tuple(2**power for power in range(5, 13))


@register("mxfp4")
class Mxfp4(PackedCodes):
    """4-bit floats with a power of two for 32 columns: MXFP4 of the OCP microscaling formats, version 1.0."""

    word = "mxfp4"
    bits = 4
    code_values = E2M1_VALUES
    group_size = 32
    scales = Scales(EXPONENTS, "few scales", (0, -1, -2, 1))
    structure = ""
    readers = ENGINES


@register("nvfp4")
class Nvfp4(PackedCodes):
    """4-bit floats with an 8-bit float for 16 columns and a float32 number for the matrix: NVFP4 of NVIDIA."""

    word = "nvfp4"
    bits = 4
    code_values = E2M1_VALUES
    group_size = 16
    scales = Scales(FLOAT8_SCALES, "few scales", NEIGHBOURS, divisor_bits=32)
    suffixes = (*PackedCodes.suffixes, PackedCodes.DIVISOR)
    structure = ""
    readers = ENGINES


@register("nf4")
class Nf4(PackedCodes):
    """NF4 as QLoRA defines it, with scales in 16 bits."""

    word = "nf4"
    bits = 4
    code_values = NF4_VALUES
    group_size = 64
    scales = Scales("", "any scales", FRACTIONS)


@register("bnb4")
@dataclass(frozen=True, slots=True)
class Bnb4(PackedCodes):
    """NF4 and FP4 of bitsandbytes.

    Attributes:
        kind: `nf4` or `fp4`.
        group_size: columns that share a scale.
    """

    kind: str = "nf4"
    group_size: int = 64

    bits = 4
    scales = Scales("float32")
    has_grid = is_exact_size = False
    structure = "the layout of bitsandbytes' 4-bit blocks"

    def __post_init__(self) -> None:
        if self.kind not in BNB_TABLES or self.group_size not in BNB_BLOCKS:
            raise SchemeError(
                f"bitsandbytes has no 4-bit {self.kind!r} in blocks of {self.group_size}",
                f"Use {' or '.join(BNB_TABLES)} in blocks of {BNB_BLOCKS[0]} to {BNB_BLOCKS[-1]}",
            )

    @property
    def code_values(self) -> tuple[float, ...]:
        return BNB_TABLES[self.kind]

    @property
    def title(self) -> str:
        return f"{self.kind} g{self.group_size}"

    @property
    def entry(self) -> str:
        return self.kind

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Bnb4:
        cls.check_fields(fields, activation_bits=None)
        return cls(str(fields[cls.key]), int(fields["group_size"]))

    def found(self, module: str, headers: Headers) -> Scheme:
        """The size of blocks, from the numbers of codes and of scales, unless these contradict each other."""
        codes, scales = f"{module}.weight", f"{module}.weight.absmax"
        if codes not in headers or scales not in headers:
            return self
        numbers, blocks = 2 * headers.tensor_nbytes(codes), prod(headers.shape(scales))
        fitting = (size for size in BNB_BLOCKS if -(-numbers // size) == blocks)
        return replace(self, group_size=next(fitting, self.group_size))


@register("mxfp8")
class Mxfp8(ByteFloats):
    """8-bit floats with a power of two for 32 columns: MXFP8 of the OCP microscaling formats, version 1.0."""

    word = "mxfp8"
    group_size = 32
    scales = Scales(EXPONENTS, "few scales", (0, -1, 1))
    readers = ENGINES
    is_exact_size = True


@register("fp8")
@dataclass(frozen=True, slots=True)
class Fp8(ByteFloats):
    """8-bit floats with one scale for each row.

    Attributes:
        activations: rounding of the inputs to such floats; None for 16-bit inputs.
    """

    activations: Activations | None = None

    word = "fp8"
    scales = Scales("", "scales of rows", FACTORS)
    has_grid = False
    title = "fp8 channel"

    @classmethod
    def target(cls) -> Fp8:
        return cls(Activations.FP8)

    def __post_init__(self) -> None:
        if self.activations not in (None, Activations.FP8):
            raise SchemeError(f"8-bit floats with {self.activations} activations are not supported", "Use fp8 for both")

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Fp8:
        cls.check_fields(fields, group_size=None)
        return cls(Activations.from_bits(fields.get("activation_bits"), Activations.FP8))

    def repeated(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        return row_scales(scales, shape[0], 1)


@register("fp8_block")
@dataclass(frozen=True, slots=True)
class BlockFp8(ByteFloats):
    """8-bit floats with a float32 scale for each block of rows and columns, as DeepSeek and Qwen publish them.

    Attributes:
        block: rows and columns that share a scale; the last blocks may be smaller.
    """

    block: tuple[int, int] = (128, 128)

    word = "fp8-block"
    scales = Scales("float32", "scales of blocks", FACTORS)

    def __post_init__(self) -> None:
        if len(self.block) != 2 or min(self.block) < 1:
            raise SchemeError(f"blocks of {list(self.block)} are not rows and columns", "Use [128, 128]")

    @property
    def block_rows(self) -> int:
        return self.block[0]

    @property
    def title(self) -> str:
        return f"fp8 blocks {self.block[0]}x{self.block[1]}"

    @property
    def entry(self) -> list[int]:
        return list(self.block)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> BlockFp8:
        cls.check_fields(fields, group_size=None, activation_bits=None)
        rows, columns = fields[cls.key]
        return cls((int(rows), int(columns)))

    @property
    def column_multiple(self) -> int:
        return self.block[1]

    def columns(self, in_features: int) -> int:
        return self.block[1]

    def num_blocks(self, in_features: int) -> int:
        return -(-in_features // self.block[1])

    def repeated(self, scales: Tensor, shape: Sequence[int]) -> Tensor:
        rows, columns = shape
        expected = -(-rows // self.block[0]), self.num_blocks(columns)
        if tuple(scales.shape) != expected:
            raise SchemeError(f"scales {tuple(scales.shape)} must be {expected} for {self} of {rows} x {columns}")
        return scales.float().repeat_interleave(self.block[0], 0)[:rows].contiguous()

    def stored_scales(self, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
        return weight.scales[:: self.block[0]].contiguous()


@register("iq4_nl")
class Iq4Nl(Blocks):
    """16 levels with a float16 scale for 32 columns; scales may be negative."""

    word = "iq4_nl"
    bits = 4
    numbers = TABLE
    code_values = IQ4_NL_VALUES
    group_size = block_size = 32
    scales = Scales("float16", "signed scales")


@register("q4_1")
class Q4Minima(Blocks):
    """4 bits with a float16 scale and a float16 minimum for 32 columns."""

    word = "q4_1"
    bits = 4
    group_size = block_size = 32
    scales = Scales("float16", "ranges", has_minima=True)


@register("q5_1")
class Q5Minima(Q4Minima):
    """5 bits with a float16 scale and a float16 minimum for 32 columns."""

    word = "q5_1"
    bits = 5


class KQuant(Blocks):
    """A K type: integers in groups, whose scales and minima are integers times a float16 of 256 columns."""

    __slots__ = ()
    block_size = 256
    structure = "the super-blocks"


@register("q2_k")
class Q2K(KQuant):
    """2 bits in groups of 16, with scales and minima of 4 bits."""

    word = "q2_k"
    bits = 2
    group_size = 16
    scales = Scales("float16", "integer scales", step_bits=4, has_minima=True)


@register("q3_k")
class Q3K(KQuant):
    """3 bits in groups of 16, with scales of 6 bits."""

    word = "q3_k"
    bits = 3
    group_size = 16
    scales = Scales("float16", "integer scales", step_bits=6)


@register("q4_k")
class Q4K(KQuant):
    """4 bits in groups of 32, with scales and minima of 6 bits."""

    word = "q4_k"
    bits = 4
    group_size = 32
    scales = Scales("float16", "integer scales", step_bits=6, has_minima=True)


@register("q5_k")
class Q5K(Q4K):
    """5 bits in groups of 32, with scales and minima of 6 bits."""

    word = "q5_k"
    bits = 5


@register("q6_k")
class Q6K(KQuant):
    """6 bits in groups of 16, with scales of 8 bits."""

    word = "q6_k"
    bits = 6
    group_size = 16
    scales = Scales("float16", "integer scales", step_bits=8)
