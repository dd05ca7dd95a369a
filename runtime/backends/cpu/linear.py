"""Packed linears in plain C on CPUs (`compress.cpu`): exact codes, scales and zero points, float32 or int32 sums.

Five kernels over one layout. `cpu` multiplies by activations as they come, `cpu_sparse` does so and reads only
what 2:4 sparsity keeps, `cpu_int8` multiplies by the 8-bit activations that the checkpoint asks for. `cpu_w4a8`
rounds activations to 8 bits although the checkpoint does not ask for it: faster for many rows, and a little further
from the model, so it serves only the mode `w4a8`. `cpu_mxfp4` looks 4-bit floats up in a table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from compress.checkpoint.weights import Int, Mxfp4, NMSparsity, Scheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.checkpoint.weights.mxfp4 import EXPONENT_BIAS, GROUP_SIZE, VALUES, Mxfp4Weight
from compress.common.errors import SchemeError, ToolkitError
from compress.cpu.binding import BEST, INSTRUCTION_SETS, absence, best_instruction_set, library
from runtime.backends.base import DenseKernel, LinearKernel, Target
from runtime.backends.cpu.choice import DENSE_FORM, dense_refusal, describe, fewest_tile_rows
from runtime.backends.cpu.huge_pages import empty_words
from runtime.backends.prepared_weight import Layout, PreparedWeight

SPARSE_BITS = 3
"""Per weight: two codes of 4 bits and two places of 2 bits for four of them."""
ZERO_CODE = 8
NUMBER_BITS = 16
"""Bits of a weight that is bfloat16 numbers."""
FASTER_SETS = ("avx2", "avx512")


def kept_unsupported_reason(scheme: Scheme) -> str:
    """Why a weight's zeros should be read, too; empty where reading kept codes alone was measured to be faster."""
    if scheme.sparsity != NMSparsity(2, 4):
        return "takes 2:4 sparsity"
    if not scheme.symmetric or scheme.bits not in (3, 4):
        return "takes symmetric codes of 3 and 4 bits"
    best = INSTRUCTION_SETS[best_instruction_set()]
    return "" if best in FASTER_SETS else f"was not seen to be faster with {best}"


def check_kept(codes: Tensor) -> None:
    """Refuses codes `[O, I]` of which more than two of four neighbours are not `ZERO_CODE`.

    Raises:
        SchemeError: there are such codes.
    """
    if (codes.unflatten(1, (-1, 4)) != ZERO_CODE).sum(-1, dtype=torch.uint8).max() > 2:
        raise SchemeError(
            "a weight recorded as 2:4 sparse keeps more than 2 of 4 values", "Use --linear-backend reference"
        )


def expand_words(words: Tensor) -> Tensor:
    """Codes `[T, I]`, int32, from words `[T, I * 3 / 32]`."""
    codes, places = words.unflatten(1, (-1, 3)).split((2, 1), -1)
    nibbles = torch.arange(0, 32, 4, dtype=torch.int32)
    kept = (codes.unsqueeze(-1) >> nibbles & 15).flatten(-2).unflatten(-1, (8, 2))
    where = (places >> torch.arange(0, 32, 2, dtype=torch.int32) & 3).unflatten(-1, (8, 2))
    filled = torch.full((*kept.shape[:-1], 4), ZERO_CODE, dtype=torch.int32)
    return filled.scatter_(-1, where.long(), kept).flatten(1)


TILE = 64
INPUT_MULTIPLE = 32
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ERRORS = {-1: "this machine lacks the instruction set", -2: "there is no memory"}


class Activations(IntEnum):
    """Form in which activations enter a product."""

    FLOAT = 0
    """As they come."""
    INT8_GROUP = 1
    """Rounded to 8 bits, with a scale per row and run of at most 128 inputs."""
    INT8_ROW = 2
    """Rounded to 8 bits, with a scale per row."""


class _Weight(ctypes.Structure):
    """`LinearWeight` of c/linear/linear.h."""

    _fields_ = (
        *((name, c_int64) for name in ("out_features", "in_features", "group")),
        *((name, c_int32) for name in ("bits", "scale_type", "fewest_tile_rows")),
        *((name, c_void_p) for name in ("words", "scales", "zeros", "bias")),
        ("table", c_float * 16),
    )


class CpuLinear:
    """A weight `[O, I]`, perhaps with a bias, in the layout of the C kernels.

    Codes of up to 2, 4 and 8 bits take 2, 4 and 8 bits, those of 2:4 sparsity 3 if asked for; O is padded to a
    multiple of 64.

    Args:
        weight: integers, bfloat16 numbers `[O, I]`, or what `prepared` returned, which is not copied.
        bias: `[O]`, any float dtype.
        codebook: what the codes stand for, before scales, instead of `code - 2^(bits - 1)`: as many float numbers as
            there are codes of 2 or 4 bits. The weight's zero points are then not looked at.
        sparse: keep two of every four codes; for symmetric weights of 2:4 sparsity and up to 4 bits that meet float
            activations.
        fewest_tile_rows: that matrix tiles multiply, where there are some, 0 for none; None chooses by measurements.

    Attributes:
        address: of the C structure, for compiled code that multiplies by itself.
        activations: a value of `Activations`.
        is_prepared: its memory is that of a `PreparedWeight`.

    Raises:
        ToolkitError: there is no library.
        SchemeError: groups or inputs that are no multiple of 32.
        CheckpointError: a prepared weight whose tensors do not have the sizes of its shape.
    """

    reads_rows = True

    def __init__(
        self,
        weight: IntegerWeight | PreparedWeight | Tensor,
        bias: Tensor | None = None,
        *,
        activations: Activations = Activations.FLOAT,
        codebook: Tensor | None = None,
        sparse: bool = False,
        fewest_tile_rows: int | None = None,
        instruction_set: int = BEST,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.activations, self._instruction_set = int(activations), instruction_set
        self._bias = None if bias is None else bias.float().contiguous()
        self._weight = _Weight(out_features=self.out_features, in_features=self.in_features)
        self._words: Tensor
        self._scale: Tensor | None = None
        self._zero: Tensor | None = None
        self.is_prepared = isinstance(weight, PreparedWeight)
        if isinstance(weight, PreparedWeight):
            self._take(weight, codebook)
        elif isinstance(weight, IntegerWeight):
            self._pack_codes(weight, codebook, sparse)
        else:
            self._pack_numbers(weight)
        self._weight.fewest_tile_rows = self._fewest_tile_rows() if fewest_tile_rows is None else fewest_tile_rows
        self._weight.words = self._words.data_ptr()
        self._weight.bias = None if self._bias is None else self._bias.data_ptr()
        self.address = ctypes.addressof(self._weight)
        self._multiply = _functions().linear_multiply

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._words, self._scale, self._zero) if t is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, I] -> [M, O]` in bfloat16 or float32, whichever `x` is. A row of the result depends on its row of x
        alone, whatever is beside it and however many threads compute it."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        y = x.new_empty(rows, self.out_features)
        self.multiply_into(x, y)
        return y

    def multiply_into(self, x: Tensor, y: Tensor) -> None:
        """Writes the product into `y [M, O]`, whose rows may lie apart.

        Raises:
            ToolkitError: no memory, or not the instruction set that was asked for.
        """
        status = self._multiply(
            self.address,
            self.activations,
            TYPES[x.dtype],
            x.shape[0],
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            self._instruction_set,
        )
        if status:
            raise ToolkitError(f"a compiled product failed: {ERRORS[status]}", "Use --linear-backend reference")

    def prepared(self) -> PreparedWeight:
        """Returns its tensors, which are not copied."""
        named = {"words": self._words, "scales": self._scale, "zeros": self._zero}
        tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
        return PreparedWeight((self.out_features, self.in_features), tensors, self._weight.bits, self._weight.group)

    def _fewest_tile_rows(self) -> int:
        return fewest_tile_rows(form_of(self._weight.bits, Activations(self.activations)))

    @property
    def num_words(self) -> int:
        return len(self._words)

    def move_words(self, memory: Tensor) -> None:
        """Keeps its codes or numbers in `memory`, int32 `[num_words]`, from now on."""
        self._words = memory.copy_(self._words)
        self._weight.words = memory.data_ptr()

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[T, I]` of the weight, dequantized in `dtype`, for int64 `indices [T]`."""
        bits = self._weight.bits
        words = self._words.view(-1, self.in_features * bits // 32, TILE)
        words = words[indices // TILE, :, indices % TILE]
        if self._scale is None:
            return words.view(torch.bfloat16).to(dtype)
        if bits == SPARSE_BITS:
            return self._dequantize(expand_words(words), self._scale, indices, dtype)
        shifts = torch.tensor([k // 2 * bits + k % 2 * 16 for k in range(32 // bits)], dtype=torch.int32)
        codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return self._dequantize(codes.flatten(1), self._scale, indices, dtype)

    def _dequantize(self, codes: Tensor, scale: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        bits, grouped = self._weight.bits, codes.unflatten(1, (-1, self._weight.group))
        table = torch.tensor(list(self._weight.table), dtype=exact)
        values = table[grouped] if bits <= 4 else (grouped - 128).to(exact)
        at = (indices // TILE, slice(None), indices % TILE)
        if self._zero is not None:
            values = values - (self._zero[at].to(exact) - (1 << (bits - 1))).unsqueeze(-1)
        return (values * scale[at].to(exact).unsqueeze(-1)).flatten(1).to(dtype)

    def _pack_codes(self, weight: IntegerWeight, codebook: Tensor | None, sparse: bool) -> None:
        code_bits = 4 if sparse else stored_bits(weight.scheme.bits)
        bits = SPARSE_BITS if sparse else code_bits
        group = self.in_features // weight.scales.shape[1]
        _check_inputs(group)
        middle = 1 << (code_bits - 1)
        shift = 0 if codebook is not None else middle - weight.scheme.midpoint
        codes = (weight.qweight + shift).contiguous()
        if sparse:
            check_kept(codes)
        self._words = _empty_words(self.out_features, self.in_features, bits)
        _functions().linear_pack(codes.data_ptr(), self.out_features, self.in_features, bits, self._words.data_ptr())
        zero = _tiled(weight.zero_points + shift) if codebook is None and not weight.scheme.symmetric else None
        self._describe(bits, group, _tiled(weight.scales), zero, codebook)

    def _take(self, weight: PreparedWeight, codebook: Tensor | None) -> None:
        check_prepared(weight)
        self._words = weight.tensors["words"]
        if weight.bits == NUMBER_BITS:
            self._weight.bits, self._weight.group = NUMBER_BITS, self.in_features
        else:
            tensors = weight.tensors
            self._describe(weight.bits, weight.group, tensors["scales"], tensors.get("zeros"), codebook)

    def _describe(self, bits: int, group: int, scale: Tensor, zero: Tensor | None, codebook: Tensor | None) -> None:
        self._scale, self._zero = scale, zero
        self._weight.bits, self._weight.group = bits, group
        self._weight.scales, self._weight.scale_type = scale.data_ptr(), TYPES[scale.dtype]
        self._weight.zeros = None if zero is None else zero.data_ptr()
        if bits <= 4:
            middle = 2 if bits == 2 else ZERO_CODE
            values = list(range(-middle, middle)) if codebook is None else codebook.tolist()
            self._weight.table[: len(values)] = values

    def _pack_numbers(self, weight: Tensor) -> None:
        _check_inputs(self.in_features)
        weight = weight.to(torch.bfloat16).contiguous()
        self._words = _empty_words(self.out_features, self.in_features, NUMBER_BITS)
        _functions().linear_pack_bfloat16(
            weight.data_ptr(), self.out_features, self.in_features, self._words.data_ptr()
        )
        self._weight.bits, self._weight.group = NUMBER_BITS, self.in_features


def check_prepared(weight: PreparedWeight) -> None:
    """Checks that the C kernels find memory wherever they read.

    Raises:
        CheckpointError: tensors that a weight of this shape, bits and groups does not have.
    """
    (rows, columns), bits, group = weight.shape, weight.bits, weight.group
    is_number = bits == NUMBER_BITS
    known = is_number or bits in (2, SPARSE_BITS, 4, 8)
    if not known or group < 1 or group % INPUT_MULTIPLE or columns % group or (is_number and group != columns):
        raise weight.refusal(f"{bits} bits in groups of {group}")
    weight.check("words", (padded_features(rows) * columns * bits // 32,), (torch.int32,))
    scales = padded_features(rows) // TILE, columns // group, TILE
    if not is_number:
        weight.check("scales", scales, tuple(TYPES))
    if "zeros" in weight.tensors:
        weight.check("zeros", scales, (torch.uint8,))


def form_of(bits: int, activations: Activations) -> str:
    """Name of a form of weights in tables of measured speeds."""
    return DENSE_FORM if bits == 16 else f"w{bits}a{16 if activations == Activations.FLOAT else 8}"


def stored_bits(bits: int) -> int:
    """Bits that a code takes in memory."""
    return next(width for width in (2, 4, 8) if bits <= width)


def padded_features(out_features: int) -> int:
    """Output features with those that fill the last tile."""
    return out_features + -out_features % TILE


def _check_inputs(group: int) -> None:
    if group % INPUT_MULTIPLE:
        raise SchemeError(
            f"groups of {group} inputs are no multiple of {INPUT_MULTIPLE}", "Use --linear-backend reference"
        )


def _empty_words(out_features: int, in_features: int, bits: int) -> Tensor:
    return empty_words(padded_features(out_features) * in_features * bits // 32)


def _tiled(values: Tensor) -> Tensor:
    """`[O, G]` as `[O / TILE, G, TILE]`, with zeros for the features that are not there."""
    padded = torch.cat((values, values.new_zeros(-len(values) % TILE, values.shape[1])))
    return padded.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous()


@cache
def _functions() -> ctypes.CDLL:
    native = library()
    if native is None:
        raise ToolkitError("there are no CPU kernels", absence())
    native.linear_pack.argtypes = (c_void_p, c_int64, c_int64, c_int, c_void_p)
    native.linear_pack_bfloat16.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
    native.linear_pack.restype = native.linear_pack_bfloat16.restype = None
    native.linear_multiply.argtypes = (
        *(c_void_p, c_int, c_int, c_int64),
        *(c_void_p, c_int64, c_void_p, c_int64, c_int),
    )
    return native


def with_codes(weight: Mxfp4Weight) -> IntegerWeight:
    """Codes of `VALUES` with powers of two as bfloat16 scales, which hold them all."""
    scales = torch.ones(weight.exponents.shape).ldexp(weight.exponents.int() - EXPONENT_BIAS).bfloat16()
    scheme = Int(weight.scheme.bits, GROUP_SIZE)
    zeros = torch.full_like(weight.exponents, scheme.midpoint)
    return IntegerWeight(weight.qweight, scales, zeros, scheme)


SCALE_BYTES, ZERO_BYTES = 2, 1


def _unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype not in (torch.bfloat16, torch.float32):
        return "computes in bfloat16 and float32"
    if (scheme.group_size or in_features) % INPUT_MULTIPLE:
        return f"takes groups that are a multiple of {INPUT_MULTIPLE}"
    return ""


def unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return (
        "keeps activations in 16 bits" if scheme.activation_bits else _unsupported_reason(scheme, in_features, target)
    )


def int8_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return _unsupported_reason(scheme, in_features, target) if scheme.activation_bits else "needs 8-bit activations"


def sparse_unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    return unsupported_reason(scheme, in_features, target) or kept_unsupported_reason(scheme)


def _detail(activations: Activations) -> Callable[[Scheme], str]:
    return lambda scheme: describe(form_of(stored_bits(scheme.bits), activations))


def _nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    groups = scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else ZERO_BYTES))
    return padded_features(rows) * (columns * stored_bits(scheme.bits) // 8 + groups)


def _sparse_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return padded_features(rows) * (columns * SPARSE_BITS // 8 + scheme.num_groups(columns) * SCALE_BYTES)


def _reads_rows(columns: int, target: Target) -> bool:
    return True


PACKED: LinearKernel[IntegerWeight] = LinearKernel(
    "cpu",
    "packed codes in C, float32 sums: exact weights",
    "int",
    unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias),
    _nbytes,
    _reads_rows,
    detail=_detail(Activations.FLOAT),
    layout=Layout("codes", CpuLinear),
)
SPARSE: LinearKernel[IntegerWeight] = LinearKernel(
    "cpu_sparse",
    "kept codes alone in C, float32 sums: exact weights",
    "int",
    sparse_unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias, sparse=True),
    _sparse_nbytes,
    _reads_rows,
    layout=Layout("kept codes", CpuLinear),
)
MXFP4: LinearKernel[Mxfp4Weight] = LinearKernel(
    "cpu_mxfp4",
    "4-bit floats in C as stored, float32 sums: exact weights",
    Mxfp4.numbers,
    unsupported_reason,
    lambda weight, bias, target: CpuLinear(with_codes(weight), bias, codebook=torch.tensor(VALUES)),
    lambda scheme, rows, columns, target: padded_features(rows) * scheme.num_groups(columns) * (16 + SCALE_BYTES),
    _reads_rows,
    detail=_detail(Activations.FLOAT),
    layout=Layout("4-bit floats", lambda weight, bias: CpuLinear(weight, bias, codebook=torch.tensor(VALUES))),
)
INT8: LinearKernel[IntegerWeight] = LinearKernel(
    "cpu_int8",
    "packed codes in C, 8-bit activations, exact int32 sums",
    "int",
    int8_unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias, activations=Activations.INT8_ROW),
    _nbytes,
    _reads_rows,
    detail=_detail(Activations.INT8_ROW),
    layout=Layout("codes", lambda weight, bias: CpuLinear(weight, bias, activations=Activations.INT8_ROW)),
)
W4A8: LinearKernel[IntegerWeight] = LinearKernel(
    "cpu_w4a8",
    "packed codes in C, activations rounded to 8 bits by groups",
    "int",
    unsupported_reason,
    lambda weight, bias, target: CpuLinear(weight, bias, activations=Activations.INT8_GROUP),
    _nbytes,
    _reads_rows,
    mode="w4a8",
    detail=_detail(Activations.INT8_GROUP),
    layout=Layout("codes", lambda weight, bias: CpuLinear(weight, bias, activations=Activations.INT8_GROUP)),
)


def dense_unsupported_reason(out_features: int, in_features: int, target: Target) -> str:
    """Why a dense weight cannot be multiplied in C on a target; "" when it can."""
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if target.dtype != torch.bfloat16:
        return "holds bfloat16 numbers"
    if in_features % INPUT_MULTIPLE:
        return f"takes inputs that are a multiple of {INPUT_MULTIPLE}"
    return dense_refusal() if has_vectors() else "has no vectors for this CPU"


def _dense_nbytes(out_features: int, in_features: int, target: Target) -> int:
    return padded_features(out_features) * in_features * target.dtype.itemsize


DENSE = DenseKernel(
    "cpu",
    "bfloat16 numbers in C, float32 sums",
    dense_unsupported_reason,
    CpuLinear,
    _dense_nbytes,
    True,
    layout=Layout("bfloat16 numbers", CpuLinear),
)


def is_fast(dtype: torch.dtype) -> bool:
    """Whether the compiled kernels have vectors for products in a dtype."""
    return dtype == torch.bfloat16 and has_vectors()


def has_vectors() -> bool:
    """Whether the compiled kernels have vectors for this CPU."""
    return best_instruction_set() > INSTRUCTION_SETS.index("scalar")
