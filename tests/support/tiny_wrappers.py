"""Tiny random multimodal models with text models of known families."""

from pathlib import Path
from typing import Any

import torch
from folders import change_tensors
from tiny_configs import GEMMA4_LAYERS, SIZES, VARIANTS
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
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": VARIANTS["gemma3_text"], "vision_config": TOWER, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": VARIANTS["gemma4_text"] | GEMMA4_LAYERS,
        "vision_config": TOWER | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": None,
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
    "mistral3": {
        "text_config": {"model_type": "ministral3", **VARIANTS["ministral3"]},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **TOWER},
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"text_config": VARIANTS["qwen3_5_text"], "vision_config": QWEN_TOWER},
    "qwen3_5_moe": {"text_config": VARIANTS["qwen3_5_moe_text"], "vision_config": QWEN_TOWER},
    "qwen3_vl": {
        "text_config": {"head_dim": 24, "attention_bias": True, "rope_parameters": MROPE},
        "vision_config": QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    },
}
"""One multimodal model of every kind, whose text model has all features of its family."""


def save_tiny_wrapper(folder: Path, model_type: str, dtype: Any = torch.float32, vocab_size: int = 112) -> Path:
    """Random weights as in `save_tiny_model`."""
    options = WRAPPERS[model_type]
    text = SIZES | options["text_config"] | {"vocab_size": vocab_size}
    text |= {key: vocab_size for key in text if key == "vocab_size_per_layer_input"}
    config = AutoConfig.for_model(model_type, **options | {"text_config": text})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).to(dtype)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.3 if tensor.dim() == 1 else 0.15)
    model.save_pretrained(folder)
    change_tensors(folder, _name_as_published)
    return folder


def _name_as_published(tensors: dict[str, torch.Tensor]) -> None:
    """Takes back what transformers renames in the text model of Kimi-K2.5 together with its vision tower."""
    for name in list(tensors):
        tensors[name.replace("language_model.model.blocks.", "language_model.model.layers.")] = tensors.pop(name)


def load_wrapper(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own multimodal model."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    if model.config.model_type == "llama4":
        model.language_model.register_forward_hook(_name_no_images)
    return model.eval()


def _name_no_images(model: nn.Module, inputs: Any, output: Any) -> None:
    """Gives an output of Llama 4's text model a field that transformers 5.24 reads and does not set."""
    output.image_outputs = None
