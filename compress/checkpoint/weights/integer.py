"""Integers of 2 to 8 bits with one scale per row and group of input columns, and the words that hold their codes.

Codes are packed as one little-endian bit stream for every format and width: code `i` occupies bits
`[i * bits, (i + 1) * bits)` of the stream, which is cut into int32 words. Eight codes fill exactly `bits` bytes, which
is the unit both directions work on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.checkpoint.scheme import GROUP_SIZES, MAX_BITS, MIN_BITS, Activations, Scheme, register
from compress.checkpoint.weights.base import (
    PANEL_ELEMENTS,
    StoredTensors,
    Weight,
    cast_exactly,
    check_activation_order,
    dequantize_by_rows,
    digest_of,
    exact_dtype,
    row_scales,
    scale_problems,
)
from compress.common.errors import CheckpointError, SchemeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from compress.checkpoint.grids import IntegerGrid


@register("bits")
@dataclass(frozen=True, slots=True)
class Int(Scheme):
    """`W ~ (qweight - zero_points) * scales`, one scale per row and group.

    Attributes:
        bits: width of a code, 2 to 8.
        group_size: input columns that share one scale; None means one scale for the whole row (per channel).
        symmetric: zero point fixed at `2 ** (bits - 1)`; scales may be negative (signed full range).
        activations: rounding of the inputs (W8A8); None for 16-bit inputs.
    """

    bits: int = 4
    group_size: int | None = 128
    symmetric: bool = True
    activations: Activations | None = None

    suffixes = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight")
    mark = ".weight_scale"
    has_grid = True
    word = "int"
    numbers = "int"
    structure = ""
    note = ""

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise SchemeError(f"bits={self.bits} is outside {MIN_BITS} to {MAX_BITS}", "Choose --bits 4, 3, 2 or 8")
        if self.group_size is not None and self.group_size < 1:
            raise SchemeError(f"group size {self.group_size} is not positive", "Choose --group-size 128, 64 or 32")
        if self.activations not in (None, Activations.INT8):
            raise SchemeError(f"integers with {self.activations} activations are not supported", "Use int8 activations")

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric code."""
        return 1 << (self.bits - 1)

    @property
    def as_symmetric(self) -> Int:
        return replace(self, symmetric=True)

    @property
    def num_shapes(self) -> int:
        return 0 if self.activations else 1

    def num_groups(self, in_features: int) -> int:
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            fitting = [size for size in GROUP_SIZES if in_features % size == 0]
            remedy = f"Use --group-size {fitting[-1]}" if fitting else "Use per-channel groups (--group-size -1)"
            raise SchemeError(
                f"group size {self.group_size} does not divide {in_features} input features",
                f"{remedy}, or leave the layer out with --ignore",
            )
        return in_features // self.group_size

    def check(self, shape: tuple[int, int]) -> None:
        self.num_groups(shape[1])
        if self.activations and (self.bits, self.group_size, self.symmetric) != (8, None, True):
            raise SchemeError(
                f"{self} cannot be stored: 8-bit activations need symmetric 8-bit weights per channel",
                "Use --bits 8 --group-size -1 --symmetric, or 16-bit activations",
            )

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        group_bits = scale_bits + (0 if self.symmetric else self.bits)
        return out_features * (in_features * self.bits + self.num_groups(in_features) * group_bits)

    def unpacked_bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        return out_features * (in_features + self.num_groups(in_features) * (scale_bytes + 1))

    def __str__(self) -> str:
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"w{self.bits}a{self.activation_bits or 16} {group} {'sym' if self.symmetric else 'asym'}"

    def fields(self) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "activation_bits": self.activation_bits,
        }

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Int:
        given = {name: fields[name] for name in ("bits", "group_size", "symmetric") if name in fields}
        return cls(**given, activations=Activations.from_bits(fields.get("activation_bits"), Activations.INT8))

    def shape(self, stored: StoredTensors) -> tuple[int, int]:
        unpacked = stored.optional(".weight")
        rows, columns = stored[".weight_shape"].tolist() if unpacked is None else unpacked.shape
        return rows, columns

    def read(self, stored: StoredTensors) -> IntegerWeight:
        packed = stored.optional(".weight_packed")
        scale = stored[".weight_scale"]
        codes = self._signed_codes(stored) if packed is None else self._packed_codes(stored, packed)
        rows, columns = codes.shape
        groups = self.num_groups(columns)
        check_activation_order(stored.module, stored.optional(".weight_g_idx"), columns, self.group_size)
        return IntegerWeight(codes, row_scales(scale, rows, groups), self.read_zero(stored, rows, groups), self)

    def _signed_codes(self, stored: StoredTensors) -> Tensor:
        import torch

        signed = stored[".weight"]
        if signed.dtype != torch.int8:
            raise CheckpointError(f"{stored.module}.weight should hold int8 codes, but is {signed.dtype}")
        return (signed.to(torch.int16) + self.midpoint).to(torch.uint8)

    def _packed_codes(self, stored: StoredTensors, packed: Tensor) -> Tensor:
        rows, columns = stored[".weight_shape"].tolist()
        if packed.shape != (rows, num_words(columns, self.bits)):
            raise CheckpointError(
                f"{stored.module}.weight_packed is {list(packed.shape)}, but {rows} x {columns} codes of {self.bits} "
                f"bits pack to {[rows, num_words(columns, self.bits)]}",
                "Write it again with compressed-tensors 0.16 or newer: before, 3, 5, 6 and 7 bits had another layout",
            )
        return unpack_bits(packed, self.bits, columns, 1)

    def read_zero(self, stored: StoredTensors, rows: int, groups: int) -> Tensor:
        """Zero points `[O, G]` of a stored layer; the midpoint everywhere when it is symmetric."""
        import torch

        zero = None if self.symmetric else stored.optional(".weight_zero_point")
        if zero is None:
            return torch.full((rows, groups), self.midpoint, dtype=torch.uint8)
        if zero.dtype == torch.int32:
            return unpack_bits(zero, self.bits, rows, 0)
        return (zero.to(torch.int16) + self.midpoint).to(torch.uint8).reshape(rows, groups)

    def name_problems(self, module: str, suffixes: set[str]) -> list[str]:
        problems = []
        if {".weight", ".weight_packed"} <= suffixes:
            problems.append(f"{module} is stored both dense and packed")
        if self.symmetric and ".weight_zero_point" in suffixes:
            problems.append(f"{module} is symmetric, but stores zero points")
        return problems

    def round(
        self, weight: Tensor, importance: Tensor | None = None, scale_dtype: torch.dtype | None = None
    ) -> IntegerWeight:

        from compress.checkpoint.scale_search import encode, search_scales

        return encode(weight, search_scales(weight, self, importance, scale_dtype), self)

    def grid(
        self,
        weight: Tensor,
        importance: Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        inputs: Tensor | None = None,
    ) -> IntegerGrid:
        from compress.checkpoint.grids import IntegerGrid
        from compress.checkpoint.scale_search import search_scales

        return IntegerGrid(search_scales(weight, self, importance, scale_dtype, inputs=inputs), self)

    def round_in_range(self, weight: Tensor, scale_dtype: torch.dtype | None = None) -> Tensor:

        from compress.checkpoint.scale_search import round_in_range

        return round_in_range(weight, self, scale_dtype)


def integers(scheme: Scheme | None) -> Int:
    """The scheme of codes that a method rounds to. Raises SchemeError unless they are integers."""
    if isinstance(scheme, Int):
        return scheme
    raise SchemeError(f"integers are wanted, not {scheme or '16-bit values'}", "Use method rtn, or integer bits")


@dataclass(frozen=True, slots=True)
class IntegerWeight(Weight):
    """`W [O, I] ~ (qweight - zero_points) * scales`, with scales and zero points repeated over each group of columns.

    Attributes:
        qweight: uint8 `[O, I]`, codes, each in `[0, scheme.max_code]`, in the original column order.
        scales: `[O, G]` in the dtype that is stored (bfloat16, float16 or float32); may be negative.
        zero_points: uint8 `[O, G]`; `scheme.midpoint` everywhere when symmetric.
        scheme: bits, group size and symmetry.

    Raises:
        SchemeError: shapes, dtypes or zero points that contradict the scheme.
    """

    qweight: Tensor
    scales: Tensor
    zero_points: Tensor
    scheme: Int

    def __post_init__(self) -> None:
        import torch

        expected = (self.qweight.shape[0], self.scheme.num_groups(self.qweight.shape[1]))
        if self.qweight.dtype != torch.uint8 or self.zero_points.dtype != torch.uint8:
            raise SchemeError(
                f"codes and zero points must be uint8, not {self.qweight.dtype} and {self.zero_points.dtype}"
            )
        if tuple(self.scales.shape) != expected or tuple(self.zero_points.shape) != expected:
            shapes = f"scale {tuple(self.scales.shape)} and zero {tuple(self.zero_points.shape)}"
            raise SchemeError(f"{shapes} must be {expected} for {self.scheme}")

    @property
    def is_symmetric(self) -> bool:
        return bool((self.zero_points == self.scheme.midpoint).all())

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[O, I]`. The product is exact in float32 and rounded once, so 16-bit results are the correctly
        rounded ones that other loaders also compute."""
        import torch

        exact = exact_dtype(dtype or torch.float32, self.scales)

        def panel(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
            offsets = codes.unflatten(1, (scale.shape[1], -1)).to(exact) - zero.to(exact).unsqueeze(-1)
            return (offsets * scale.to(exact).unsqueeze(-1)).flatten(1)

        return dequantize_by_rows(dtype, panel, self.qweight, self.scales, self.zero_points)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        import torch

        scale = cast_exactly(self.scales, dtype)
        if self.scheme.activations:
            return {".weight": (self.qweight ^ 0x80).view(torch.int8), ".weight_scale": scale}
        return {
            ".weight_packed": pack_bits(self.qweight, self.scheme.bits, 1),
            ".weight_scale": scale,
            ".weight_shape": torch.tensor(self.shape, dtype=torch.int64),
            **self.zero_tensors(),
        }

    def zero_tensors(self) -> dict[str, Tensor]:
        """Stored zero points; none when symmetric."""
        if self.scheme.symmetric:
            return {}
        return {".weight_zero_point": pack_bits(self.zero_points, self.scheme.bits, 0)}

    def stored_as(self, scheme: Scheme) -> Weight:
        return replace(self, scheme=scheme) if isinstance(scheme, Int) else Weight.stored_as(self, scheme)

    def problems(self, module: str) -> Iterator[str]:
        if max(int(self.qweight.max()), int(self.zero_points.max())) > self.scheme.max_code:
            yield f"{module} has codes or zero points above {self.scheme.max_code}"
        yield from scale_problems(module, self.scales)

    def digest(self) -> str:
        import torch

        kind = f"{self.scheme.bits} {self.scheme.group_size} {self.shape}"
        return digest_of(kind, self.qweight, self.scales.to(torch.float64), self.zero_points)


def num_words(count: int, bits: int) -> int:
    """int32 words that hold `count` codes."""
    return -(-count * bits // 32)


def pack_bits(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Packs unsigned codes along one dimension of a matrix.

    Args:
        codes: integers `[R, C]` in `[0, 2 ** bits)`.
        bits: 1 to 8.
        dim: 0 or 1, the dimension that becomes shorter.

    Returns:
        int32 `[R, ceil(C * bits / 32)]` for `dim=1`, `[ceil(R * bits / 32), C]` for `dim=0`; unused high bits are 0.

    Raises:
        SchemeError: a code that needs more bits.
    """
    import torch

    if dim == 0:
        return pack_bits(codes.T, bits, 1).T.contiguous()
    if codes.numel() and int(codes.max()) >> bits:
        raise SchemeError(f"code {int(codes.max())} does not fit in {bits} bits")
    return torch.cat([_pack_rows(rows, bits) for rows in _panels(codes)])


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    import torch

    rows, count = codes.shape
    octets = -(-count // 8)
    padded = torch.zeros(rows, octets * 8, dtype=torch.uint8, device=codes.device)
    padded[:, :count] = codes
    lanes = padded.view(rows, octets, 8)
    stream = torch.zeros(rows, octets, dtype=torch.int64, device=codes.device)
    for lane in range(8):
        stream |= lanes[:, :, lane].to(torch.int64) << (lane * bits)
    packed = stream.view(torch.uint8).view(rows, octets, 8)[:, :, :bits].reshape(rows, octets * bits)
    return _resize_columns(packed, num_words(count, bits) * 4).view(torch.int32)


def unpack_bits(words: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """The inverse of `pack_bits`: uint8 codes, `count` of them along `dim`.

    Args:
        words: int32 matrix.
        count: codes along `dim` before packing (the last word may be partly used).

    Raises:
        SchemeError: too few or too many words for `count` codes.
    """
    import torch

    if dim == 0:
        return unpack_bits(words.T, bits, count, 1).T.contiguous()
    if words.shape[1] != num_words(count, bits):
        raise SchemeError(f"{count} codes of {bits} bits need {num_words(count, bits)} words, not {words.shape[1]}")
    unpack = _unpack_nibbles if bits in (4, 8) else _unpack_rows
    return torch.cat([unpack(_octets(panel), bits, count) for panel in _panels(words)])


def _octets(words: Tensor) -> Tensor:
    """Returns words `[R, C]` as bytes; one word per row may have any stride, with which torch cannot view it."""
    import torch

    return words.contiguous().flatten().view(torch.uint8).view(words.shape[0], -1)


def _unpack_nibbles(octets: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks 4 and 8 bits in fewer passes than `_unpack_rows`, which halves the time to load."""
    import torch

    if bits == 4:
        wide = octets.to(torch.int16)
        octets = (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)
    return octets[:, :count]


def _unpack_rows(stored: Tensor, bits: int, count: int) -> Tensor:
    import torch

    rows = stored.shape[0]
    octets = -(-count // 8)
    packed = _resize_columns(stored, octets * bits).view(rows, octets, bits)
    stream = torch.zeros(rows, octets, 8, dtype=torch.uint8, device=stored.device)
    stream[:, :, :bits] = packed
    wide = stream.view(torch.int64).view(rows, octets)
    codes = torch.empty(rows, octets, 8, dtype=torch.uint8, device=stored.device)
    for lane in range(8):
        codes[:, :, lane] = (wide >> (lane * bits)) & ((1 << bits) - 1)
    return codes.view(rows, octets * 8)[:, :count].contiguous()


def _panels(matrix: Tensor) -> tuple[Tensor, ...]:
    """Splits a matrix into row panels: both directions need several times the memory of their input."""
    return matrix.split(max(1, PANEL_ELEMENTS // max(1, matrix.shape[1])))


def _resize_columns(matrix: Tensor, columns: int) -> Tensor:
    """Cuts or zero-pads `[R, C]` to `[R, columns]`; only padding bits are cut."""
    import torch

    resized = torch.zeros(matrix.shape[0], columns, dtype=matrix.dtype, device=matrix.device)
    kept = min(columns, matrix.shape[1])
    resized[:, :kept] = matrix[:, :kept]
    return resized
