"""Tiny random models of every family, dense and packed, and transformers in true float64 to compare them with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from family_features import all_features
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedModel

from compress.checkpoint.config import packed_config, read_config, write_config
from compress.checkpoint.formats import find_format, stored_tensors
from compress.checkpoint.meta_model import auto_class
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import BlockFp8, Mxfp4, Scheme, Weight
from compress.checkpoint.weights.block_fp8 import BlockFp8Weight
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from compress.checkpoint.weights.mxfp4 import Mxfp4Weight
from compress.models.registry import known_families

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 112,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MIXED = {
    "num_hidden_layers": 2,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 32,
}
INDEXER = {"index_topk": 7, "index_n_heads": 16, "index_head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
MULTIPLIERS = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "attention_bias": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
KIMI_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 12,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 3,
}
CONV = {
    "num_hidden_layers": 3,
    "block_multiple_of": 32,
    "conv_bias": True,
    "conv_L_cache": 4,
    "head_dim": 24,
    "layer_types": ["conv", "full_attention", "conv"],
}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "attention_bias": True,
    "mamba_proj_bias": True,
    "time_step_limit": [0.01, 0.9],
}
VARIANTS: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": 6},
    "phi3": {
        "sliding_window": 16,
        "original_max_position_embeddings": 48,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.5, 5.0, 9.0],
        },
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 24, "attention_bias": True},
    "apertus": {"head_dim": 24, "attention_bias": True},
    "cohere2": {**MIXED, "attention_bias": True, "logit_scale": 2.0},
    "exaone4": {**MIXED, "head_dim": 24},
    "gemma": {"head_dim": 24},
    "gemma2": {
        **MIXED,
        "head_dim": 24,
        "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**MIXED, "head_dim": 24, "query_pre_attn_scalar": 30, "final_logit_softcapping": 3.0},
    "gemma4_text": {
        "num_hidden_layers": 8,
        "sliding_window": 9,
        "head_dim": 24,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 112,
        "attention_bias": True,
        "final_logit_softcapping": 3.0,
    },
    "granite": {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True},
    "ministral3": {
        "head_dim": 24,
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.2,
        },
    },
    "smollm3": {
        **MIXED,
        "use_sliding_window": True,
        "no_rope_layers": [1, 0],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "ernie4_5_moe": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 24,
        "use_bias": True,
        "moe_layer_interval": 2,
        "moe_layer_end_index": 2,
        "moe_norm_min": 0.9,
    },
    "phimoe": {
        **EXPERTS,
        "num_local_experts": 8,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 9,
        "router_jitter_noise": 0.3,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + i / 9 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)],
            "short_mscale": 1.2,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 128,
        },
    },
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 24,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        **MIXED,
        **EXPERTS,
        "num_local_experts": 8,
        "head_dim": 24,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.4,
    },
    "granitemoe": {**EXPERTS, **MULTIPLIERS, "num_local_experts": 8, "attention_bias": True},
    "falcon_h1": {
        **{name: value for name, value in MAMBA.items() if name != "layer_types"},
        "num_hidden_layers": 2,
        "mamba_d_ssm": 96,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "projectors_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "mlp_multipliers": [0.7, 0.6],
        "key_multiplier": 0.8,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.75,
    },
    "granitemoehybrid": {
        **EXPERTS,
        **MULTIPLIERS,
        **MAMBA,
        "num_local_experts": 8,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
    },
    "llama4_text": {
        **EXPERTS,
        "num_local_experts": 8,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 9,
        "floor_scale": 8,
        "attn_scale": 0.3,
        "attention_bias": True,
        "head_dim": 24,
    },
    "minimax": {
        **EXPERTS,
        "num_local_experts": 8,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "head_dim": 24,
        "block_size": 16,
        "full_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.7,
        "linear_attn_alpha_factor": 1.2,
        "linear_attn_beta_factor": 0.9,
        "mlp_alpha_factor": 0.8,
        "mlp_beta_factor": 1.1,
    },
    "minimax_m2": {
        **EXPERTS,
        "num_local_experts": 8,
        "head_dim": 24,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "deepseek_v2": {
        **EXPERTS,
        **LATENT,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deepseek_v3": {
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v32": {
        **EXPERTS,
        **LATENT,
        **INDEXER,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "glm_moe_dsa": {
        **EXPERTS,
        **LATENT,
        **INDEXER,
        "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "indexer_types": ["full", "shared", "full"],
        "attention_bias": True,
    },
    "glm4_moe_lite": {
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
    },
    "jamba": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
        "mamba_d_state": 12,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 6,
        "mamba_proj_bias": True,
    },
    "kimi_linear": {
        **EXPERTS,
        **LATENT,
        **KIMI_DELTA,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
    },
    "minicpm3": {**LATENT, "scale_emb": 3, "dim_model_base": 32, "attention_bias": True, "mlp_bias": True},
    "mistral4": {
        **EXPERTS,
        **LATENT,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9, "llama_4_scaling_beta": 0.2},
    },
    "youtu": {**LATENT, "attention_bias": True},
    "nemotron_h": {
        **EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 48,
        "mlp_bias": True,
        "use_bias": True,
        "head_dim": 24,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 12,
        "conv_kernel": 3,
        "time_step_min": 0.4,
    },
    "mamba2": {
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 12,
        "conv_kernel": 3,
        "use_bias": True,
        "time_step_limit": [0.01, 0.9],
    },
    "lfm2": CONV,
    "lfm2_moe": {**CONV, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 2.5},
    "mixtral": {**EXPERTS, "num_local_experts": 8, "sliding_window": 9},
    "olmoe": {**EXPERTS, "attention_bias": True},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "head_dim": 24, "norm_topk_prob": True, "attention_bias": True},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
}
VARIANTS |= {family: all_features(family) for family in known_families() if family not in VARIANTS}
"""One model of every family with all of its features."""
STACKED = {"gpt_oss", "granitemoe", "granitemoehybrid", "llama4_text", "mistral4"}
"""Mixtures whose experts are stored as one tensor."""
DECAYS = ("slope_rate", "_decay")
"""Ends of the names of tables that follow from config.json."""
PADDED = {"youtu"}
"""Families whose row of the pad token transformers fills with zeros at load."""
GEMMA4_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
}
"""One layer of each kind of a Gemma 4."""
GEMMA4_EXPERTS = {
    **GEMMA4_LAYERS,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
"""Options of a Gemma 4 with a mixture beside each MLP."""
MIXTURES = {family for family, options in VARIANTS.items() if EXPERTS.items() <= options.items()}


def save_tiny_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **options: object) -> Path:
    """Random weights, with norms and biases that are seen when they are lost."""
    config = AutoConfig.for_model(family, **(SIZES | options))
    torch.manual_seed(0)
    model = auto_class(family).from_config(config).to(dtype)
    for name, tensor in model.state_dict().items():
        if name.endswith(DECAYS):
            continue
        nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.3 if tensor.dim() == 1 else 0.15)
    if family in PADDED:
        model.get_input_embeddings().weight.data[config.pad_token_id] = 0
    model.save_pretrained(folder)
    return folder


class StayInFloat64(TorchFunctionMode):
    """Computes in float64 what models round to float32 whatever their dtype, such as norms."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.polar:
            # Its float32 sines and cosines have other last bits than those of two functions.
            length, angle = args
            return torch.complex(length * angle.cos(), length * angle.sin())
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if function is Tensor.float:
                return args[0]
            args = tuple(map(_kept, args))
            kwargs = {name: _kept(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _kept(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def load_reference(folder: Path, dtype: torch.dtype = torch.float64, *, exact: bool = True) -> PreTrainedModel:
    """transformers' own model.

    Args:
        exact: a float64 model computes everything in float64.
    """
    # Grouped products of experts are 16-bit only.
    family = read_config(folder)["model_type"]
    model = auto_class(family).from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    return compute_in_float64(model) if exact and dtype is torch.float64 else model


def compute_in_float64(model: Any) -> Any:
    """Makes a module of transformers, and the norms in it, compute everything in float64."""
    compute_decays(model)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.double()
        if module is model or type(module).__name__.endswith("Norm"):
            module.forward = _in_float64(module.forward)
    return model


def compute_decays(model: Any) -> None:
    """Replaces tables of decays that were rounded to float32."""
    for module in model.modules():
        if hasattr(module, "decay_factors"):
            torch.set_default_dtype(torch.float64)
            module.slope_rate = module.get_slope_rate()
            torch.set_default_dtype(torch.float32)
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)


def _in_float64(compute: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with StayInFloat64():
            return compute(*args, **kwargs)

    return forward


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False).logits


def random_weight(shape: tuple[int, int], scheme: Scheme, seed: int = 0, dtype=torch.bfloat16) -> Weight:
    """Every code value, scales of both signs, zero points that fit the scheme."""
    generator = torch.Generator().manual_seed(seed)
    if "float" in scheme.numbers:
        return _random_floats(shape, scheme, generator, dtype)
    groups = (shape[0], scheme.num_groups(shape[1]))
    codes = torch.randint(0, scheme.max_code + 1, shape, generator=generator).to(torch.uint8)
    zero = torch.full(groups, scheme.midpoint, dtype=torch.uint8)
    if not scheme.symmetric:
        zero = torch.randint(0, scheme.max_code + 1, groups, generator=generator).to(torch.uint8)
    sign = torch.randint(0, 2, groups, generator=generator) * 2 - 1
    scale = (torch.rand(groups, generator=generator) + 0.2) * sign * 0.5 / scheme.max_code
    return IntegerWeight(codes, scale.to(dtype), zero, scheme)


def _random_floats(shape: tuple[int, int], scheme: Scheme, generator: torch.Generator, dtype) -> Weight:
    """All 254 numbers (16 of 4 bits), both zeros and the smallest among them."""
    if isinstance(scheme, Mxfp4):
        codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
        exponents = (shape[0], scheme.num_groups(shape[1]))
        return Mxfp4Weight(codes, torch.randint(120, 126, exponents, dtype=torch.uint8, generator=generator), scheme)
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    codes = numbers[torch.randint(0, len(numbers), shape, generator=generator)].view(FP8)
    if isinstance(scheme, BlockFp8):
        blocks = scheme.num_scales(*shape)
        return BlockFp8Weight.of(codes, (torch.rand(blocks, generator=generator) + 0.2) * 1e-3, scheme)
    scale = (torch.rand(shape[0], 1, generator=generator) + 0.2) * 1e-3
    return Fp8Weight(codes, scale.to(dtype), scheme)


def pack_model(
    dense: Path,
    out: Path,
    scheme: Callable[[str], Scheme | None],
    format: str = "compressed-tensors",
    scale_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Weight]:
    """Copies `dense` with random codes in place of the chosen linears; gives the packed weights."""
    codec = find_format(format)
    files = PackedCheckpoint.open(dense).files
    tensors = {name: files.tensor(name) for name in files}
    weights = {}
    for name in filter(_is_packed, list(tensors)):
        module = name.removesuffix(".weight")
        chosen = scheme(module)
        if chosen is not None:
            weights[module] = random_weight(tuple(tensors.pop(name).shape), chosen, len(weights), scale_dtype)
            tensors |= stored_tensors(codec, module, weights[module], scale_dtype)
    ignored = sorted({"lm_head", *(n.removesuffix(".weight") for n in tensors if _is_packed(n))})
    block = codec.quantization_config({module: weight.scheme for module, weight in weights.items()}, ignored)
    out.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    write_config(out, packed_config(read_config(dense), block, weights))
    return weights


def _is_packed(name: str) -> bool:
    return name.endswith(("_proj.weight", ".wq_b.weight", ".wk.weight")) and "indexer.weights_proj" not in name


def put_weights(model: PreTrainedModel, weights: dict[str, Weight]) -> PreTrainedModel:
    """Puts dequantized weights into transformers' model."""
    for module, weight in weights.items():
        model.get_submodule(module).weight.data = weight.dequantize(torch.float64).to(model.dtype)
    return model


def put_checkpoint(model: PreTrainedModel, checkpoint: PackedCheckpoint) -> PreTrainedModel:
    """Puts all that a checkpoint stores into transformers' model, dequantized."""
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        is_packed = module in checkpoint.schemes
        stored = checkpoint.weight(module).dequantize(torch.float64) if is_packed else checkpoint.tensor(name)
        parameter.data = stored.to(parameter.dtype)
    return model
