"""Decoders of many families and forms of weights and caches, which launch every kernel between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from compress.checkpoint.weights import (
    Activations,
    BlockFp8,
    Fp8,
    Int,
    Iq4Nl,
    Mxfp4,
    Mxfp8,
    Nf4,
    Nvfp4,
    RotatedInputs,
    Scheme,
)
from compress.checkpoint.weights.forms import Q4K, Q5K

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
"""config.json of Llama-3-8B."""
FEW = {"num_hidden_layers": 2}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16}
"""Enough for the kernels: they differ in nothing for more."""


@dataclass(frozen=True)
class Case:
    """A decoder and how it is served.

    Attributes:
        family: whose configuration in transformers gives the sizes; "" for Llama-3-8B.
        config: what differs from it.
        scheme, head: of the linears and of the output head; None leaves them dense.
        options: of the engine's configuration.
        drafts: tokens are drafted, in chains and trees.
    """

    family: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    scheme: Scheme | None = None
    head: Scheme | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    drafts: bool = False

    def read_config(self, **changes: Any) -> dict[str, Any]:
        """Makes config.json, with `changes`."""
        if not self.family:
            return LLAMA_8B | self.config | changes
        from transformers import AutoConfig

        return AutoConfig.for_model(self.family, **{"dtype": "bfloat16", **self.config, **changes}).to_dict()


INT4, HEAD = Int(4, 128), Int(8, 64)
FORMS = {
    "int4": Case(scheme=INT4, head=HEAD),
    "int8": Case(scheme=Int(8, None), head=HEAD),
    "fp8": Case(scheme=Fp8(Activations.FP8)),
    "16 bits": Case(),
}
"""Llama-3-8B in the forms that most serve."""
SCHEMES = {
    "int4 in float16": Case("", FEW | {"dtype": "float16"}, INT4, HEAD),
    "int4 of 32 with zeros": Case("qwen2", FEW, Int(4, 32, False)),
    "int4 by row": Case("", FEW, Int(4, None), Int(4, 64, False)),
    "3 bits": Case("", FEW, Int(3, 64)),
    "2 bits with zeros": Case("", FEW, Int(2, 64, False)),
    "8 bits of 128 with zeros": Case("", FEW, Int(8, 128, False), Int(8, 32)),
    "int8 inputs": Case("", FEW, Int(8, None, True, Activations.INT8)),
    "rotated inputs": Case("", FEW, RotatedInputs(Int(4, 64), 128)),
    "rotated int8 inputs": Case("", FEW, RotatedInputs(Int(4, 64, True, Activations.INT8), 32)),
    "fp8 weights": Case("", FEW, Fp8()),
    "fp8 blocks": Case("", FEW, BlockFp8()),
    "mxfp8": Case("", FEW, Mxfp8()),
    "nvfp4": Case("", FEW, Nvfp4()),
    "nf4": Case("", FEW, Nf4()),
    "iq4_nl": Case("", FEW, Iq4Nl()),
    "K types": Case("", FEW, Q4K(), Q5K()),
    "mxfp4 in float16": Case("", FEW | {"dtype": "float16"}, Mxfp4()),
    "fp8 in float16": Case("", FEW | {"dtype": "float16"}, Fp8(Activations.FP8), Fp8()),
}
CACHES = {
    f"{name} with {cache} keys and values": Case(family, FEW, INT4, options={"kv_cache": cache})
    for (name, family), cache in product(
        {"llama": "", "qwen3": "qwen3", "gemma": "gemma3_text"}.items(), ("fp8", "int8", "k8v4", "int4")
    )
}
LATENT = FEW | EXPERTS | {"first_k_dense_replace": 1}
ATTENTION = {
    "windows and capped scores": Case("gemma2", FEW, INT4),
    "windows and heads of 256": Case("gemma3_text", FEW, INT4),
    "heads of 512": Case("gemma4_text", {"num_hidden_layers": 6}, INT4),
    "heads of 64": Case("llama", FEW | {"hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 64}, INT4),
    "chunks": Case("llama4_text", FEW | EXPERTS, INT4),
    "sinks as logits": Case("gpt_oss", FEW | EXPERTS, Int(4, 32)),
    "exact first tokens": Case("", FEW, INT4, options={"kv_cache": "int4", "kv_sinks": 4}),
    "streams": Case("", FEW, INT4, options={"attention_window": 1024, "attention_sinks": 4}),
    "drafts": Case("", FEW, INT4, drafts=True),
    "a vocabulary of 49155": Case("granite", FEW | {"vocab_size": 49155, "num_key_value_heads": 8}, INT4),
    **{
        f"latents in {cache}": Case(
            "deepseek_v3", FEW | EXPERTS | {"first_k_dense_replace": 1}, INT4, options={"kv_cache": cache}
        )
        for cache in ("16bit", "fp8", "int8")
    },
}
MIXERS = {
    "mixture": Case("qwen3_moe", FEW | EXPERTS, INT4),
    "dense mixture": Case("mixtral", FEW | {"num_local_experts": 8}),
    "gated delta net": Case("qwen3_5_text", {"num_hidden_layers": 4}, INT4),
    "gated delta net and mixture": Case("qwen3_next", {"num_hidden_layers": 4, "num_experts": 16}, INT4),
    "mamba and attention": Case("falcon_h1", FEW, INT4),
    "mamba or attention": Case("granitemoehybrid", FEW | {"layer_types": ["mamba", "attention"]}, INT4),
    "mamba": Case("mamba2", FEW, INT4),
}
CASES = FORMS | SCHEMES | CACHES | ATTENTION | MIXERS
