"""Models of real shapes with random weights, written block by block: only their speed and size mean anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from calibration.sources import load_texts
from compress.common.cli import demo_model_path

WEIGHT_SPREAD = 0.02
CHARACTERS_PER_TOKEN = 5


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama model, or of a Qwen3, which also has norms of heads."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    family: str = "llama"


SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 2, 8192),
    "125m": Shape(768, 2048, 12, 12, 4, 32000),
    "1.1b": Shape(2048, 5632, 22, 32, 4, 32000),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "14b": Shape(5120, 17408, 40, 40, 8, 151936, "qwen3"),
}


def write_model(folder: Path, shape: Shape, seed: int = 0, device: str = "cpu") -> int:
    """Writes config, tokenizer (the demo model's) and bfloat16 weights, one shard for each block. A GPU makes random
    numbers a hundred times faster, and others.

    Returns the number of weights.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator(device).manual_seed(seed)
    pieces = [_outside(shape, generator), *(_block(shape, index, generator) for index in range(shape.layers))]
    names: dict[str, str] = {}
    parameters = 0
    for number, piece in enumerate(pieces, 1):
        file = f"model-{number:05d}-of-{shape.layers + 1:05d}.safetensors"
        tensors = dict(piece)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
        parameters += sum(tensor.numel() for tensor in tensors.values())
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2))
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, folder)
    return parameters


def write_calibration(path: Path, tokens: int) -> None:
    """Enough text for so many tokens of the demo tokenizer: the Python manual, over and over."""
    documents = load_texts("pydoc").documents
    repeats = 1 + tokens * CHARACTERS_PER_TOKEN // sum(map(len, documents))
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(repeats):
            stream.writelines(json.dumps({"text": document}) + "\n" for document in documents)


def config_of(shape: Shape) -> dict:
    """As config.json holds it."""
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.family == "qwen3" else "LlamaForCausalLM"],
        "model_type": shape.family,
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _outside(shape: Shape, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", _random(shape.vocabulary, shape.hidden, generator)
    yield "lm_head.weight", _random(shape.vocabulary, shape.hidden, generator)
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=torch.bfloat16)


def _block(shape: Shape, index: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    for name, (rows, columns) in linears.items():
        yield f"model.layers.{index}.{name}.weight", _random(rows, columns, generator)
    if shape.family == "qwen3":
        for name in ("q_norm", "k_norm"):
            norm = torch.ones(hidden // shape.heads, dtype=torch.bfloat16)
            yield f"model.layers.{index}.self_attn.{name}.weight", norm
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.{index}.{name}.weight", torch.ones(hidden, dtype=torch.bfloat16)


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(rows, columns, generator=generator, device=generator.device)
    return values.mul_(WEIGHT_SPREAD).bfloat16().cpu()
