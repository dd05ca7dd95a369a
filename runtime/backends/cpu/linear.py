"""Linears in plain C on CPUs (`compress.cpu`): exact codes, scales and zero points, float32 or int32 sums."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import SchemeError, ToolkitError
from compress.cpu.binding import BEST, absence, library
from runtime.backends.cpu.block_scales import BlockScaledCodes, of_groups
from runtime.backends.cpu.choice import DENSE_FORM, fewest_tile_rows
from runtime.backends.cpu.kept_codes import ZERO_CODE, check_kept, expand_words
from runtime.backends.cpu.weight_layout import (
    NUMBER_BITS,
    SCALE_TYPES,
    SMALL_GROUP,
    SPARSE_BITS,
    TILE,
    TYPES,
    check_inputs,
    check_prepared,
    packed_words,
    shared_by_tiles,
    stored_bits,
    tiled,
)
from runtime.backends.prepared_weight import PreparedWeight

ERRORS = {-1: "this machine lacks the instruction set", -2: "out of memory"}


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
        *((name, c_int32) for name in ("bits", "scale_type", "is_e4m3", "shares_scales", "fewest_tile_rows")),
        *((name, c_void_p) for name in ("words", "scales", "zeros", "minima", "steps", "minimum_steps")),
        ("block", c_int64),
        ("bias", c_void_p),
        ("table", c_float * 16),
    )


class CpuLinear:
    """A weight `[O, I]`, perhaps with a bias, in the layout of the C kernels.

    Codes of up to 2, 4 and 8 bits take 2, 4 and 8 bits, those of 2:4 sparsity 3 if asked for; O is padded to a
    multiple of 64.

    Args:
        weight: integers, codes with scales of blocks, bfloat16 numbers `[O, I]`, or what `prepared` returned, which is
            not copied. Blocks meet float activations alone.
        bias: `[O]`, any float dtype.
        codebook: what the codes stand for, before scales, instead of `code - 2^(bits - 1)`: as many float numbers as
            there are codes of 2 or 4 bits. The weight's zero points are then not looked at.
        is_e4m3: codes with scales of blocks are 8-bit floats (e4m3) instead, none of them NaN.
        sparse: keep two of every four codes; for symmetric weights of 2:4 sparsity and up to 4 bits that meet float
            activations.
        fewest_tile_rows: that matrix tiles multiply, where there are some, 0 for none; None chooses by measurements.

    Attributes:
        address: of the C structure, for compiled code that multiplies by itself.
        activations: a value of `Activations`.
        is_prepared: its memory is that of a `PreparedWeight`.

    Raises:
        ToolkitError: there is no library.
        SchemeError: inputs that are no multiple of 32, or groups, except of 16 where activations are floats.
        CheckpointError: a prepared weight whose tensors do not have the sizes of its shape.
    """

    reads_rows = True

    def __init__(
        self,
        weight: IntegerWeight | BlockScaledCodes | PreparedWeight | Tensor,
        bias: Tensor | None = None,
        *,
        activations: Activations = Activations.FLOAT,
        codebook: Tensor | None = None,
        is_e4m3: bool = False,
        sparse: bool = False,
        fewest_tile_rows: int | None = None,
        instruction_set: int = BEST,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.activations, self._instruction_set = int(activations), instruction_set
        self._bias = None if bias is None else bias.float().contiguous()
        self._weight = _Weight(out_features=self.out_features, in_features=self.in_features, is_e4m3=is_e4m3)
        self._tensors: dict[str, Tensor] = {}
        self.is_prepared = isinstance(weight, PreparedWeight)
        if isinstance(weight, PreparedWeight):
            self._take(weight, codebook)
        elif isinstance(weight, IntegerWeight):
            self._pack_integers(weight, codebook, sparse)
        elif isinstance(weight, BlockScaledCodes):
            self._pack_blocks(weight, codebook)
        else:
            self._pack_numbers(weight)
        rows = self._fewest_tile_rows() if fewest_tile_rows is None else fewest_tile_rows
        # Tiles take runs of 32 inputs.
        self._weight.fewest_tile_rows = rows if self._weight.group != SMALL_GROUP else 0
        for name, tensor in self._tensors.items():
            setattr(self._weight, name, tensor.data_ptr())
        self._weight.bias = None if self._bias is None else self._bias.data_ptr()
        self.address = ctypes.addressof(self._weight)
        self._multiply = _functions().linear_multiply

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

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
        shape = self.out_features, self.in_features
        return PreparedWeight(shape, dict(self._tensors), self._weight.bits, self._weight.group)

    def _fewest_tile_rows(self) -> int:
        return fewest_tile_rows(form_of(self._weight.bits, Activations(self.activations)))

    @property
    def num_words(self) -> int:
        return len(self._tensors["words"])

    def move_words(self, memory: Tensor) -> None:
        """Keeps its codes or numbers in `memory`, int32 `[num_words]`, from now on."""
        self._tensors["words"] = memory.copy_(self._tensors["words"])
        self._weight.words = memory.data_ptr()

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `[T, I]` of the weight, dequantized in `dtype`, for int64 `indices [T]`."""
        bits = self._weight.bits
        words = self._tensors["words"].view(-1, self.in_features * bits // 32, TILE)
        words = words[indices // TILE, :, indices % TILE]
        if bits == NUMBER_BITS:
            return words.view(torch.bfloat16).to(dtype)
        if bits == SPARSE_BITS:
            return self._dequantize(expand_words(words), indices, dtype)
        shifts = torch.tensor([k // 2 * bits + k % 2 * 16 for k in range(32 // bits)], dtype=torch.int32)
        codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return self._dequantize(codes.flatten(1), indices, dtype)

    def _dequantize(self, codes: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        bits, grouped = self._weight.bits, codes.unflatten(1, (-1, self._weight.group))
        table = torch.tensor(list(self._weight.table), dtype=exact)
        if self._weight.is_e4m3:
            values = grouped.to(torch.uint8).view(torch.float8_e4m3fn).to(exact)
        else:
            values = table[grouped] if bits <= 4 else (grouped - 128).to(exact)
        beside = {name: tensor for name, tensor in self._tensors.items() if name != "words"}
        own = {name: tensor[indices // TILE, :, indices % tensor.shape[2]] for name, tensor in beside.items()}
        if "zeros" in own:
            values = values - (own["zeros"].to(exact) - (1 << (bits - 1))).unsqueeze(-1)
        values = values * of_groups(own["scales"], own.get("steps"), exact, grouped.shape[1])
        if "minima" in own:
            values = values - of_groups(own["minima"], own.get("minimum_steps"), exact, grouped.shape[1])
        return values.flatten(1).to(dtype)

    def _pack_integers(self, weight: IntegerWeight, codebook: Tensor | None, sparse: bool) -> None:
        code_bits = 4 if sparse else stored_bits(weight.scheme.bits)
        bits = SPARSE_BITS if sparse else code_bits
        shift = 0 if codebook is not None else (1 << (code_bits - 1)) - weight.scheme.midpoint
        codes = weight.qweight + shift
        if sparse:
            check_kept(codes)
        self._pack_codes(codes, bits, self.in_features // weight.scales.shape[1])
        self._tensors["scales"] = tiled(weight.scales)
        if codebook is None and not weight.scheme.symmetric:
            self._tensors["zeros"] = tiled(weight.zero_points + shift)
        self._describe(codebook)

    def _pack_blocks(self, weight: BlockScaledCodes, codebook: Tensor | None) -> None:
        if self.activations != Activations.FLOAT:
            raise SchemeError("scales of blocks meet 16-bit activations alone", "Use --linear-backend reference")
        bits = stored_bits(weight.bits)
        # Bytes stand for code - 128, if not for floats; narrower codes of numbers have a table of their own.
        has_values = codebook is not None or self._weight.is_e4m3 or (bits < 8 and weight.minima is not None)
        shift = 0 if has_values else (1 << (bits - 1)) - weight.offset
        self._pack_codes(weight.codes + shift, bits, weight.group)
        for name in ("scales", "minima", "steps", "minimum_steps"):
            if (tensor := getattr(weight, name)) is not None:
                self._tensors[name] = tiled(tensor)
        if self._weight.is_e4m3 and weight.scales.is_floating_point():
            shared = shared_by_tiles(weight.scales)
            self._tensors["scales"] = self._tensors["scales"] if shared is None else shared
        self._describe(codebook)

    def _pack_codes(self, codes: Tensor, bits: int, group: int) -> None:
        check_inputs(self.in_features, group, self._takes_small(bits))
        codes = codes.contiguous()
        self._weight.bits, self._weight.group = bits, group
        self._tensors["words"] = words = packed_words(self.out_features, self.in_features, bits)
        _functions().linear_pack(codes.data_ptr(), self.out_features, self.in_features, bits, words.data_ptr())

    def _takes_small(self, bits: int) -> bool:
        return self.activations == Activations.FLOAT and bits != SPARSE_BITS

    def _take(self, weight: PreparedWeight, codebook: Tensor | None) -> None:
        check_prepared(weight, self.activations == Activations.FLOAT)
        if self._weight.is_e4m3 and weight.bits != 8:
            raise weight.refusal(f"floats of {weight.bits} bits")
        self._tensors = dict(weight.tensors)
        self._weight.bits, self._weight.group = weight.bits, weight.group
        if weight.bits != NUMBER_BITS:
            self._describe(codebook)

    def _describe(self, codebook: Tensor | None) -> None:
        scales, bits = self._tensors["scales"], self._weight.bits
        self._weight.scale_type, self._weight.shares_scales = SCALE_TYPES[scales.dtype], scales.shape[2] == 1
        self._weight.block = self.in_features // scales.shape[1]
        if bits <= 4:
            middle = 2 if bits == 2 else ZERO_CODE
            first = 0 if "minima" in self._tensors else -middle
            values = list(range(first, first + 2 * middle)) if codebook is None else codebook.tolist()
            self._weight.table[: len(values)] = values

    def _pack_numbers(self, weight: Tensor) -> None:
        check_inputs(self.in_features, self.in_features)
        weight = weight.to(torch.bfloat16).contiguous()
        self._tensors["words"] = words = packed_words(self.out_features, self.in_features, NUMBER_BITS)
        _functions().linear_pack_bfloat16(weight.data_ptr(), self.out_features, self.in_features, words.data_ptr())
        self._weight.bits, self._weight.group = NUMBER_BITS, self.in_features


def form_of(bits: int, activations: Activations) -> str:
    """Name of a form of weights in tables of measured speeds."""
    return DENSE_FORM if bits == 16 else f"w{bits}a{16 if activations == Activations.FLOAT else 8}"


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
