"""8-bit floats as compressed-tensors stores them: the codes as they are, beside their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.formats.tensors import Get, cast_exactly
from compress.checkpoint.fp8 import FP8, Fp8Weight
from compress.checkpoint.scheme import Scheme

FLOAT, NAIVE = "float-quantized", "naive-quantized"


def layout(scheme: Scheme) -> str:
    """The name compressed-tensors has for it: with 8-bit activations, or of weights alone."""
    return FLOAT if scheme.activation_bits else NAIVE


def encode(module: str, weight: Fp8Weight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of one linear layer, by full name. `dtype` is the model's, in which scales are stored."""
    return {f"{module}.weight": weight.codes, f"{module}.weight_scale": cast_exactly(module, weight.scale, dtype)}


def decode(module: str, get: Get, scheme: Scheme) -> Fp8Weight:
    """The weight, also of a file with one scale for the whole matrix.

    Raises:
        CheckpointError: codes of another dtype, or some that are no numbers.
    """
    codes, scale = get(f"{module}.weight"), get(f"{module}.weight_scale")
    if codes.dtype != FP8:
        raise CheckpointError(f"{module}.weight should hold 8-bit floats (e4m3), but is {codes.dtype}")
    if bad := int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum()):
        raise CheckpointError(f"{module}.weight holds {bad} codes that are no numbers (NaN)", "Quantize it again")
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(codes.shape[0], 1)
    return Fp8Weight(codes, scale.reshape(codes.shape[0], 1).contiguous(), scheme)
