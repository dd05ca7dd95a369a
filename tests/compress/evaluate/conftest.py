"""Small models of this folder's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compress.checkpoint.demo import demo_model_path

MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a random Llama of two blocks in float32, with the demo model's tokenizer beside it."""

    def make(name: str = "dense", **options) -> Path:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=8192,
            max_position_embeddings=256,
            **options,
        )
        model = LlamaForCausalLM(config).float()
        # Biases and norms start at 0 and 1; tests should see it when one of them is lost.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.5)
        folder = tmp_path / name
        model.save_pretrained(folder)
        for file in demo_model_path().glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return make
