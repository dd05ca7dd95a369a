"""Shares of a GPU's memory bandwidth that decoding reached, by forms of weights, keys and values: the speed that
`compress fit` predicts. Measured in one run on one H200: docs/measurements/gpu.md. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from compress.checkpoint.scheme import Scheme

STREAM = 4.2 / 4.8
"""Read stream over the bandwidth of the H200's data sheet, both in TB/s. All shares below are shares of the stream."""
MANY = 64
"""Sequences of the largest decode step that was measured."""


class Share(NamedTuple):
    """Share of the stream at which a step reads weights, the rest of the step included: with 1 sequence and `MANY`."""

    one: float
    many: float

    def at(self, sequences: int) -> float:
        """Returns the share between both; for more than `MANY` sequences that for `MANY`."""
        return self.one + (self.many - self.one) * (min(sequences, MANY) - 1) / (MANY - 1)


INT4 = Share(0.45, 0.20)
"""From decode steps of an 8B shape, less the time of keys and values by `PAGES`; so are the shares of 16 bits."""


def _by_product(one: float, many: float) -> Share:
    """Scales the shares of int4 by those of a product of 28672x4096 for a form that no whole model was measured in."""
    return Share(INT4.one * one / 0.57, INT4.many * many / 0.30)


INT2 = _by_product(0.27, 0.16)
WEIGHTS: Mapping[tuple[str, float] | None, Share] = {
    None: Share(0.78, 0.71),
    ("int", 8): _by_product(0.74, 0.43),
    ("int", 4): INT4,
    ("int", 3): INT2,  # not measured; the same kernel
    ("int", 2): INT2,
    ("nvfp4", 4): _by_product(0.27, 0.14),
}
"""By word and bits of a scheme; None is 16 bits."""
PAGES = {"16bit": 0.66, "int8": 0.36, "int4": 0.21}
"""Attention of 16 sequences over 4,096 keys each, by form of the pages."""


def gpu_step_seconds(
    weights: Iterable[tuple[Scheme | None, int]], pages: tuple[str, int], sequences: int, bytes_per_second: float
) -> float:
    """Predicts the seconds of a decode step on a GPU.

    Args:
        weights: schemes, None for 16 bits, and bytes of the weights in each.
        pages: form of keys and values, a key of `PAGES`, and bytes of those of all sequences.
        bytes_per_second: bandwidth by the data sheet.
    """
    kv_cache, kv_bytes = pages
    streamed = kv_bytes / PAGES[kv_cache]
    for scheme, count in weights:
        streamed += count / WEIGHTS[(scheme.word, scheme.bits) if scheme else None].at(sequences)
    return streamed / (STREAM * bytes_per_second)
