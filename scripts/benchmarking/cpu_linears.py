"""Products with one weight on one core: the C kernels beside those of PyTorch, interleaved.

Seconds of processor time of the calling thread are compared, so that other work on the machine shifts the figures
little; torch and the C pool get one thread each. Every product takes another copy of its weight, together larger than
the caches, as layers of a model follow each other.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.cpu.binding import set_threads
from compress.cpu.linear import Activations, NativeLinear
from runtime.backends.base import Linear, Target
from runtime.backends.torch import int4pack
from runtime.backends.torch.linear import PrepackedLinear

CACHES = 128 * 2**20
"""Bytes of copies of one weight."""
TARGET = Target(torch.device("cpu"), torch.bfloat16)
BASELINE = "torch int4pack"


@dataclass(frozen=True, slots=True)
class Contender:
    """Copies of one weight, taken in turns."""

    name: str
    copies: Sequence[Linear]

    def __call__(self, x: Tensor, turn: int) -> Tensor:
        return self.copies[turn % len(self.copies)](x)


def contenders(in_features: int, out_features: int, group_size: int = 128) -> list[Contender]:
    """All ways to multiply by a random weight of a shape."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(out_features, in_features, generator=generator).to(torch.bfloat16)

    def codes(bits: int, activation_bits: int | None = None) -> IntegerWeight:
        scheme = Scheme(bits, None if activation_bits else group_size, activation_bits=activation_bits)
        shape = out_features, scheme.num_groups(in_features)
        values = torch.randint(0, 1 << bits, numbers.shape, generator=generator).to(torch.uint8)
        scale = (torch.rand(shape, generator=generator) * 0.01 + 0.01).to(torch.bfloat16)
        return IntegerWeight(values, scale, torch.full(shape, scheme.midpoint, dtype=torch.uint8), scheme)

    w4, w2, w8, w8a8 = codes(4), codes(2), codes(8), codes(8, 8)
    makers: Mapping[str, Callable[[], Linear]] = {
        "torch bf16": lambda: PrepackedLinear(numbers, None),
        "torch int4pack": lambda: int4pack.KERNEL.prepare(w4, None, TARGET),
        "w4a16": lambda: NativeLinear(w4),
        "w4a8": lambda: NativeLinear(w4, activations=Activations.INT8_GROUP),
        "w2a16": lambda: NativeLinear(w2),
        "w8a16": lambda: NativeLinear(w8),
        "w8a8": lambda: NativeLinear(w8a8, activations=Activations.INT8_ROW),
        "bf16": lambda: NativeLinear(numbers),
    }
    return [_copied(name, make) for name, make in makers.items()]


def _copied(name: str, make: Callable[[], Linear]) -> Contender:
    first = make()
    return Contender(name, [first, *(make() for _ in range(CACHES // first.nbytes))])


def milliseconds(
    sides: Sequence[Contender], in_features: int, rows: int, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Processor time per product, and how many times as fast as the baseline each is: medians over turns.

    Args:
        seconds: how long all of it may take; at least three turns are made.

    Returns:
        Milliseconds, and times as fast, by contender.
    """
    set_threads(1)
    torch.set_num_threads(1)
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    deadline = time.monotonic() + seconds
    for turn in itertools.count():
        for side in sides:
            begin = time.thread_time()
            side(x, turn)
            taken[side.name].append(time.thread_time() - begin)
        if turn >= 3 and time.monotonic() > deadline:
            break
    measured = {name: times[1:] for name, times in taken.items()}
    speed = {
        name: statistics.median(slow / quick for slow, quick in zip(measured[BASELINE], times, strict=True))
        for name, times in measured.items()
    }
    return {name: 1e3 * statistics.median(times) for name, times in measured.items()}, speed
