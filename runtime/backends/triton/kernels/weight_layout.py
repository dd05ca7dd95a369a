"""The layout that all weight-only kernels share: codes in planes of 16-bit words. Made at load or by `runtime prepare`.

A word holds `16 / bits` codes, one from each plane: plane p of word e in a tile is the weight of input
`tile * TILE + 32 * p + e`, with `TILE = 512 / bits` inputs. So a plane is 32 neighbouring inputs, unpacking is the same
shift and mask for all elements of a loaded tile, and the codes never change their place among the threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.coded import CodedWeight
from runtime.backends.base import Target
from runtime.backends.prepared_weight import PreparedWeight

PLANE = 32
ROW_MULTIPLE = 128
"""Rows are filled up to this with zeros, so that no kernel needs to mask its loads of weights."""
ZERO_AND_SCALE_BYTES = 4
"""Bytes of a zero point and a 16-bit scale in one word: GPUs copy no less to shared memory while they compute."""
SIGN = 128
"""Bit by which a byte and the signed byte 128 below it differ."""
WORDS = {torch.float16: torch.int32, torch.bfloat16: torch.int32, torch.float32: torch.int64}
"""Words of twice the width of a scale."""


@dataclass(frozen=True, slots=True)
class InterleavedWeight:
    """A weight `[N, K]` on the device.

    Attributes:
        words: int16 `[tiles, rows, 32]`, rows at least N.
        scales: `[groups, rows]`, words with the zero point in the low half and the scale in the high one, both as
            `scale_dtype`, which is that of the checkpoint.
        bits: of a stored code, 2, 4 or 8; codes of other widths are stored in the next of these.
        group_size: inputs that share a scale; 0 when all of a row do.
        shape: N and K.
    """

    words: Tensor
    scales: Tensor
    scale_dtype: torch.dtype
    bits: int
    group_size: int
    shape: tuple[int, int]

    @property
    def unit(self) -> int:
        """Inputs that share a scale inside of a tile: a power of two from 32 on."""
        return gcd(self.group_size, tile_inputs(self.bits))

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes


def interleaved_bytes(
    scheme: Scheme, rows: int, inputs: int, target: Target, scale_bytes: int = ZERO_AND_SCALE_BYTES
) -> int:
    """`nbytes` of a packed weight, known from its shape; by default with 16-bit scales."""
    bits, padded = stored_bits(scheme.bits), rows + -rows % ROW_MULTIPLE
    tiles = -(-inputs // tile_inputs(bits))
    groups = -(-tiles * tile_inputs(bits) // scheme.group_size) if scheme.group_size else 1
    return padded * (tiles * PLANE * 2 + groups * scale_bytes)


def tile_inputs(bits: int) -> int:
    """Inputs of one tile of words."""
    return PLANE * 16 // bits


def stored_bits(bits: float) -> int:
    """Returns 2, 4 or 8."""
    return next(width for width in (2, 4, 8) if width >= bits)


def prepared(weight: InterleavedWeight) -> PreparedWeight:
    """Returns what files keep of a weight; scales with their zero points as `[groups, 2 * rows]` in their own dtype."""
    tensors = {"words": weight.words, "scales": weight.scales.view(weight.scale_dtype)}
    return PreparedWeight(weight.shape, tensors, weight.bits, weight.group_size)


def restored(weight: PreparedWeight) -> InterleavedWeight:
    """Returns the weight of what files keep. Raises CheckpointError for tensors that do not fit its shape."""
    (rows, inputs), bits, group = weight.shape, weight.bits, weight.group
    if bits not in (2, 4, 8) or group < 0 or group % PLANE:
        raise weight.refusal(f"{bits} bits in groups of {group}")
    tiles, filled = -(-inputs // tile_inputs(bits)), rows + -rows % ROW_MULTIPLE
    groups = -(-tiles * tile_inputs(bits) // group) if group else 1
    weight.check("words", (tiles, filled, PLANE), (torch.int16,))
    weight.check("scales", (groups, 2 * filled), tuple(WORDS))
    scales = weight.tensors["scales"]
    words, pairs = weight.tensors["words"], scales.view(WORDS[scales.dtype])
    return InterleavedWeight(words, pairs, scales.dtype, bits, group, weight.shape)


def interleave(weight: CodedWeight, device: torch.device) -> InterleavedWeight:
    """Codes of 2 to 8 bits, in groups of a multiple of 32 inputs or in one, as planes."""
    scheme = weight.scheme
    return interleave_codes(
        weight.qweight, weight.scales, weight.zero_points, scheme.bits, scheme.group_size or 0, device
    )


def interleave_codes(
    qweight: Tensor, scales: Tensor, zero_points: Tensor, code_bits: int, group_size: int, device: torch.device
) -> InterleavedWeight:
    """Codes `[N, K]` as planes; those of 8 bits as signed bytes, 128 below. Inputs beyond K get code 0 and scale 0, and
    the kernels multiply them by nothing."""
    bits = stored_bits(code_bits)
    tile = tile_inputs(bits)
    rows, inputs = qweight.shape
    more_rows, more_inputs = -rows % ROW_MULTIPLE, -inputs % tile
    codes = functional.pad(qweight.to(device), (0, more_inputs, 0, more_rows)) ^ (SIGN if bits == 8 else 0)
    planes = codes.view(rows + more_rows, -1, 16 // bits, PLANE).to(torch.int32)
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=device)
    words = (planes << shifts[:, None]).sum(2, dtype=torch.int32).to(torch.int16).transpose(0, 1).contiguous()
    more_groups = -(-(inputs + more_inputs) // group_size) - scales.shape[1] if group_size else 0
    scale, zero = (
        functional.pad(t.to(device), (0, more_groups, 0, more_rows)).T.contiguous() for t in (scales, zero_points)
    )
    both = torch.stack([zero.to(scale.dtype), scale], -1).view(WORDS[scale.dtype]).squeeze(-1)
    return InterleavedWeight(words, both, scale.dtype, bits, group_size, (rows, inputs))
