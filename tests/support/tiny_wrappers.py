"""Tiny random multimodal models with text models of known families."""

from pathlib import Path
from typing import Any

import torch
from tiny_configs import EXPERTS, GEMMA4_LAYERS, SIZES, VARIANTS
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 3, 3], "mrope_interleaved": True}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "patch_size": 14,
    "num_position_embeddings": 16,
}
GLM_TOWER = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
    **{"out_hidden_size": SIZES["hidden_size"], "patch_size": 14, "image_size": 28},
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32, **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
WRAPPERS: dict[str, dict[str, Any]] = {
    # transformers leaves the scale of logits out.
    "aya_vision": {
        "text_config": {"model_type": "cohere2", **VARIANTS["cohere2"], "logit_scale": 1.0},
        "vision_config": SIGLIP,
        "alignment_intermediate_size": 64,
    },
    "gemma3": {"text_config": VARIANTS["gemma3_text"], "vision_config": TOWER, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": VARIANTS["gemma4_text"] | GEMMA4_LAYERS,
        "vision_config": TOWER | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": None,
    },
    "glm4v": {
        "text_config": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        "vision_config": GLM_TOWER,
    },
    "glm4v_moe": {
        "text_config": {
            **{**EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
            **{"first_k_dense_replace": 1, "head_dim": 24},
            "rope_parameters": SECTIONS | {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
        },
        "vision_config": GLM_TOWER,
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", **VARIANTS["qwen3"]},
        "vision_config": TOWER | {"image_size": [28, 28], "patch_size": [14, 14]},
    },
    "kimi_k25": {
        "text_config": VARIANTS["deepseek_v3"],
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "pos_emb_time": 2,
        },
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": VARIANTS["llama4_text"],
        "vision_config": TOWER
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5},
    },
    "llava": {"text_config": {"model_type": "llama", **VARIANTS["llama"]}, "vision_config": CLIP},
    "llava_next": {
        "text_config": {"model_type": "mistral", **VARIANTS["mistral"]},
        "vision_config": CLIP,
        "image_grid_pinpoints": [[28, 56]],
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **VARIANTS["qwen2"]},
        "vision_config": SIGLIP,
        "image_grid_pinpoints": [[28, 56]],
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3", **VARIANTS["ministral3"]},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **TOWER},
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"text_config": VARIANTS["qwen3_5_text"], "vision_config": QWEN_TOWER},
    "qwen3_5_moe": {"text_config": VARIANTS["qwen3_5_moe_text"], "vision_config": QWEN_TOWER},
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": SECTIONS},
        "vision_config": {
            **{"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14},
            **{"out_hidden_size": SIZES["hidden_size"], "fullatt_block_indexes": [0]},
        },
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": SECTIONS},
        "vision_config": {
            **{"depth": 1, "embed_dim": 32, "hidden_size": SIZES["hidden_size"], "num_heads": 2},
            **{"patch_size": 14, "mlp_ratio": 2},
        },
    },
    "qwen3_vl_moe": {
        "text_config": {**EXPERTS, "head_dim": 24, "attention_bias": True, "rope_parameters": MROPE},
        "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_vl": {
        "text_config": {"head_dim": 24, "attention_bias": True, "rope_parameters": MROPE},
        "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    },
}
"""One multimodal model of every kind, whose text model has all features of its family."""


def save_tiny_wrapper(
    folder: Path, model_type: str, dtype: Any = torch.float32, vocab_size: int = 112, **changed: Any
) -> Path:
    """Random weights as in `save_tiny_model`; `changed` are fields of the text model."""
    options = WRAPPERS[model_type]
    text = SIZES | options["text_config"] | {"vocab_size": vocab_size} | changed
    text |= {key: vocab_size for key in text if key == "vocab_size_per_layer_input"}
    config = AutoConfig.for_model(model_type, **options | {"text_config": text})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).to(dtype)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.3 if tensor.dim() == 1 else 0.15)
    model.save_pretrained(folder)
    return folder


def load_wrapper(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own multimodal model."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    if model.config.model_type == "llama4":
        model.language_model.register_forward_hook(_name_no_images)
    return model.eval()


def _name_no_images(model: nn.Module, inputs: Any, output: Any) -> None:
    """Gives an output of Llama 4's text model a field that transformers 5.24 reads and does not set."""
    output.image_outputs = None
