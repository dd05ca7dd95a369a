"""Integer weights multiplied by humming-kernels, from the tensors that a compressed-tensors checkpoint stores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.coded import CodedWeight
from runtime.backends.backend import LinearKernel
from runtime.backends.base import Linear, Target
from runtime.backends.measured import Verdict
from runtime.backends.triton.device import judge_on_gpu
from runtime.backends.triton.linear import TESTED_TOKENS

TABLES = Path(__file__).parent / "tables"
"""Measured speed-ups, one file per GPU, named after it."""
ROW_MULTIPLE = COLUMN_MULTIPLE = 128
"""Tiles that the kernels divide a weight into; the package fills it up."""
UNIT = 32
"""Group sizes are a multiple of this, or the whole row."""


@dataclass(frozen=True, slots=True)
class HummingLinear:
    """A weight in the layout of the package.

    Attributes:
        layer: its `HummingLayer`.
    """

    layer: Any

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.layer.parameters(), *self.layer.buffers()))

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer(x.contiguous()))


def prepare(weight: CodedWeight, bias: Tensor | None, target: Target) -> Linear:
    """Hands codes, scales and zero points over in the public format, without changing one."""
    from humming.layer import HummingLayer

    there = weight.to(target.device).tensors(target.dtype)
    tensors = {name.removeprefix("."): tensor for name, tensor in there.items()}
    with torch.device(target.device):
        layer = HummingLayer(
            *weight.shape,
            weight_config(weight.scheme),
            pad_n_to_multiple=ROW_MULTIPLE,
            pad_k_to_multiple=COLUMN_MULTIPLE,
            has_bias=bias is not None,
            torch_dtype=target.dtype,
        ).to(target.device)
    layer.load_from_tensors(tensors if bias is None else tensors | {"bias": bias})
    layer.transform()
    return HummingLinear(layer)


def weight_config(scheme: Scheme) -> dict[str, Any]:
    """The scheme in the words of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "type": "int",
        "num_bits": scheme.bits,
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
    }


def unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    """Why the package cannot serve a scheme on a target; "" when it can."""
    if target.device.type != "cuda":
        return "runs on NVIDIA GPUs"
    if not is_installed():
        return "needs humming-kernels (pip install 'compress-runtime[gpu]')"
    if target.dtype not in (torch.bfloat16, torch.float16):
        return "computes in 16 bits"
    if scheme.activation_bits is not None:
        return "takes 16-bit activations here"
    group_size = scheme.group_size or in_features
    if group_size % UNIT or in_features % group_size:
        return f"takes whole groups that are a multiple of {UNIT}"
    return ""


@cache
def is_installed() -> bool:
    return find_spec("humming") is not None


def verdict(scheme: Scheme, in_features: int, target: Target) -> Verdict:
    """Whether it is faster, by the table of this GPU or of one like it."""
    return judge_on_gpu(TABLES, target.device, str(scheme), in_features)


def nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    """Bytes of codes, 16-bit scales and packed zero points of the filled-up weight, and of its locks."""
    rows, columns = rows + -rows % ROW_MULTIPLE, columns + -columns % COLUMN_MULTIPLE
    groups, bits = scheme.num_groups(columns), int(scheme.bits)
    zeros = 0 if scheme.symmetric else rows * groups * bits // 8
    return rows * columns * bits // 8 + rows * groups * 2 + zeros + LOCK_BYTES


LOCK_BYTES = 2048 * 4

KERNEL = LinearKernel(
    "humming",
    "2- to 8-bit codes by humming-kernels, float32 sums",
    "int",
    unsupported_reason,
    prepare,
    nbytes,
    mode="humming",
    # Its programs add partial sums in 16 bits, in the order in which they end.
    on_request="may give other sums in each run: --linear-backend humming takes it",
    verdict=verdict,
    tested_tokens=TESTED_TOKENS,
)
