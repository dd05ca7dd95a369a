"""Mixers with a matrix for each head: the gated delta rule (arXiv:2412.06464) and Mamba-2 (arXiv:2405.21060).

A token lets the matrix decay, adds the product of its key with an update, and reads it with its query. The update is
the value times a step, or, by the delta rule, what the matrix says of the key in another way than the value. Short
sequences are computed token after token in one pass over the state, long ones in chunks of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.backends.triton.kernels.causal_conv import CHUNK, PLACES
from runtime.backends.triton.kernels.common import multiply, rounded
from runtime.backends.triton.launcher import Launcher
from runtime.core.state_rows import StateRows

SHORT = 16
"""Rows of a sequence up to which it is computed token after token."""
NORM_EPS = tl.constexpr(1e-6)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a mixer, and the columns of what it reads.

    Attributes:
        shared: heads that have the same key.
        query, key, value: first columns of what is convolved.
        gate: first column of strengths and steps of the heads, or of steps alone.
        gates_shared: heads whose strengths stand side by side, followed by their steps; 0 without strengths.
        scale: factor on queries.
        limits: least and largest step.
    """

    num_heads: int
    shared: int
    key_dim: int
    value_dim: int
    query: int
    key: int
    value: int
    gate: int = 0
    gates_shared: int = 0
    scale: float = 1.0
    limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def is_delta(self) -> bool:
        """Whether the delta rule makes the updates."""
        return self.gates_shared > 0


@triton.jit
def load_heads(pointer, row, inside, column, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, NORMED: tl.constexpr):
    """Channels `[R, WIDTH]` of rows `[R]` of what is convolved, and a factor `[R]` on them that makes them NORMED: so
    their products are exact on tensor cores."""
    place = row.to(tl.int64)[:, None] * CHANNELS + column + tl.arange(0, WIDTH)[None, :]
    found = tl.load(pointer + place, mask=inside[:, None], other=0.0)
    factor = inside.to(tl.float32)
    if NORMED:
        wide = found.to(tl.float32)
        factor *= tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)
    return found, factor


@triton.jit
def load_steps(
    gates_ptr, decay_ptr, bias_ptr, row, inside, head, stride, gate, lower, upper, SHARED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Strengths (of the delta rule, or the steps), and logarithms of decays, float32 `[R]`: zeros outside."""
    place = row.to(tl.int64) * stride + gate
    if SHARED > 0:
        place += head // SHARED * (2 * SHARED) + head % SHARED
        given = tl.load(gates_ptr + place, mask=inside, other=0.0).to(tl.float32)
        step = tl.load(gates_ptr + place + SHARED, mask=inside, other=0.0).to(tl.float32)
    else:
        step = tl.load(gates_ptr + place + head, mask=inside, other=0.0).to(tl.float32)
        given = step
    step += tl.load(bias_ptr + head)
    grown = tl.exp(tl.minimum(step, 20.0))
    above = 1.0 + grown  # the quotient takes back what the sum has rounded
    soft = tl.where(above == 1.0, grown, tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0)))
    step = tl.minimum(tl.maximum(tl.where(step > 20.0, step, soft), lower), upper)
    strength = step
    if SHARED > 0:
        strength = rounded(1.0 / (1.0 + tl.exp(-given)), gates_ptr.dtype.element_ty, INTERPRETED)
    decay = step * tl.load(decay_ptr + head)
    return tl.where(inside, strength, 0.0), tl.where(inside, decay, 0.0)


@triton.jit
def product(a, b, total, INTERPRETED: tl.constexpr):
    """`total + a b` of activations and float32 numbers, cut in two halves of 16 bits for tensor cores: the low ones
    have what the high ones leave out. float16 saturates."""
    if INTERPRETED or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b, total)
    else:
        if a.dtype == tl.float16:
            b = tl.minimum(tl.maximum(b, -65504.0), 65504.0)
        high = b.to(a.dtype)
        return tl.dot(a, (b - high.to(tl.float32)).to(a.dtype), tl.dot(a, high, total))


@Launcher
@triton.jit(do_not_specialize_on_alignment=PLACES)
def state_step(
    x_ptr, gates_ptr, decay_ptr, bias_ptr, skip_ptr, states_ptr, out_ptr, read_slots_ptr, write_slots_ptr,
    row_starts_ptr, segment_starts_ptr, first_segments_ptr, stride, gate, scale, lower, upper,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, QUERY: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, CHANNELS: tl.constexpr, GATES: tl.constexpr, MOST: tl.constexpr,
    BLOCK_V: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Outputs `[rows, HEADS, VALUE_DIM]` of sequences of up to MOST rows, token after token, and their states
    `[slots, HEADS, KEY_DIM, VALUE_DIM]`, which are read and written once. Program (sequence, head, channels of
    values)."""
    DELTA: tl.constexpr = GATES > 0
    sequence, head = tl.program_id(0), tl.program_id(1)
    channel, k = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, KEY_DIM)
    first, stop = tl.load(row_starts_ptr + sequence), tl.load(row_starts_ptr + sequence + 1)
    if stop - first <= MOST:
        place = (head * KEY_DIM + k)[:, None] * VALUE_DIM + channel[None, :]
        size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
        state = tl.load(states_ptr + tl.load(read_slots_ptr + sequence) * size + place)
        one = tl.arange(0, 1)
        for segment in range(tl.load(first_segments_ptr + sequence), tl.load(first_segments_ptr + sequence + 1)):
            for row in range(tl.load(segment_starts_ptr + segment), tl.load(segment_starts_ptr + segment + 1)):
                rows, inside = row + one, one == 0
                strength, decay = load_steps(
                    gates_ptr, decay_ptr, bias_ptr, rows, inside, head, stride, gate, lower, upper, GATES, INTERPRETED
                )
                key_column = head // SHARED * KEY_DIM
                key, key_factor = load_heads(x_ptr, rows, inside, KEY + key_column, KEY_DIM, CHANNELS, DELTA)
                query, factor = load_heads(x_ptr, rows, inside, QUERY + key_column, KEY_DIM, CHANNELS, DELTA)
                key = tl.reshape(key.to(tl.float32) * key_factor[:, None], (KEY_DIM, 1))
                query = tl.reshape(query.to(tl.float32) * (factor * scale)[:, None], (KEY_DIM, 1))
                x_place = rows.to(tl.int64)[:, None] * CHANNELS + VALUE + head * VALUE_DIM + channel[None, :]
                value = tl.load(x_ptr + x_place).to(tl.float32)
                state *= tl.exp(decay)[:, None]
                update = value
                if DELTA:
                    update -= tl.sum(key * state, 0)[None, :]
                state += key * (strength[:, None] * update)
                found = tl.sum(query * state, 0)[None, :]
                if skip_ptr is not None:
                    found += tl.load(skip_ptr + head) * value
                found = rounded(found, out_ptr.dtype.element_ty, INTERPRETED).to(out_ptr.dtype.element_ty)
                out_place = (rows.to(tl.int64)[:, None] * HEADS + head) * VALUE_DIM + channel[None, :]
                tl.store(out_ptr + out_place, found)
            tl.store(states_ptr + tl.load(write_slots_ptr + segment) * size + place, state)


@Launcher
@triton.jit(do_not_specialize_on_alignment=PLACES)
def chunk_products(
    x_ptr, gates_ptr, decay_ptr, bias_ptr, solved_ptr, shared_ptr, chunks_ptr, row_starts_ptr, stride, gate, scale,
    lower, upper, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, QUERY: tl.constexpr,
    KEY: tl.constexpr, CHANNELS: tl.constexpr, GATES: tl.constexpr, MOST: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Matrices of chunks that depend on no state: products of queries with keys up to their own, faded, rows of
    `shared [rows, HEADS, BLOCK_R]`; and by the delta rule inverses of the triangular systems that updates solve
    (arXiv:2412.06464, section 3.3), rows of `solved` likewise. Program (chunk, head); sequences of up to MOST rows are
    left out."""
    DELTA: tl.constexpr = GATES > 0
    entry_ptr, head = chunks_ptr + tl.program_id(0) * 4, tl.program_id(1)
    sequence, first, stop = tl.load(entry_ptr), tl.load(entry_ptr + 1), tl.load(entry_ptr + 2)
    if tl.load(row_starts_ptr + sequence + 1) - tl.load(row_starts_ptr + sequence) > MOST:
        i = tl.arange(0, BLOCK_R)
        row, inside = first + i, first + i < stop
        place = (row.to(tl.int64)[:, None] * HEADS + head) * BLOCK_R + i[None, :]
        strength, decay = load_steps(
            gates_ptr, decay_ptr, bias_ptr, row, inside, head, stride, gate, lower, upper, GATES, INTERPRETED
        )
        total, column = tl.cumsum(decay, 0), head // SHARED * KEY_DIM
        since = tl.exp(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))
        key, key_factor = load_heads(x_ptr, row, inside, KEY + column, KEY_DIM, CHANNELS, DELTA)
        query, factor = load_heads(x_ptr, row, inside, QUERY + column, KEY_DIM, CHANNELS, DELTA)
        nothing = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
        shared = multiply(query, tl.trans(key), nothing, INTERPRETED) * since * key_factor[None, :]
        tl.store(shared_ptr + place, shared * (factor * scale)[:, None], mask=inside[:, None])
        if DELTA:
            below = tl.where(i[:, None] > i[None, :], since, 0.0) * (strength * key_factor)[:, None]
            system = multiply(key, tl.trans(key), nothing, INTERPRETED) * below * key_factor[None, :]
            solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
            for number in range(1, tl.minimum(stop - first, BLOCK_R)):
                is_row = (i == number)[:, None]
                factors = tl.sum(tl.where(is_row, system, 0.0), 0)
                solved -= tl.where(is_row, tl.sum(factors[:, None] * solved, 0)[None, :], 0.0)
            tl.store(solved_ptr + place, solved, mask=inside[:, None])


@Launcher
@triton.jit(do_not_specialize_on_alignment=PLACES)
def state_scan(
    x_ptr, gates_ptr, decay_ptr, bias_ptr, skip_ptr, solved_ptr, shared_ptr, states_ptr, out_ptr, read_slots_ptr,
    write_slots_ptr, row_starts_ptr, segment_starts_ptr, first_segments_ptr, stride, gate, scale, lower, upper,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, QUERY: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, CHANNELS: tl.constexpr, GATES: tl.constexpr, MOST: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """As `state_step`, for sequences of more than MOST rows, BLOCK_R rows at once; `solved` and `shared` are as of
    `chunk_products`."""
    DELTA: tl.constexpr = GATES > 0
    sequence, head = tl.program_id(0), tl.program_id(1)
    channel, k = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, KEY_DIM)
    i = tl.arange(0, BLOCK_R)
    if tl.load(row_starts_ptr + sequence + 1) - tl.load(row_starts_ptr + sequence) > MOST:
        place = (head * KEY_DIM + k)[:, None] * VALUE_DIM + channel[None, :]
        size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
        state = tl.load(states_ptr + tl.load(read_slots_ptr + sequence) * size + place)
        for segment in range(tl.load(first_segments_ptr + sequence), tl.load(first_segments_ptr + sequence + 1)):
            stop = tl.load(segment_starts_ptr + segment + 1)
            for first in range(tl.load(segment_starts_ptr + segment), stop, BLOCK_R):
                row, inside = first + i, first + i < stop
                strength, decay = load_steps(
                    gates_ptr, decay_ptr, bias_ptr, row, inside, head, stride, gate, lower, upper, GATES, INTERPRETED
                )
                total, last = tl.cumsum(decay, 0), tl.sum(decay, 0)
                key_column, seen = head // SHARED * KEY_DIM, tl.exp(total)
                key, key_factor = load_heads(x_ptr, row, inside, KEY + key_column, KEY_DIM, CHANNELS, DELTA)
                x_place = row.to(tl.int64)[:, None] * CHANNELS + VALUE + head * VALUE_DIM + channel[None, :]
                value = tl.load(x_ptr + x_place, mask=inside[:, None], other=0.0).to(tl.float32)
                chunk_place = (row.to(tl.int64)[:, None] * HEADS + head) * BLOCK_R + i[None, :]
                nothing = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
                update = strength[:, None] * value
                if DELTA:
                    known = product(key, state, nothing, INTERPRETED)
                    update -= (strength * key_factor * seen)[:, None] * known
                    solved = tl.load(solved_ptr + chunk_place, mask=inside[:, None], other=0.0)
                    update = tl.dot(solved, update)
                query, factor = load_heads(x_ptr, row, inside, QUERY + key_column, KEY_DIM, CHANNELS, DELTA)
                found = product(query, state, nothing, INTERPRETED) * (factor * seen * scale)[:, None]
                found = tl.dot(tl.load(shared_ptr + chunk_place, mask=inside[:, None], other=0.0), update, found)
                if skip_ptr is not None:
                    found += tl.load(skip_ptr + head) * value
                found = rounded(found, out_ptr.dtype.element_ty, INTERPRETED).to(out_ptr.dtype.element_ty)
                out_place = (row.to(tl.int64)[:, None] * HEADS + head) * VALUE_DIM + channel[None, :]
                tl.store(out_ptr + out_place, found, mask=inside[:, None])
                update *= (key_factor * tl.exp(last - total))[:, None]
                state = product(tl.trans(key), update, tl.exp(last) * state, INTERPRETED)
            tl.store(states_ptr + tl.load(write_slots_ptr + segment) * size + place, state)


@dataclass(frozen=True, slots=True)
class HeadVectors:
    """Vectors of the heads of a mixer, float32 `[heads]`: factor of steps in the logarithm of the decay, offset of
    steps, and share of the value in the output (None for none)."""

    decay: Tensor
    bias: Tensor
    skip: Tensor | None = None


def scan_rows(
    heads: Heads, vectors: HeadVectors, convolved: Tensor, gates: Tensor, states: Tensor, rows: StateRows, out: Tensor
) -> None:
    """Writes `out [T, heads, V]`, and states after segments.

    Args:
        convolved: `[T, channels]`.
        gates: `[T, O]`, rows with strengths and steps.
        states: float32 `[slots, heads, K, V]`.
    """
    from_rows = convolved, gates, vectors.decay, vectors.bias
    slots = rows.read_slots, rows.write_slots, rows.row_starts, rows.segment_starts, rows.first_segments
    options = scan_options(heads, convolved, gates)
    grid = len(rows.counts), heads.num_heads, heads.value_dim // options["BLOCK_V"]
    counts = rows.num_rows
    numbers = gates.stride(0), heads.gate, heads.scale, *heads.limits
    if min(counts) <= SHORT:
        state_step[grid](*from_rows, vectors.skip, states, out, *slots, *numbers, **options, num_warps=4)
    if max(counts) <= SHORT:
        return
    chunks = rows.chunks(CHUNK)
    sizes = len(convolved), heads.num_heads, CHUNK
    shared = torch.empty(sizes, dtype=torch.float32, device=convolved.device)
    solved = torch.empty_like(shared) if heads.is_delta else shared
    known = {name: options[name] for name in options if name not in ("VALUE_DIM", "VALUE", "BLOCK_V")}
    chunk_products[(len(chunks), heads.num_heads)](
        *from_rows, solved, shared, chunks, rows.row_starts, *numbers, **known, BLOCK_R=CHUNK, num_warps=8
    )
    if heads.is_delta or heads.key_dim > 128:
        options["BLOCK_V"] = 16  # so the state fits in registers, as `scripts/compile_kernels.py` found it
    grid = len(rows.counts), heads.num_heads, heads.value_dim // options["BLOCK_V"]
    state_scan[grid](
        *from_rows, vectors.skip, solved, shared, states, out, *slots, *numbers, **options, BLOCK_R=CHUNK, num_warps=8,
        num_stages=1,
    )  # fmt: skip


def scan_options(heads: Heads, convolved: Tensor, gates: Tensor) -> dict[str, Any]:
    """Compile-time arguments of `state_step` and `state_scan`."""
    return {
        "HEADS": heads.num_heads,
        "SHARED": heads.shared,
        "KEY_DIM": heads.key_dim,
        "VALUE_DIM": heads.value_dim,
        "QUERY": heads.query,
        "KEY": heads.key,
        "VALUE": heads.value,
        "CHANNELS": convolved.shape[1],
        "GATES": heads.gates_shared,
        "MOST": SHORT,
        "BLOCK_V": min(heads.value_dim, 32),
        "INTERPRETED": triton.knobs.runtime.interpret,
    }
