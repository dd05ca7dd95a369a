"""The search for trellis codes in Triton: a program searches one stream, with the costs of all states in memory that
the cache of the GPU holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STATES = tl.constexpr(1 << 16)
MAX_ORIGIN_BYTES = 1 << 30
"""Bytes of best origins in one launch: 8 MiB for a stream at 1 bit, half of it for each bit more."""


@triton.jit
def search_step(costs_in, costs_out, origins, numbers_ptr, value, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds a code of BITS bits to all streams: the best state before each group of states that share their upper bits,
    and the costs of the states."""
    GROUPS: tl.constexpr = STATES >> BITS
    COUNT: tl.constexpr = BLOCK >> BITS
    part = tl.arange(0, 1 << BITS)
    for first in tl.range(0, GROUPS, COUNT):
        group = first + tl.arange(0, COUNT)
        costs = tl.load(costs_in + part[:, None] * GROUPS + group[None, :])
        least, origin = tl.min(costs, 0, return_indices=True)
        tl.store(origins + group, origin.to(tl.uint8))
        state = (group[:, None] << BITS) + part[None, :]
        difference = tl.load(numbers_ptr + state) - value
        tl.store(costs_out + state, least[:, None] + difference * difference)
    tl.debug_barrier()


@triton.jit
def state_before(state, origins, BITS: tl.constexpr):
    """Returns the state before one, by the origins of its step."""
    group = state >> BITS
    return tl.load(origins + group).to(tl.int32) << (16 - BITS) | group


@triton.jit
def search_stream(
    values_ptr, numbers_ptr, start_ptr, costs_ptr, origins_ptr, states_ptr,
    STEPS: tl.constexpr, PAIR_BITS: tl.constexpr, IS_CYCLIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Searches the states int32 `[N, STEPS]` of streams with the least squared error to values float32 `[N, STEPS]`.

    `numbers [65536]` float32; `start [N]` int32: state before the first and after the last step if IS_CYCLIC, else
    any; costs `[N, 2, 65536]` float32 and origins `[N, STEPS, 65536 >> PAIR_BITS // 2]` uint8 hold what is on the way.
    """
    FIRST: tl.constexpr = PAIR_BITS // 2
    SECOND: tl.constexpr = PAIR_BITS - FIRST
    GROUPS: tl.constexpr = STATES >> FIRST
    stream = tl.program_id(0).to(tl.int64)
    values_ptr += stream * STEPS
    states_ptr += stream * STEPS
    even = costs_ptr + stream * (2 * STATES)
    odd = even + STATES
    origins_ptr += stream * (STEPS * GROUPS)
    state = tl.load(start_ptr + stream)
    for first in tl.range(0, STATES, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(even + place, tl.where(IS_CYCLIC & (place != state), float("inf"), 0.0))
    tl.debug_barrier()
    for pair in tl.range(0, STEPS // 2):
        step = 2 * pair
        search_step(even, odd, origins_ptr + step * GROUPS, numbers_ptr, tl.load(values_ptr + step), FIRST, BLOCK)
        step += 1
        search_step(odd, even, origins_ptr + step * GROUPS, numbers_ptr, tl.load(values_ptr + step), SECOND, BLOCK)
    if not IS_CYCLIC:
        best = float("inf")
        for first in tl.range(0, STATES, BLOCK):
            least, place = tl.min(tl.load(even + first + tl.arange(0, BLOCK)), 0, return_indices=True)
            state = tl.where(least < best, first + place, state)
            best = tl.minimum(best, least)
    for back in tl.range(0, STEPS // 2):
        step = STEPS - 1 - 2 * back
        tl.store(states_ptr + step, state)
        state = state_before(state, origins_ptr + step * GROUPS, SECOND)
        step -= 1
        tl.store(states_ptr + step, state)
        state = state_before(state, origins_ptr + step * GROUPS, FIRST)


def search_in_triton(values: Tensor, numbers: Tensor, pair_bits: int, overlap: int, block: int = 4096) -> Tensor:
    """Searches the states int32 `[N, 256]` of cyclic streams `values [N, 256]` with `numbers [65536]`, as the C code
    does.

    Args:
        overlap: steps on each side of the end of a stream from which its state there is found.
        block: states that a program computes at once.
    """
    groups = STATES.value >> pair_bits // 2
    chunk = max(1, MAX_ORIGIN_BYTES // (values.shape[1] * groups))
    costs = torch.empty(min(chunk, len(values)), 2, STATES.value, device=values.device)
    origins = torch.empty(len(costs), values.shape[1], groups, dtype=torch.uint8, device=values.device)

    def search(part: Tensor, start: Tensor, is_cyclic: bool) -> Tensor:
        found = torch.empty(part.shape, dtype=torch.int32, device=part.device)
        search_stream[(len(part),)](
            part.contiguous(), numbers, start, costs, origins, found, STEPS=part.shape[1], PAIR_BITS=pair_bits,
            IS_CYCLIC=is_cyclic, BLOCK=block, num_warps=16, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
        return found

    chunks = []
    for part in values.split(chunk):
        around = torch.cat((part[:, -overlap:], part[:, :overlap]), 1)
        anywhere = torch.zeros(len(part), dtype=torch.int32, device=part.device)
        end = search(around, anywhere, False)[:, overlap - 1].contiguous()
        chunks.append(search(part, end, True))
    return torch.cat(chunks)
