"""Memory that a weight will take, known from its shape and scheme before it is read."""

from __future__ import annotations

from compress.checkpoint.packing import num_words
from compress.checkpoint.scheme import MAX_BITS, Scheme
from compress.cpu.linear import SPARSE_BITS, padded_features, stored_bits
from runtime.backends.base import Target
from runtime.backends.torch.int4pack import ROW_MULTIPLE, kernel_group_size, tile_columns
from runtime.backends.torch.linear import choose_dense
from runtime.backends.triton.kernels.weight_layout import planes_bytes

SCALE_BYTES = 2
ZERO_BYTES = 1


def dense_bytes(rows: int, columns: int, target: Target, *, reference: bool = False) -> int:
    """`nbytes` of the linear that `dense_linear` makes of a weight `[rows, columns]` that is not quantized."""
    padded = choose_dense(columns, target, reference=reference).kernel.padded
    return padded(rows) * columns * target.dtype.itemsize


def prepared_bytes(kernel: str, scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    """`nbytes` of the linear that a kernel, by name, makes of a quantized weight `[rows, columns]` with 16-bit scales.

    Raises:
        KeyError: no such kernel.
    """
    return _SIZES[kernel](scheme, rows, columns, target)


def embedding_bytes(scheme: Scheme | None, rows: int, columns: int, target: Target) -> int:
    """Of an embedding `[rows, columns]` that is looked up and nothing else; dense without a scheme."""
    if scheme is None:
        return rows * columns * target.dtype.itemsize
    words = columns if scheme.bits == MAX_BITS else 4 * num_words(columns, scheme.bits)
    return rows * (words + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else ZERO_BYTES)))


def reads_rows(kernel: str, columns: int, target: Target) -> bool:
    """Whether the linear that a kernel, by name, makes of so many columns can be looked up too (`RowSource`)."""
    if kernel == "int4pack":
        return tile_columns() > 0
    if kernel == "dequantized":
        return choose_dense(columns, target).kernel.reads_rows
    return kernel == "reference" or kernel.startswith("native")


def _native(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    groups = scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else ZERO_BYTES))
    return padded_features(rows) * (columns * stored_bits(scheme.bits) // 8 + groups)


def _native_sparse(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return padded_features(rows) * (columns * SPARSE_BITS // 8 + scheme.num_groups(columns) * SCALE_BYTES)


def _int4pack(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    padded = rows + -rows % ROW_MULTIPLE
    groups = columns // kernel_group_size(scheme, columns)
    return padded * columns // 2 + padded * groups * 2 * SCALE_BYTES  # scales and offsets


def _int8_dynamic(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * (columns + SCALE_BYTES)


def _dequantized(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return dense_bytes(rows, columns, target)


def _reference(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * (columns + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.fp8 else ZERO_BYTES)))


def _planes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return planes_bytes(scheme, rows, columns, SCALE_BYTES)


def _bytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return rows * (columns + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else 1)))


_SIZES = {
    "triton_planes": _planes,
    "triton_bytes": _bytes,
    "triton_levels": _bytes,
    "triton_fp8": _bytes,
    "triton_fp8_16bit": _bytes,
    "native": _native,
    "native_sparse": _native_sparse,
    "native_int8": _native,
    "native_w4a8": _native,
    "int4pack": _int4pack,
    "int8_dynamic": _int8_dynamic,
    "dequantized": _dequantized,
    "reference": _reference,
}
