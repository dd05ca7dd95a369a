"""Vector codebooks of 1 to 3 bits, dequantized by the `gguf` package, which has their tables."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import BLOCK_TYPES, SUPER_BLOCK, BlockType

PACKAGE = "gguf"


def _dequantize(blocks: Tensor, code: int) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(code)))


for name, code, nbytes in (
    ("iq2_xxs", 16, 66),
    ("iq2_xs", 17, 74),
    ("iq3_xxs", 18, 98),
    ("iq1_s", 19, 50),
    ("iq3_s", 21, 110),
    ("iq2_s", 22, 82),
    ("iq1_m", 29, 56),
):
    kind = BlockType(name, code, SUPER_BLOCK, nbytes, partial(_dequantize, code=code), package=PACKAGE)
    BLOCK_TYPES.register()(kind)
