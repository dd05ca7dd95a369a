"""Writes trellis codes (EXL3): turns a weight, searches the codes of its tiles, and packs them.

QTIP (Tseng et al. 2024, https://arxiv.org/abs/2406.11235): section 3.1 has the codes, algorithms 3 and 4 the search of
cyclic streams, and QuIP (Chee et al. 2023, https://arxiv.org/abs/2307.13304, section 3) the feedback between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.checkpoint.kv_quant import hadamard_transform
from compress.checkpoint.weights.exl3 import (
    CODES,
    STATE_BITS,
    TILE,
    TURN,
    WORD_BITS,
    Exl3,
    Exl3Weight,
    codebook_values,
    padded,
    tile_order,
)
from compress.common.device import require_finite
from compress.cpu.binding import library
from compress.cpu.trellis import search_states

OVERLAP = 64
"""Steps on each side of the end of a stream from which its state there is found."""
_TORCH_TILES = 16
_SAMPLE_TILES = 24
_SCALES = (0.84, 0.88, 0.92, 0.96, 1.0, 1.04)
_INPUT_SEED, _OUTPUT_SEED = 0, 1


@dataclass(frozen=True, slots=True)
class TurnedHessian:
    """Hessian of inputs with random signs, times the Hadamard matrices.

    Attributes:
        values: `[padded(I), padded(I)]` float32.
        feedback: of the same shape, unit upper triangular with unit matrices as blocks of 16 on the diagonal: row j
            tells how much of its error each later column absorbs. None stands for independent blocks.
    """

    values: Tensor
    feedback: Tensor | None


def encode_trellis(weight: Tensor, scheme: Exl3, hessian: TurnedHessian | None = None) -> Exl3Weight:
    """Encodes `weight [O, I]`; the same bytes on every number of threads. Raises NumericsError: NaN or infinity.

    Args:
        hessian: of `turned_inputs`; None weighs all inputs alike.
    """
    require_finite(weight, "the weight")
    outputs, inputs = weight.shape
    wanted = turned_inputs(weight.float())
    norms = wanted.square().mean(-1).sqrt()
    scales = torch.where(norms > 0, norms, norms.mean().clamp(min=1e-4)) * random_signs(outputs, _OUTPUT_SEED, weight)
    tiles = _turn(_filled(wanted / scales.unsqueeze(-1), 0).T)
    factor = _codebook_scale(tiles, scheme)
    trellis, values = _encode_blocks(tiles * factor, scheme, None if hessian is None else hessian.feedback)
    decoded = _turn(values)[:, :outputs].T
    weighted = decoded if hessian is None else decoded @ hessian.values
    size = (weighted * decoded).sum(-1)
    fitted = torch.where(size > 0, (weighted * wanted).sum(-1) / size, scales / factor)
    signs = random_signs(inputs, _INPUT_SEED, weight)
    return Exl3Weight(trellis, signs.half(), fitted.half(), scheme)


def turned_inputs(rows: Tensor) -> Tensor:
    """Returns rows `[N, I]` with the signs of inputs, filled up with zeros, times the Hadamard matrices:
    `[N, padded(I)]`."""
    return _turn(_filled(rows * random_signs(rows.shape[-1], _INPUT_SEED, rows), -1))


def random_signs(size: int, seed: int, like: Tensor) -> Tensor:
    """Returns 1 and -1 of a seed, float32, on the device of a tensor."""
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs.to(like.device, torch.float32)


def _filled(values: Tensor, dim: int) -> Tensor:
    missing = padded(values.shape[dim]) - values.shape[dim]
    return pad(values, (0, missing) if dim == -1 else (0, 0, 0, missing))


def _turn(rows: Tensor) -> Tensor:
    turned: Tensor = hadamard_transform(rows.unflatten(-1, (-1, TURN))) / TURN**0.5
    return turned.flatten(-2)


def _codebook_scale(tiles: Tensor, scheme: Exl3) -> float:
    """Returns the factor on values of unit variance at which a sample of them has the least relative error."""
    numbers = codebook_values(scheme.codebook).float()
    stream = _streams(tiles[: len(tiles) // TILE * TILE])
    sample = stream[torch.linspace(0, len(stream) - 1, min(_SAMPLE_TILES, len(stream))).long().to(stream.device)]
    factors = [each * float(numbers.std()) for each in _SCALES]

    def error(factor: float) -> float:
        found = numbers.to(sample.device)[search_tiles(sample * factor, scheme).long()]
        return float((found / factor - sample).square().mean())

    return min(factors, key=error)


def _encode_blocks(wanted: Tensor, scheme: Exl3, feedback: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encodes values `[padded(I), padded(O)]` in blocks of 16 inputs; later ones absorb the errors. Returns packed
    tiles and their values."""
    numbers = codebook_values(scheme.codebook).float().to(wanted.device)
    values, errors, packed = torch.empty_like(wanted), torch.empty_like(wanted), []
    for first in range(0, len(wanted), TILE):
        block, target = slice(first, first + TILE), wanted[first : first + TILE]
        if feedback is not None and first:
            target = torch.addmm(target, feedback[:first, block].T, errors[:first])
        states = search_tiles(_streams(target), scheme)
        values[block] = _values(numbers[states.long()])
        errors[block] = wanted[block] - values[block]
        packed.append(_packed(states, scheme.pair_bits))
    return torch.stack(packed), values


def _streams(values: Tensor) -> Tensor:
    """Returns values `[16 R, 16 C]` as streams of tiles `[R C, 256]`."""
    tiles = values.view(len(values) // TILE, TILE, -1, TILE).transpose(1, 2).reshape(-1, CODES)
    return tiles[:, tile_order().argsort().to(values.device)]


def _values(streams: Tensor) -> Tensor:
    """Returns the values `[16, 16 C]` of one row of tiles; inverts `_streams`."""
    tiles = streams[:, tile_order().to(streams.device)].view(-1, TILE, TILE)
    return tiles.transpose(0, 1).reshape(TILE, -1)


def _packed(states: Tensor, pair_bits: int) -> Tensor:
    """Packs the codes at the end of states `[N, 256]`, of which every second one ends with two: int16 `[N, 8 *
    pair_bits]`, streams as `exl3.states` reads them."""
    places = torch.arange(pair_bits - 1, -1, -1, device=states.device)
    stream = (states[:, 1::2].unsqueeze(-1) >> places & 1).flatten(1).unflatten(-1, (-1, WORD_BITS))
    words = (stream << torch.arange(WORD_BITS - 1, -1, -1, device=states.device)).sum(-1)
    words = words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16)


def search_tiles(values: Tensor, scheme: Exl3) -> Tensor:
    """Returns the states int32 `[N, 256]` of the cyclic streams near `values [N, 256]`: in C, in Triton on a GPU, or in
    torch without either."""
    numbers = codebook_values(scheme.codebook).float()
    if values.device.type == "cpu" and library() is not None:
        return search_states(values, numbers, scheme.pair_bits)
    if values.device.type == "cuda" and find_spec("triton") is not None:
        from compress.checkpoint.trellis_search_triton import search_in_triton

        return search_in_triton(values, numbers.to(values.device), scheme.pair_bits, OVERLAP)
    chunks = values.split(_TORCH_TILES)
    return torch.cat([search_by_torch(chunk, numbers.to(values.device), scheme.pair_bits) for chunk in chunks])


def search_by_torch(values: Tensor, numbers: Tensor, pair_bits: int, overlap: int = OVERLAP) -> Tensor:
    """Searches the states int32 `[N, 256]` of streams `values [N, 256]` with `numbers [65536]`, as the C code does."""
    around = torch.cat((values[:, -overlap:], values[:, :overlap]), 1)
    costs = torch.zeros(len(values), 1 << STATE_BITS, device=values.device)
    costs, origins = _forward(around, numbers, costs, pair_bits)
    state = _backward(costs.argmin(-1), origins[overlap:], pair_bits)[0]
    costs = torch.full_like(costs, torch.inf).scatter_(1, state.unsqueeze(1), 0.0)
    _, origins = _forward(values, numbers, costs, pair_bits)
    return torch.stack(_backward(state, origins, pair_bits)[1:], 1).to(torch.int32)


def _widths(pair_bits: int, count: int) -> list[int]:
    """Returns the bits of codes, from an even one on."""
    return [(pair_bits + step % 2) // 2 for step in range(count)]


def _forward(values: Tensor, numbers: Tensor, costs: Tensor, pair_bits: int) -> tuple[Tensor, list[Tensor]]:
    """Returns the costs `[N, 65536]` after all steps, and the highest part of the best state before each group."""
    origins = []
    for value, bits in zip(values.T, _widths(pair_bits, values.shape[1]), strict=True):
        least, origin = costs.unflatten(-1, (1 << bits, -1)).min(1)
        origins.append(origin.to(torch.uint8))
        costs = least.repeat_interleave(1 << bits, -1) + (numbers - value.unsqueeze(1)).square()
    return costs, origins


def _backward(state: Tensor, origins: list[Tensor], pair_bits: int) -> list[Tensor]:
    """Returns the states `[N]` before the first step, and after each one."""
    found = [state]
    for origin, bits in zip(reversed(origins), reversed(_widths(pair_bits, len(origins))), strict=True):
        group = found[-1] >> bits
        high = origin.gather(1, group.unsqueeze(1)).squeeze(1).long()
        found.append(high << (STATE_BITS - bits) | group)
    return found[::-1]
