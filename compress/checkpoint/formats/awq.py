"""AutoAWQ's GEMM layout: 4 bits, eight outputs per word in an interleaved order, explicit zero points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, SGLANG, TRANSFORMERS, VLLM, Container, single
from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.base import Get, about, cast_exactly
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.packing import pack_bits, unpack_bits
from compress.common.errors import CheckpointError, SchemeError

BITS = 4
GEMM = "gemm"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble `k` of an AWQ word holds output `8 j + AWQ_ORDER[k]`."""


def interleave_awq(codes: Tensor) -> Tensor:
    """Reorders outputs `[.., O]` (`O` a multiple of 8) so that plain packing gives AWQ's nibble order."""
    return codes.view(*codes.shape[:-1], -1, 8)[..., list(AWQ_ORDER)].reshape(codes.shape)


def deinterleave_awq(codes: Tensor) -> Tensor:
    """The inverse of `interleave_awq`."""
    inverse = [AWQ_ORDER.index(position) for position in range(8)]
    return codes.view(*codes.shape[:-1], -1, 8)[..., inverse].reshape(codes.shape)


class Awq(Container):
    """AWQ in layout GEMM."""

    name = "awq"
    engines = RUNTIME, TRANSFORMERS, VLLM, SGLANG
    keys = "backend bits checkpoint_format format group_size pack_dtype q_group_size sym w_bit zero_point"
    stored = ".qweight", ".qzeros", ".scales"
    mark = ".qweight"

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        scheme.check_plain(self.name, "int")
        scheme.num_groups(shape[1])
        if scheme.bits != BITS or scheme.activations:
            raise SchemeError(f"awq stores 4-bit weights with 16-bit activations, not {scheme}")
        if shape[0] % 8:
            raise SchemeError(f"awq packs 8 outputs per word, and {shape[0]} is not a multiple of 8")

    def encode(self, module: str, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stored tensors of one linear layer, by full name. Scales are float16 whatever the model's dtype."""
        self.check(weight.scheme, weight.shape)
        with about(module):
            return {
                f"{module}.qweight": pack_bits(interleave_awq(weight.qweight.T.contiguous()), BITS, 1),
                f"{module}.qzeros": pack_bits(interleave_awq(weight.zero_points.T.contiguous()), BITS, 1),
                f"{module}.scales": cast_exactly(weight.scales, torch.float16).T.contiguous(),
            }

    def decode(self, module: str, get: Get, scheme: Int, config: Mapping[str, Any] | None = None) -> CodedWeight:
        """The integer form of one stored layer."""
        qweight, qzeros = get(f"{module}.qweight"), get(f"{module}.qzeros")
        out_features = qweight.shape[1] * 8
        codes, zero = (deinterleave_awq(unpack_bits(words, BITS, out_features, 1)) for words in (qweight, qzeros))
        scale = get(f"{module}.scales").T.contiguous()
        return scheme.weight(codes.T.contiguous(), scale, zero.T.contiguous())

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        in_features, words = get(f"{module}.qweight").shape
        return words * 8, in_features

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. Symmetric codes are written with explicit zero points of 8, which every
        reader takes. Raises SchemeError for mixed group sizes: this format has one for all."""
        group_size = single(self, (scheme.group_size for scheme in schemes.values()), "group size")
        return {
            "quant_method": self.name,
            "bits": BITS,
            "group_size": -1 if group_size is None else group_size,
            "zero_point": True,
            "version": GEMM,
            "modules_to_not_convert": sorted(ignored) or None,
        }

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module: the same for all. Zero points are stored either way, so codes read as asymmetric.

        Raises:
            CheckpointError: another width or layout than 4-bit GEMM.
        """
        named = (config.get(key) for key in ("version", "checkpoint_format", "format"))
        version, bits = str(next(filter(None, named), GEMM)).lower(), int(config.get("bits", config.get("w_bit", BITS)))
        if version != GEMM or bits != BITS:
            raise CheckpointError(
                f"this AWQ checkpoint has layout {version!r} with {bits} bits; only 4-bit gemm is read",
                "Write it again with version gemm",
            )
        group_size = int(config.get("group_size", config.get("q_group_size", 128)))
        scheme = Int(BITS, None if group_size < 0 else group_size, symmetric=False)
        return dict[str, Scheme].fromkeys(modules, scheme)


AWQ = CONTAINERS.register(order=3)(Awq())
