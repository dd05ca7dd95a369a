"""Linears in plain C on CPUs (`compress.cpu`): exact codes, scales and zero points, float32 or int32 sums."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from typing import cast

import torch
from torch import Tensor

from compress.checkpoint.weights.coded import FLOAT8, INT, INTEGERS, TABLE, CodedWeight, powers_of_two
from compress.common.errors import SchemeError, ToolkitError
from compress.cpu.binding import BEST, absence, library, struct_fields
from runtime.backends.cpu.choice import DENSE_FORM, fewest_tile_rows
from runtime.backends.cpu.kept_codes import ZERO_CODE, check_kept, expand_words
from runtime.backends.cpu.weight_layout import (
    NUMBER_BITS,
    SCALE_TYPES,
    SMALL_GROUP,
    SPARSE_BITS,
    TILE,
    TYPES,
    VALUES,
    check_inputs,
    check_prepared,
    compiled_group,
    packed_words,
    shared_by_tiles,
    stored_bits,
    tiled,
)
from runtime.backends.prepared_weight import PreparedWeight

SCALES = "scales", "minima", "steps", "minimum_steps"
"""Parts of a weight that scale its codes."""
ERRORS = {-1: "this machine lacks the instruction set", -2: "out of memory"}


class Activations(IntEnum):
    """Form in which activations enter a product."""

    FLOAT = 0
    """As they come."""
    INT8_GROUP = 1
    """Rounded to 8 bits, with a scale per row and run of at most 128 inputs."""
    INT8_ROW = 2
    """Rounded to 8 bits, with a scale per row."""
    INT4_ROW = 3
    """Rounded to 4 bits, with a scale per row."""


class _Weight(ctypes.Structure):
    """`LinearWeight` of c/linear/linear.h."""

    _fields_ = struct_fields(
        "int64 out_features in_features group",
        "int32 bits scale_type is_e4m3 shares_scales fewest_tile_rows",
        "pointer words scales zeros minima steps minimum_steps",
        "int64 block",
        "pointer bias",
        ("table", c_float * 16),
        "pointer values",
        "int64 hadamard",
    )


class CpuLinear:
    """A weight `[O, I]`, perhaps with a bias, in the layout of the C kernels.

    Codes of up to 2, 4 and 8 bits take 2, 4 and 8 bits, those of 2:4 sparsity 3 if asked for; O is padded to a
    multiple of 64.

    Args:
        weight: integers, codes under scales, bfloat16 numbers `[O, I]`, or what `prepared` returned, which is not
            copied. Activations of codes under scales are floats.
        bias: `[O]`, any float dtype.
        is_e4m3: codes of a prepared weight are 8-bit floats (e4m3).
        sparse: keep two of every four codes; for symmetric weights of 2:4 sparsity and up to 4 bits with float
            activations.
        fewest_tile_rows: that matrix tiles multiply, where there are some, 0 for none; None chooses by measurements.

    Attributes:
        address: of the C structure, for compiled code that multiplies by itself.
        activations: a value of `Activations`.
        is_prepared: its memory is that of a `PreparedWeight`.

    Raises:
        ToolkitError: the library is not built.
        SchemeError: inputs that are not a multiple of 32, or groups, except of 16 where activations are floats.
        CheckpointError: a prepared weight whose tensors do not have the sizes of its shape.
    """

    reads_rows = True

    def __init__(
        self,
        weight: CodedWeight | PreparedWeight | Tensor,
        bias: Tensor | None = None,
        *,
        activations: Activations = Activations.FLOAT,
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
            self._take(weight)
        elif isinstance(weight, CodedWeight):
            self._pack_coded(weight, sparse)
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
        return sum(tensor.nbytes for name, tensor in self._tensors.items() if name != VALUES)

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, I] -> [M, O]` in bfloat16 or float32, whichever `x` is. A row of the result depends only on its row
        of `x`, whatever the other rows and the number of threads are."""
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

    def turning(self, order: int) -> CpuLinear:
        """Multiplies every `order` inputs by a Hadamard matrix from now on (`Backend.turned`); returns itself."""
        self._weight.hadamard = order
        return self

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
        bits, grouped = self._weight.bits, torch.unflatten(codes, 1, (-1, self._weight.group))
        if self._weight.is_e4m3:
            values = grouped.to(torch.uint8).view(torch.float8_e4m3fn).to(exact)
        elif VALUES in self._tensors or bits <= 4:
            table = self._tensors.get(VALUES, torch.tensor(list(self._weight.table)))
            values = table.to(exact)[grouped]
        else:
            values = (grouped - 128).to(exact)
        beside = {name: tensor for name, tensor in self._tensors.items() if name not in ("words", VALUES)}
        own = {name: tensor[indices // TILE, :, indices % tensor.shape[2]] for name, tensor in beside.items()}
        if "zeros" in own:
            values = values - (own["zeros"].to(exact) - (1 << (bits - 1))).unsqueeze(-1)
        values = values * _of_groups(own["scales"], own.get("steps"), exact, grouped.shape[1])
        if "minima" in own:
            values = values - _of_groups(own["minima"], own.get("minimum_steps"), exact, grouped.shape[1])
        return values.flatten(1).to(dtype)

    def _pack_coded(self, weight: CodedWeight, sparse: bool) -> None:
        form, bits = weight.scheme, 4 if sparse else stored_bits(weight.scheme.bits)
        if self.activations != Activations.FLOAT and form.numbers != INT:
            raise SchemeError("scales of blocks need activations in 16 bits", "Use --linear-backend reference")
        self._weight.is_e4m3 = form.numbers == FLOAT8
        # Bytes stand for code - 128, if not for floats; narrower codes above minima have a table of their own.
        is_centred = form.numbers in (INT, INTEGERS) and (bits == 8 or weight.minima is None)
        shift = (1 << (bits - 1)) - form.zero if is_centred else 0
        codes = weight.qweight.view(torch.uint8) + shift
        if sparse:
            check_kept(codes)
        self._pack_codes(codes, SPARSE_BITS if sparse else bits, compiled_group(form, self.in_features))
        if form.numbers == TABLE:
            values = torch.zeros(1 << bits)
            values[: len(form.code_values)] = torch.tensor(form.code_values)
            self._tensors[VALUES] = values
        self._scale(weight)
        if weight.zeros is not None:
            self._tensors["zeros"] = tiled(weight.zeros + shift)
        self._describe()

    def _scale(self, weight: CodedWeight) -> None:
        """Scales of all groups that C knows, of which several may make one of the form."""
        parts = {name: cast(Tensor, part) for name, part in weight.named_parts().items() if name in SCALES}
        if weight.scheme.numbers == TABLE and weight.scales.dtype not in (torch.float16, torch.bfloat16):
            scales = weight.group_scales()
            short = scales.bfloat16()
            parts["scales"] = short if torch.equal(short.float(), scales) else scales
        group, columns = self._weight.group, weight.scheme.columns(self.in_features)
        for name in ("steps", "minimum_steps") if "steps" in parts else ("scales", "minima"):
            if name in parts and columns != group:
                parts[name] = parts[name].repeat_interleave(columns // group, 1)[:, : self.in_features // group]
        self._tensors |= {name: tiled(part) for name, part in parts.items()}
        if self._weight.is_e4m3 and parts["scales"].is_floating_point():
            shared = shared_by_tiles(parts["scales"])
            self._tensors["scales"] = self._tensors["scales"] if shared is None else shared

    def _pack_codes(self, codes: Tensor, bits: int, group: int) -> None:
        check_inputs(self.in_features, group, self._takes_small(bits))
        codes = codes.contiguous()
        self._weight.bits, self._weight.group = bits, group
        self._tensors["words"] = words = packed_words(self.out_features, self.in_features, bits)
        _functions().linear_pack(codes.data_ptr(), self.out_features, self.in_features, bits, words.data_ptr())

    def _takes_small(self, bits: int) -> bool:
        return self.activations == Activations.FLOAT and bits != SPARSE_BITS

    def _take(self, weight: PreparedWeight) -> None:
        check_prepared(weight, self.activations == Activations.FLOAT)
        if self._weight.is_e4m3 and weight.bits != 8:
            raise weight.refusal(f"floats of {weight.bits} bits")
        self._tensors = dict(weight.tensors)
        self._weight.bits, self._weight.group = weight.bits, weight.group
        if weight.bits != NUMBER_BITS:
            self._describe()

    def _describe(self) -> None:
        scales, bits = self._tensors["scales"], self._weight.bits
        self._weight.scale_type, self._weight.shares_scales = SCALE_TYPES[scales.dtype], scales.shape[2] == 1
        self._weight.block = self.in_features // scales.shape[1]
        if bits <= 4:
            middle = 2 if bits == 2 else ZERO_CODE
            first = 0 if "minima" in self._tensors else -middle
            known = self._tensors.get(VALUES)
            values = list(range(first, first + 2 * middle)) if known is None else known.tolist()
            self._weight.table[: len(values)] = values

    def _pack_numbers(self, weight: Tensor) -> None:
        check_inputs(self.in_features, self.in_features)
        weight = weight.to(torch.bfloat16).contiguous()
        self._tensors["words"] = words = packed_words(self.out_features, self.in_features, NUMBER_BITS)
        _functions().linear_pack_bfloat16(weight.data_ptr(), self.out_features, self.in_features, words.data_ptr())
        self._weight.bits, self._weight.group = NUMBER_BITS, self.in_features


def _of_groups(scales: Tensor, steps: Tensor | None, dtype: torch.dtype, groups: int) -> Tensor:
    """Returns scales or minima `[O, groups, 1]` of groups from those of blocks `[O, B]`."""
    numbers = powers_of_two(scales) if scales.dtype == torch.uint8 else scales
    repeated = numbers.to(dtype).repeat_interleave(groups // scales.shape[1], 1)
    return (repeated if steps is None else repeated * steps.to(dtype)).unsqueeze(-1)


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
