"""GPTQ as AutoGPTQ and GPTQModel store it: v1 (zero points minus one) and v2 are read, symmetric v1 is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.base import CONTAINERS, RUNTIME, SGLANG, TRANSFORMERS, VLLM, Container, single
from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.base import Get, StoredTensors, about, cast_exactly, check_activation_order
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.packing import pack_bits, unpack_bits
from compress.common.errors import CheckpointError, SchemeError

WIDTHS = (2, 3, 4, 8)
WORD_BITS = 32
LAYOUTS = V1, V2 = "gptq", "gptq_v2"


def _zero_points(words: Tensor, out_features: int, scheme: Int, layout: str) -> Tensor:
    """Zero points `[G, O]` of packed words. Some writers say v1 and store v2, which shows when codes are symmetric."""
    stored = unpack_bits(words, scheme.bits, out_features, 1)
    if layout == V2 or (scheme.symmetric and bool((stored == scheme.zero).all())):
        return stored
    if scheme.bits == 3:
        # GPTQModel before 7.0 subtracts 1 from fields at the places of other words, which symmetric codes show.
        ones = torch.tensor([_ones(scheme.bits, first) for first in (2, 1, 0)]).repeat(words.shape[1] // 3)
        zero = unpack_bits((words.to(torch.int64) + ones).to(torch.int32), scheme.bits, out_features, 1)
        if scheme.symmetric and bool((zero == scheme.zero).all()):
            return zero
    if WORD_BITS % scheme.bits:
        return (stored.to(torch.int16) + 1).bitwise_and(scheme.max_code).to(torch.uint8)
    # v1 is v2 with 1 subtracted from each field of a word at once, so a field of 0 borrows from the next one.
    return unpack_bits((words.to(torch.int64) + _ones(scheme.bits)).to(torch.int32), scheme.bits, out_features, 1)


def _ones(bits: int, first: int = 0) -> int:
    """A word with a 1 at every field."""
    return sum(1 << place for place in range(first, WORD_BITS, bits))


def _layout(config: Mapping[str, Any]) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or V1).lower()


def _override(config: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    rules: Mapping[str, Mapping[str, Any]] = config.get("dynamic") or {}
    names = (name for name in rules if not name.startswith("-:") and re.match(name.removeprefix("+:"), module))
    return next((rules[name] for name in names), {})


def _parse(fields: Mapping[str, Any]) -> Scheme:
    group_size = int(fields.get("group_size", 128))
    return Int(
        bits=int(fields["bits"]),
        group_size=None if group_size < 0 else group_size,
        symmetric=bool(fields.get("sym", True)),
    )


class Gptq(Container):
    """GPTQ."""

    name = "gptq"
    engines = RUNTIME, TRANSFORMERS, VLLM, SGLANG
    keys = "backend bits checkpoint_format dynamic format group_size lm_head pack_dtype sym"
    stored = ".qweight", ".qzeros", ".scales", ".g_idx"
    mark = ".qweight"

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        """Raises SchemeError when this format cannot hold a weight `[O, I]` of this scheme.

        Other engines run 4 and 8 bits; 2 and 3 bits are defined by the format but few load them.
        """
        scheme.check_plain(self.name, "int")
        out_features, in_features = shape
        scheme.num_groups(in_features)
        if scheme.bits not in WIDTHS:
            raise SchemeError(f"gptq stores 2, 3, 4 or 8 bits, not {scheme.bits}")
        if not scheme.symmetric:
            raise SchemeError(f"{scheme}: v1 zero points of asymmetric codes overflow in other readers")
        if scheme.activations:
            raise SchemeError(f"{scheme}: gptq has no rounded activations")
        if in_features * scheme.bits % 32 or out_features * scheme.bits % 32:
            raise SchemeError(f"{out_features} x {in_features} codes of {scheme.bits} bits do not fill 32-bit words")

    def encode(self, module: str, weight: CodedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
        """Stored tensors of one linear layer, by full name. Scales are float16 whatever the model's dtype."""
        self.check(weight.scheme, weight.shape)
        bits, in_features = weight.scheme.bits, weight.shape[1]
        group_size = weight.scheme.group_size or in_features
        with about(module):
            return {
                f"{module}.qweight": pack_bits(weight.qweight.T, bits, 0),
                f"{module}.qzeros": pack_bits(weight.zero_points.T - 1, bits, 1),
                f"{module}.scales": cast_exactly(weight.scales, torch.float16).T.contiguous(),
                f"{module}.g_idx": (torch.arange(in_features) // group_size).to(torch.int32),
            }

    def decode(self, module: str, get: Get, scheme: Int, config: Mapping[str, Any] | None = None) -> CodedWeight:
        """The integer form of one stored layer; `config` says whether zero points are v1 or v2."""
        qweight = get(f"{module}.qweight")
        in_features, out_features = qweight.shape[0] * 32 // scheme.bits, qweight.shape[1]
        check_activation_order(module, StoredTensors(module, get).optional(".g_idx"), in_features, scheme.group_size)
        codes = unpack_bits(qweight, scheme.bits, in_features, 0).T.contiguous()
        zero = _zero_points(get(f"{module}.qzeros"), out_features, scheme, _layout(config or {})).T.contiguous()
        if scheme.symmetric and not bool((zero == scheme.zero).all()):
            raise CheckpointError(f"{module} claims sym=true, but its zero points are not all {scheme.zero}")
        return scheme.weight(codes, get(f"{module}.scales").T.contiguous(), zero)

    def shape(self, module: str, get: Get, scheme: Scheme) -> tuple[int, int]:
        words, out_features = get(f"{module}.qweight").shape
        return out_features, words * 32 // int(scheme.bits)

    def quantization_config(self, schemes: Mapping[str, Scheme], ignored: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. Raises SchemeError for mixed schemes: this format has one for all."""
        scheme = single(self, schemes.values(), "scheme")
        return {
            "quant_method": self.name,
            "bits": scheme.bits,
            "group_size": -1 if scheme.group_size is None else scheme.group_size,
            "desc_act": False,
            "sym": True,
            "lm_head": "lm_head" in schemes,
            "checkpoint_format": V1,
            "pack_dtype": "int32",
            "true_sequential": True,
            "dynamic": {f"-:^{re.escape(module)}$": {} for module in sorted(ignored) if module != "lm_head"},
        }

    def schemes(self, config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Scheme]:
        """Scheme of every module: the config's, with `dynamic` overrides applied.

        Raises:
            CheckpointError: a layout of other words than those of v1 and v2.
        """
        layout, words = _layout(config), config.get("pack_dtype") or "int32"
        if layout not in LAYOUTS or words != "int32":
            raise CheckpointError(
                f"this GPTQ checkpoint has layout {layout!r} in {words} words; {V1} and {V2} in int32 are read",
                f"Write it again with format {V1} and pack_dtype int32",
            )
        return {module: _parse({**config, **_override(config, module)}) for module in modules}


GPTQ = CONTAINERS.register(order=2)(Gptq())
