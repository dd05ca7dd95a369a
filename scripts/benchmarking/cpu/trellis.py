"""Trellis codes (EXL3): their search, and their products compared with those of the bfloat16 numbers they decode to."""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarking.cpu.kernels import copied, product_rows, random_weight
from benchmarking.tables import Row
from compress.checkpoint.weights import Exl3
from compress.checkpoint.weights.exl3 import CODEBOOKS, CODES, HALVES_CODEBOOK, codebook_values, pair_widths
from compress.cpu.trellis import search_states
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.cpu.trellis import CpuTrellisLinear

EXPANDED = "bf16"
WIDTHS = (3, 4)
TILES, TRIES = 16, 4


def trellis_rows(in_features: int, out_features: int, numbers_of_rows: list[int], seconds: float) -> list[Row]:
    """One line per width and codebook: milliseconds for each number of rows, and times as fast as bfloat16 numbers."""
    torch.manual_seed(0)
    numbers = torch.randn(out_features, in_features).to(torch.bfloat16)
    sides = [copied(EXPANDED, partial(CpuLinear, numbers))]
    for bits in WIDTHS:
        for codebook in CODEBOOKS:
            weight = random_weight(out_features, in_features, Exl3(bits, codebook))
            sides.append(copied(f"{bits} bits, {codebook}", partial(CpuTrellisLinear, weight)))
    return product_rows(sides, in_features, numbers_of_rows, seconds, EXPANDED)


def search_rows() -> list[Row]:
    """One line per width: milliseconds to search the codes of a tile, the least of some tries."""
    values, numbers = torch.randn(TILES, CODES), codebook_values(HALVES_CODEBOOK).float()
    return [
        {"bits": f"{pair_bits / 2:g}", "ms": f"{_search_ms(values, numbers, pair_bits):.2f}"}
        for pair_bits in pair_widths(HALVES_CODEBOOK)
    ]


def _search_ms(values: torch.Tensor, numbers: torch.Tensor, pair_bits: int) -> float:
    def once() -> float:
        start = time.process_time()
        search_states(values, numbers, pair_bits)
        return time.process_time() - start

    return min(once() for _ in range(TRIES)) / TILES * 1000
