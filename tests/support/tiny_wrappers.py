"""Tiny random multimodal models with text models of known families."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import GEMMA4_LAYERS, SIZES, VARIANTS
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
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": VARIANTS["gemma3_text"], "vision_config": TOWER, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": VARIANTS["gemma4_text"] | GEMMA4_LAYERS | {"vocab_size_per_layer_input": 8192},
        "vision_config": {**TOWER, "num_key_value_heads": 2, "head_dim": 16},
        "audio_config": None,
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3", **VARIANTS["ministral3"]},
        "vision_config": {"model_type": "pixtral", "head_dim": 16, **TOWER},
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text_config": {"head_dim": 24, "attention_bias": True, "rope_parameters": MROPE},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": SIZES["hidden_size"],
            "patch_size": 14,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
}
"""One multimodal model of every kind, whose text model has all features of its family."""


def save_tiny_wrapper(folder: Path, model_type: str, sizes: dict[str, Any] = SIZES, dtype: Any = torch.float32) -> Path:
    """Random weights as in `save_tiny_model`; the text model has `sizes`."""
    options = WRAPPERS[model_type]
    config = AutoConfig.for_model(model_type, **options | {"text_config": sizes | options["text_config"]})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).to(dtype)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.3 if tensor.dim() == 1 else 0.15)
    model.save_pretrained(folder)
    return folder


def load_wrapper(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own multimodal model."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
