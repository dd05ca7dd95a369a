"""Small models of this folder's tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from compress.checkpoint.config import packed_config, read_config, write_config
from compress.checkpoint.formats import compressed_tensors, stored_tensors
from compress.checkpoint.weights import Int, Scheme
from compress.common.cli import demo_model_path

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


@pytest.fixture
def make_packed(make_model: MakeModel, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Rounds the blocks of a random model to nearest: `(packed, the same weights dequantized)`."""

    def make(scheme: Scheme = Int(4, 32), provenance: dict | None = None, **options) -> tuple[Path, Path]:
        dense = make_model("source", **options)
        tensors = load_file(dense / "model.safetensors")
        packed, dequantized, modules = {}, {}, []
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if not name.endswith("_proj.weight"):
                packed[name] = dequantized[name] = tensor
                continue
            modules.append(module)
            weight = scheme.round(tensor, scale_dtype=torch.float32)
            packed |= stored_tensors(compressed_tensors, module, weight, torch.float32)
            dequantized[name] = weight.dequantize()
        quantization = compressed_tensors.quantization_config(dict.fromkeys(modules, scheme), ["lm_head"])
        config = read_config(dense)
        _write(tmp_path / "packed", dense, packed, packed_config(config, quantization, modules, provenance or {}))
        _write(tmp_path / "dequantized", dense, dequantized, config)
        return tmp_path / "packed", tmp_path / "dequantized"

    return make


def _write(folder: Path, like: Path, tensors: dict[str, torch.Tensor], config: dict) -> None:
    shutil.copytree(like, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, config)
