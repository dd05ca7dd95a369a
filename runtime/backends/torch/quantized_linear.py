"""Packed 2- to 4-bit weights on CPUs with AVX2 or AVX-512: half a byte per weight in memory, bfloat16 in and out.

PyTorch's int4 product computes `(nibble - 8) * scale + zero` in float32 with scale and zero in bfloat16. Codes are
moved so that 8 is the symmetric zero point; then symmetric weights of 2, 3 and 4 bits with bfloat16 scales are
multiplied exactly (only the output is rounded). Zero points of asymmetric weights, and float16 scales, are rounded to
bfloat16: about the error that rounding the dequantized weights to bfloat16 makes.

For many rows the nibbles are dequantized a panel of columns at a time and given to a dense product, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.input_rounding import InputRounding
from compress.checkpoint.scale_search import quantize_tokens
from compress.checkpoint.weights import Activations, Scheme, Weight
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.integer import Int
from compress.checkpoint.weights.rotated_inputs import rotate
from runtime.backends.backend import LinearKernel
from runtime.backends.base import Linear, Target
from runtime.backends.torch.linear import has_vector_nibbles

GROUP_SIZES = (256, 128, 64, 32)
ROW_MULTIPLE = 64
SCALE_BYTES, ZERO_BYTES = 2, 1
MIDDLE = 8
MAX_DIRECT_ROWS = 96
"""Rows of x up to which the packed product is faster than dequantizing a panel first (measured)."""
PANEL_COLUMNS = 1024
LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F


class Int4PackLinear:
    """Prepares nibbles in the layout of this CPU; it is never stored."""

    def __init__(self, weight: CodedWeight, bias: Tensor | None, target: Target) -> None:
        self.out_features, self.in_features = weight.shape
        self.group_size = kernel_group_size(weight.scheme, self.in_features)
        codes, scale, zero = _padded(weight, self.in_features // self.group_size)
        nibbles = codes + (MIDDLE - weight.scheme.zero)
        zero_nibbles = zero.int() + (MIDDLE - weight.scheme.zero)
        offset = (MIDDLE - zero_nibbles) * scale.float()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.int(), 1)
        self._scales = torch.stack((scale.bfloat16(), offset.bfloat16()), -1).transpose(0, 1).contiguous()
        self._zero = MIDDLE if weight.scheme.symmetric else zero_nibbles.T.bfloat16().unsqueeze(1)
        self._bias = bias
        self._tile = tile_columns()
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self.nbytes = self._packed.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > MAX_DIRECT_ROWS and self._tile:
            y = self._multiply_by_panels(x)
        else:
            y = self._multiply(x.contiguous(), self._packed, self.group_size, self._scales)
        if y.shape[1] != self.out_features:
            y = y[:, : self.out_features]
        return y if self._bias is None else y + self._bias

    @property
    def reads_rows(self) -> bool:
        return self._tile > 0

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """A row is half of the bytes of one column of its tile."""
        half = self._tile // 2
        places = indices % self._tile
        octets = self._packed.view(-1, self.in_features, half)[indices // self._tile, :, places % half]
        nibbles = torch.where(places.unsqueeze(-1) < half, octets & 15, octets >> 4)
        zero = self._zero if isinstance(self._zero, int) else self._zero[:, 0, indices].T.unsqueeze(-1)
        grouped = nibbles.to(torch.bfloat16).view(len(indices), -1, self.group_size)
        return grouped.sub_(zero).mul_(self._scales[:, indices, 0].T.unsqueeze(-1)).flatten(1).to(dtype)

    def _multiply_by_panels(self, x: Tensor) -> Tensor:
        num_columns = self._scales.shape[1]
        starts = range(0, num_columns, PANEL_COLUMNS)
        return torch.cat([x @ self._panel(start, min(start + PANEL_COLUMNS, num_columns)) for start in starts], -1)

    def _panel(self, start: int, stop: int) -> Tensor:
        """Dequantized columns of W^T `[I, stop - start]` in bfloat16, rounded once from the exact product."""
        tile = self._tile
        words = self._packed.view(-1, self.in_features, tile // 2)[start // tile : stop // tile].view(torch.int64)
        nibbles = torch.empty(self.in_features, len(words), 2, tile // 16, dtype=torch.int64)
        nibbles[:, :, 0] = (words & LOW_NIBBLES).transpose(0, 1)
        nibbles[:, :, 1] = ((words >> 4) & LOW_NIBBLES).transpose(0, 1)
        panel = nibbles.view(torch.uint8).to(torch.bfloat16).view(-1, self.group_size, stop - start)
        zero = self._zero if isinstance(self._zero, int) else self._zero[:, :, start:stop]
        scale = self._scales[:, start:stop, 0].contiguous()  # a strided factor makes the product six times slower
        return panel.sub_(zero).mul_(scale.unsqueeze(1)).view(self.in_features, -1)


def kernel_group_size(scheme: Scheme, in_features: int) -> int:
    """The largest group the kernel knows that divides the scheme's (longer groups repeat their scale); 0 for none."""
    group_size = in_features if scheme.group_size is None else scheme.group_size
    return next((size for size in GROUP_SIZES if group_size % size == 0), 0)


def _padded(weight: CodedWeight, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero with scales repeated to `num_groups` and rows of zeros up to the kernel's multiple."""
    repeats = num_groups // weight.scales.shape[1]
    rows = -weight.shape[0] % ROW_MULTIPLE
    scale, zero = (t.repeat_interleave(repeats, 1) for t in (weight.scales, weight.zero_points))
    codes, scale, zero = (torch.cat((t, t.new_zeros(rows, t.shape[1]))) for t in (weight.qweight, scale, zero))
    return codes, scale, zero


@cache
def tile_columns() -> int:
    """Output features per tile of this CPU's layout `[O / tile, I, tile / 2]` (low nibbles: the first half of a tile).

    PyTorch does not promise the layout, so it is probed; 0 means unknown, and panels are then not used.
    """
    codes = torch.arange(ROW_MULTIPLE * 2, dtype=torch.int32).view(ROW_MULTIPLE, 2) * 7 % 16
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    for tile in (64, 32):
        view = packed.view(-1, 2, tile // 2)
        if torch.equal(torch.cat((view & 15, view >> 4), -1).transpose(1, 2).reshape(-1, 2).int(), codes):
            return tile
    return 0


def int4pack_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if target.device.type != "cpu" or not has_vector_nibbles():
        return "needs a CPU with AVX2 or AVX-512"
    if target.dtype != torch.bfloat16:
        return f"is fast in bfloat16 only, not in {str(target.dtype).removeprefix('torch.')}"
    if scheme.bits > 4 or scheme.activation_bits is not None:
        return "takes 2 to 4 bits and 16-bit activations"
    if not kernel_group_size(scheme, in_features):
        return f"takes groups that are a multiple of {GROUP_SIZES[-1]}"
    return ""


def _int4pack_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    padded = rows + -rows % ROW_MULTIPLE
    groups = columns // kernel_group_size(scheme, columns)
    return padded * columns // 2 + padded * groups * 2 * SCALE_BYTES  # scales and offsets


INT4PACK = LinearKernel(
    "int4pack",
    "packed nibbles, float32 sums: exact for symmetric codes",
    "int",
    int4pack_unsupported_reason,
    Int4PackLinear,
    _int4pack_nbytes,
    lambda columns, target: tile_columns() > 0,
)


SHIFT = 128


class Int8DynamicLinear:
    """Weights in oneDNN's own blocked layout."""

    def __init__(self, weight: CodedWeight, bias: Tensor | None, target: Target) -> None:
        offsets = (weight.qweight.to(torch.int16) - weight.scheme.zero).to(torch.int8)
        self.nbytes = offsets.nbytes + weight.scales.nbytes
        self._packed = torch.ops.onednn.qlinear_prepack(offsets, None)
        self._scale = weight.scales[:, 0].float().contiguous()
        self._bias, self._kind = bias, weight.scheme.activations or Activations.INT8
        self._zero = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._multiply: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        q8, scale = quantize_tokens(x, self._kind)
        q8 = q8.add_(SHIFT).to(torch.uint8)
        y = self._multiply(
            q8, 1.0, SHIFT, self._packed, self._scale, self._zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y.mul_(scale)
        return (y if self._bias is None else y + self._bias).to(x.dtype)


@cache
def has_exact_byte_products() -> bool:
    """Whether oneDNN sums products of bytes in 32 bits (VNNI), found by a product that would saturate in 16 bits: it
    may have been told to use fewer instructions than the processor has."""
    if not (torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()):
        return False
    weight = Int(8, None, True, Activations.INT8).weight(torch.full((1, 4), 255, dtype=torch.uint8), torch.ones(1, 1))
    return bool(
        Int8DynamicLinear(weight, None, Target(torch.device("cpu"), torch.float32))(torch.full((1, 4), 127.0))
        == 4 * 127 * 127
    )


def int8_dynamic_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if scheme.activation_bits is None:
        return "needs rounded activations"
    if scheme.group_size is not None or not scheme.symmetric:
        return "takes symmetric weights with one scale per channel"
    if target.device.type != "cpu" or target.dtype == torch.float64:
        return "runs on CPUs, in 16 or 32 bits"
    if not has_exact_byte_products():
        return "needs a CPU with 8-bit dot products (VNNI)"
    return ""


INT8_DYNAMIC = LinearKernel(
    "int8_dynamic",
    "8-bit codes times rounded activations, exact int32 sums",
    "int",
    int8_dynamic_unsupported_reason,
    Int8DynamicLinear,
    lambda scheme, rows, columns, target: rows * (columns + SCALE_BYTES),
)


FP8_TOKENS = InputRounding(Activations.FP8)


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """A linear whose inputs are rounded, by default to 8-bit floats, token by token."""

    linear: Linear
    rounding: InputRounding = FP8_TOKENS

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.rounding(x))


@dataclass(frozen=True, slots=True)
class TurnedInputs:
    """A linear of whose inputs every `order` are multiplied by a Hadamard matrix, and rounded to their dtype."""

    linear: Linear
    order: int

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(rotate(x, self.order))


@dataclass(frozen=True, slots=True)
class IntegerInputs:
    """A linear over inputs that are rounded to integers, token by token, in 16 bits.

    The integers times a power of two are exact in 16 bits; what is left of a token's scale, 0.5 to 1, multiplies its
    products.

    Attributes:
        linear: without a bias.
        bias: `[O]`, or None.
        kind: of the rounding.
    """

    linear: Linear
    bias: Tensor | None
    kind: Activations

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        integers, scales = quantize_tokens(x, self.kind)
        rest, exponents = torch.frexp(scales)
        y = (self.linear(torch.ldexp(integers, exponents).to(x.dtype)) * rest).to(x.dtype)
        return y if self.bias is None else y + self.bias


PANEL_ELEMENTS = 2**22
"""Weights that are dense at one time."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceLinear:
    """Keeps codes as bytes and dequantizes rows on every call."""

    weight: Weight
    bias: Tensor | None

    @classmethod
    def prepare(cls, weight: Weight, bias: Tensor | None, target: Target) -> ReferenceLinear:
        return cls(weight.to(target.device), bias)

    @property
    def reads_rows(self) -> bool:
        return self.weight.scheme.fuses

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if activations := self.weight.scheme.activations:
            q8, scale = quantize_tokens(x, activations)
            y = (self._multiply(q8) * scale).to(x.dtype)
        else:
            y = self._multiply(x)
        return y if self.bias is None else y + self.bias

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.changed(lambda tensor: tensor.index_select(0, indices)).dequantize(dtype)

    @property
    def panels(self) -> list[Weight]:
        """Rows that are dense at one time: all of a form whose tensors have no row per output."""
        if not self.weight.scheme.fuses:
            return [self.weight]
        features, inputs = self.weight.shape
        rows = max(1, PANEL_ELEMENTS // inputs)
        return [self._slice(first, first + rows) for first in range(0, features, rows)]

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.cat([functional.linear(x, panel.dequantize(x.dtype)) for panel in self.panels], -1)

    def _slice(self, first: int, stop: int) -> Weight:
        return self.weight.changed(lambda tensor: tensor[first:stop])


def _reference_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return scheme.unpacked_bytes(rows, columns, SCALE_BYTES)


REFERENCE = LinearKernel(
    "reference",
    "dequantizes on every call: the oracle, slow, least memory",
    "",
    lambda scheme, in_features, target: "",
    ReferenceLinear.prepare,
    _reference_nbytes,
    lambda columns, target: True,
)
