"""Types of -1, 0 and 1 with one float16 scale for 256 values: five to a byte (tq1_0), or four (tq2_0)."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import BLOCK_TYPES, SUPER_BLOCK, BlockType, float32, planes, scaled


def _trits(data: Tensor, run: int, count: int) -> Tensor:
    """Takes `count` digits of base 3 from each byte, of which the byte is the fraction in 256ths: `[N, M * count]`."""
    powers = torch.tensor([3**power for power in range(count)], dtype=torch.uint8).view(1, 1, -1, 1)
    rest = data.reshape(len(data), -1, 1, run) * powers  # modulo 256: what is before the point falls away
    return ((rest.to(torch.int16) * 3) >> 8).flatten(1)


def _tq1_0(blocks: Tensor) -> Tensor:
    parts = (_trits(blocks[:, :32], 32, 5), _trits(blocks[:, 32:48], 16, 5), _trits(blocks[:, 48:52], 4, 4))
    return scaled(float32(blocks, 52), torch.cat(parts, dim=1).float() - 1)


def _tq2_0(blocks: Tensor) -> Tensor:
    return scaled(float32(blocks, 64), planes(blocks[:, :64], 32, 2).float() - 1)


for each in (
    BlockType("tq1_0", 34, SUPER_BLOCK, 54, _tq1_0),
    BlockType("tq2_0", 35, SUPER_BLOCK, 66, _tq2_0),
):
    BLOCK_TYPES.register()(each)
