"""Vector codebooks of 1 to 3 bits, dequantized by the `gguf` package, which has their tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from compress.checkpoint.gguf.types.base import SUPER_BLOCK, BlockType
from compress.common.errors import CheckpointError

PACKAGE = "gguf"
INSTALL = "pip install 'compress-runtime[gguf]'"


def check_installed(name: str) -> None:
    """Raises CheckpointError where the package that dequantizes these types is missing."""
    if find_spec(PACKAGE) is None:
        raise CheckpointError(f"tensors of type {name} are read by the package {PACKAGE}, which is missing", INSTALL)


def _dequantize(blocks: Tensor, code: int) -> Tensor:
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(code)))


def _of_package(code: int) -> Callable[[Tensor], Tensor]:
    return partial(_dequantize, code=code)


TYPES = (
    BlockType("iq2_xxs", 16, SUPER_BLOCK, 66, _of_package(16)),
    BlockType("iq2_xs", 17, SUPER_BLOCK, 74, _of_package(17)),
    BlockType("iq3_xxs", 18, SUPER_BLOCK, 98, _of_package(18)),
    BlockType("iq1_s", 19, SUPER_BLOCK, 50, _of_package(19)),
    BlockType("iq3_s", 21, SUPER_BLOCK, 110, _of_package(21)),
    BlockType("iq2_s", 22, SUPER_BLOCK, 82, _of_package(22)),
    BlockType("iq1_m", 29, SUPER_BLOCK, 56, _of_package(29)),
)
NAMES = frozenset(kind.name for kind in TYPES)
