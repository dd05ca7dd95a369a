"""Causal convolutions over few tokens of each sequence, and the inputs that they still see after a segment."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.kernels.common import rounded
from runtime.backends.triton.launcher import Launcher
from runtime.backends.triton.sizes import cdiv, next_power_of_2
from runtime.core.state_rows import StateRows

PLACES = (
    "read_slots_ptr",
    "write_slots_ptr",
    "chunks_ptr",
    "row_starts_ptr",
    "segment_starts_ptr",
    "first_segments_ptr",
)
"""Arguments that are parts of one upload: how they are aligned depends on the number of rows, and a number is read at
a time."""
CHUNK = 64
"""Rows of a program in spans."""


@dataclass(frozen=True, slots=True)
class ConvColumns:
    """Where a projection holds what is convolved.

    Attributes:
        first: column of the first channel.
        shares: columns of each key head, where queries, keys and values of a key head stand side by side; 0 where all
            channels do.
        key_dim, keys: channels of a key head and of all of them.
        values: channels of the values of a key head.
    """

    first: int = 0
    shares: int = 0
    key_dim: int = 1
    keys: int = 1
    values: int = 1


@triton.jit
def source_columns(channel, SHARES: tl.constexpr, KEY_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Columns of channels in a projection that is described by `ConvColumns`, counted from its first one."""
    if SHARES == 0:
        return channel
    else:
        part, value = tl.minimum(channel // KEYS, 2), tl.maximum(channel - 2 * KEYS, 0)
        of_key = channel % KEYS // KEY_DIM * SHARES + part * KEY_DIM + channel % KEY_DIM
        of_value = value // VALUES * SHARES + 2 * KEY_DIM + value % VALUES
        return tl.where(part < 2, of_key, of_value)


@Launcher
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=PLACES)
def causal_conv(
    x_ptr, weight_ptr, bias_ptr, before_ptr, windows_ptr, read_slots_ptr, write_slots_ptr, chunks_ptr, row_starts_ptr,
    out_ptr, rows, x_stride, first, CHANNELS: tl.constexpr, SHARES: tl.constexpr, KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TAPS: tl.constexpr, SINGLE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Convolves rows with `weight [TAPS, CHANNELS]` and applies silu; writes `out [rows, CHANNELS]`, and the last
    inputs of each segment to `windows [slots, TAPS - 1, CHANNELS]`.

    Program (rows, channels). SINGLE: every row is a sequence, whose window in `windows` is read before it is written.
    Otherwise a program has the rows of one entry of `chunks` (`StateRows.chunks`), and `before` are the windows of the
    sequences.
    """
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_channel = (channel < CHANNELS)[None, :]
    if SINGLE:
        row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = row < rows
        begin, ends = row, inside
        read = tl.load(read_slots_ptr + row, mask=inside, other=0)
        written = tl.load(write_slots_ptr + row, mask=inside, other=0)
    else:
        entry_ptr = chunks_ptr + tl.program_id(0) * 4
        sequence, stop, segment = tl.load(entry_ptr), tl.load(entry_ptr + 2), tl.load(entry_ptr + 3)
        row = tl.load(entry_ptr + 1) + tl.arange(0, BLOCK_R)
        inside = row < stop
        begin, ends = tl.load(row_starts_ptr + sequence), row == tl.where(segment >= 0, stop - 1, -1)
        read = row.to(tl.int64) * 0 + sequence
        written = row.to(tl.int64) * 0 + tl.load(write_slots_ptr + tl.maximum(segment, 0))
    column = first + source_columns(channel, SHARES, KEY_DIM, KEYS, VALUES)
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        at = row - (TAPS - 1 - tap)
        is_own = (inside & (at >= begin))[:, None]
        place = read * (TAPS - 1) + (at - begin + TAPS - 1)
        own = tl.load(
            x_ptr + at.to(tl.int64)[:, None] * x_stride + column[None, :], mask=is_own & has_channel, other=0.0
        )
        kept_ptrs = before_ptr + place[:, None] * CHANNELS + channel[None, :]
        kept = tl.load(kept_ptrs, mask=(inside & (at < begin))[:, None] & has_channel, other=0.0)
        number = tl.where(is_own, own, kept)
        if tap > 0:
            place = written * (TAPS - 1) + (tap - 1)
            kept_ptrs = windows_ptr + place[:, None] * CHANNELS + channel[None, :]
            tl.store(kept_ptrs, number, mask=ends[:, None] & has_channel)
        weight = tl.load(weight_ptr + tap * CHANNELS + channel[None, :], mask=has_channel, other=0.0)
        sums += number.to(tl.float32) * weight
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + channel[None, :], mask=has_channel, other=0.0)
    sums = rounded(sums, out_ptr.dtype.element_ty, INTERPRETED)
    found = rounded(sums / (1.0 + tl.exp(-sums)), out_ptr.dtype.element_ty, INTERPRETED)
    place = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out_ptr + place, found.to(out_ptr.dtype.element_ty), mask=inside[:, None] & has_channel)


def convolve_rows(
    projected: Tensor, columns: ConvColumns, weight: Tensor, bias: Tensor | None, windows: Tensor, rows: StateRows
) -> Tensor:
    """Silu of the convolution of a projection `[T, O]`, `[T, channels]` in its dtype.

    Args:
        weight: float32 `[kernel, channels]`.
        bias: float32 `[channels]`.
        windows: `[slots, kernel - 1, channels]`; read and written as `rows` says.
    """
    taps, channels = weight.shape
    out = projected.new_empty(len(projected), channels)
    single = rows.is_single
    chunks = rows.read_slots if single else rows.chunks(CHUNK)
    # Programs of a sequence run at once, and one of them may write the slot that others still read.
    before = windows if single else windows.index_select(0, rows.read_slots)
    block_r, block_c = (4, 128) if single else (CHUNK, 64)
    grid = (cdiv(len(projected), block_r) if single else len(chunks), cdiv(channels, block_c))
    causal_conv[grid](
        projected, weight, bias, before, windows, rows.read_slots, rows.write_slots, chunks, rows.row_starts, out,
        len(projected), projected.stride(0), columns.first, CHANNELS=channels, SHARES=columns.shares,
        KEY_DIM=columns.key_dim, KEYS=columns.keys, VALUES=columns.values, TAPS=taps, SINGLE=single, BLOCK_R=block_r,
        BLOCK_C=block_c, INTERPRETED=triton.knobs.runtime.interpret, num_warps=4,
    )  # fmt: skip
    return out


@Launcher
@triton.jit
def gated_norm(
    heads_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, first, jump, eps, weight_stride, GROUPS: tl.constexpr,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, NORMS: tl.constexpr, GATES_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Root mean square norm and silu gate of `heads [rows, GROUPS, WIDTH]`, GATES_FIRST or last; what is normalized has
    the dtype of heads. Program (row, group). A row's gates are `gate_stride` apart; SHARED groups stand side by side,
    and the next ones `jump` columns after them."""
    row, group, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = channel < WIDTH
    place = (row * GROUPS + group) * WIDTH + channel
    heads = tl.load(heads_ptr + place, mask=inside, other=0.0).to(tl.float32)
    column = first + group // SHARED * jump + group % SHARED * WIDTH + channel
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if GATES_FIRST:
        heads *= gate
    if NORMS:
        weight = tl.load(weight_ptr + group * weight_stride + channel, mask=inside, other=0.0).to(tl.float32)
        heads *= tl.rsqrt(tl.sum(heads * heads, 0) / WIDTH + eps) * weight
        heads = rounded(heads, heads_ptr.dtype.element_ty, INTERPRETED)
    if not GATES_FIRST:
        heads *= gate
    found = rounded(heads, out_ptr.dtype.element_ty, INTERPRETED).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, found, mask=inside)


@dataclass(frozen=True, slots=True)
class GateColumns:
    """Where a projection holds the gates: from `first` on, those of `shared` groups side by side, `jump` columns
    after those before."""

    first: int
    shared: int
    jump: int


def gate_heads(
    heads: Tensor, projected: Tensor, columns: GateColumns, weight: Tensor | None, eps: float, gates_first: bool
) -> Tensor:
    """Norm and gate of `heads [T, groups, width]`: `[T, groups * width]` in the dtype of the projection.

    Args:
        weight: of the norm, `[width]` or `[groups * width]`; None for no norm.
    """
    tokens, groups, width = heads.shape
    out = projected.new_empty(tokens, groups * width)
    stride = 0 if weight is None or len(weight) == width else width
    block = next_power_of_2(width)
    gated_norm[(tokens, groups)](
        heads, projected, weight, out, projected.stride(0), columns.first, columns.jump, eps, stride, GROUPS=groups,
        SHARED=columns.shared, WIDTH=width, NORMS=weight is not None, GATES_FIRST=gates_first, BLOCK=block,
        INTERPRETED=triton.knobs.runtime.interpret, num_warps=1 if block <= 256 else 8,
    )  # fmt: skip
    return out
