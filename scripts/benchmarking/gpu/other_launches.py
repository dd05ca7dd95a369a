"""Launches of Triton kernels that no served decoder makes: compression on a GPU, and trellis codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarking.gpu.without_gpu import Build, Card, gpu_without_hardware


def column_solver() -> None:
    """Launches what GPTQ changes columns by."""
    from compress.cpu.gptq import ColumnGrid
    from compress.methods.shared.column_solver_triton import GpuColumns

    weight, feedback, scale = (_empty(rows, 4096, dtype=torch.float32) for rows in (256, 256, 2))
    codes, kept = _empty(256, 4096, dtype=torch.uint8), _empty(256, 4096, dtype=torch.bool)
    grid = ColumnGrid(scale, scale, _empty(256, dtype=torch.int64), 15)
    for has_kept, has_grid in ((False, True), (True, True), (True, False)):
        columns = GpuColumns(
            weight, weight, feedback[:, :256], codes, kept if has_kept else None, grid if has_grid else None
        )
        for count in (4, 16, 23, 33, 64):
            columns.change(64, 64 + count)


def trellis_codes() -> None:
    """Launches products with trellis codes of several widths, which serve where their dense form does not fit."""
    from compress.checkpoint.weights.exl3 import CODEBOOKS, HALVES_CODEBOOK, pair_widths
    from runtime.backends.triton.kernels.trellis import TrellisLinear

    inputs, outputs = 4096, 14336
    scales = _empty(inputs, dtype=torch.float32), _empty(outputs, dtype=torch.float32)
    for pair_bits in pair_widths(HALVES_CODEBOOK):
        words = _empty(inputs // 16, outputs // 16, 4 * pair_bits, dtype=torch.int32)
        codebook = CODEBOOKS.index(HALVES_CODEBOOK) if pair_bits % 2 else pair_bits // 2 % len(CODEBOOKS)
        linear = TrellisLinear(words, *scales, None, pair_bits, codebook)
        for tokens in (1, 512):
            linear(_empty(tokens, inputs))


def trellis_search() -> None:
    """Launches the search for trellis codes of several widths."""
    from compress.checkpoint.trellis_search import OVERLAP
    from compress.checkpoint.trellis_search_triton import search_in_triton
    from compress.checkpoint.weights.exl3 import HALVES_CODEBOOK, pair_widths

    values, numbers = (_empty(*shape, dtype=torch.float32) for shape in ((8, 256), (1 << 16,)))
    for pair_bits in pair_widths(HALVES_CODEBOOK):
        search_in_triton(values, numbers, pair_bits, OVERLAP)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


OTHERS: dict[str, Callable[[], None]] = {
    "columns of GPTQ": column_solver,
    "trellis codes": trellis_codes,
    "search for trellis codes": trellis_search,
}


def launch_others(name: str, card: Card) -> list[Build]:
    """Builds of one of `OTHERS`."""
    with gpu_without_hardware(card) as gpu:
        OTHERS[name]()
        return gpu.builds
