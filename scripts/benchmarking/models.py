"""Models of real shapes with random weights, as safetensors and as GGUF, and their compression.

Only speed and size of such models mean anything.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarking.machine import Stopwatch, peak_host_bytes
from calibration.sources import load_texts
from compress.common.cli import demo_model_path
from compress.recipe import CalibrationOptions, Recipe, Stage

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
    """Writes the Python manual, repeated until it has this many tokens of the demo tokenizer."""
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


Q4_BLOCK = 32
Q6_BLOCK, Q6_BYTES = 256, 210
"""llama.cpp keeps the output head of a Q4_0 file in Q6_K: 6.56 bits for each weight."""


def write_gguf(path: Path, shape: Shape, seed: int = 0) -> None:
    """Needs the package `gguf`."""
    import gguf

    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token}>".encode() for token in range(shape.vocabulary)])
    writer.add_token_scores([0.0] * shape.vocabulary)
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocabulary)
    q4, q6 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q6_K
    for name, rows, columns in _gguf_linears(shape):
        writer.add_tensor(name, _q4(rows, columns, random), raw_dtype=q4)
    writer.add_tensor("output.weight", _q6(shape.vocabulary, shape.hidden, random), raw_dtype=q6)
    for name in _gguf_norms(shape):
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_linears(shape: Shape) -> list[tuple[str, int, int]]:
    kv = shape.hidden // shape.heads * shape.kv_heads
    found = [("token_embd.weight", shape.vocabulary, shape.hidden)]
    for layer in range(shape.layers):
        found += [
            (f"blk.{layer}.attn_q.weight", shape.hidden, shape.hidden),
            (f"blk.{layer}.attn_k.weight", kv, shape.hidden),
            (f"blk.{layer}.attn_v.weight", kv, shape.hidden),
            (f"blk.{layer}.attn_output.weight", shape.hidden, shape.hidden),
            (f"blk.{layer}.ffn_gate.weight", shape.intermediate, shape.hidden),
            (f"blk.{layer}.ffn_up.weight", shape.intermediate, shape.hidden),
            (f"blk.{layer}.ffn_down.weight", shape.hidden, shape.intermediate),
        ]
    return found


def _gguf_norms(shape: Shape) -> list[str]:
    layers = [f"blk.{layer}.{kind}_norm.weight" for layer in range(shape.layers) for kind in ("attn", "ffn")]
    return [*layers, "output_norm.weight"]


def _q4(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Blocks of 32: a float16 scale and 16 bytes of nibbles."""
    blocks = random.integers(0, 256, (rows, columns // Q4_BLOCK, 2 + Q4_BLOCK // 2), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(0.005).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _q6(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Blocks of 256: codes, 16 small scales, and a float16 scale at the end."""
    blocks = random.integers(0, 256, (rows, columns // Q6_BLOCK, Q6_BYTES), dtype=np.uint8)
    blocks[..., 192:208] = 16
    blocks[..., 208:] = np.frombuffer(np.float16(0.0001).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


@dataclass(frozen=True)
class Compressed:
    """A finished compression.

    Attributes:
        seconds: of the pipeline, from opening the model to the verified checkpoint.
        cpu_seconds: processor time of the same, all threads together.
        micro_batch: sequences that ran at once.
        dtype: in which the calibration ran.
        bits_per_weight: stored bits per quantized weight: codes, scales, zero points.
        total_bytes: size of the weight files.
        peak_bytes: the most memory this process ever held.
    """

    out: Path
    seconds: float
    cpu_seconds: float
    micro_batch: int
    dtype: str
    bits_per_weight: float
    total_bytes: int
    peak_bytes: int


def compress(
    model: Path, out: Path, stages: Sequence[Stage], calibration: CalibrationOptions, seed: int = 0, **where: str
) -> Compressed:
    """Runs the pipeline that `compress quantize` runs, without its closing measurement of quality.

    Args:
        where: `device` and `dtype` of the calibration.
    """
    from compress.pipeline.prepare import RunRequest, prepare
    from compress.pipeline.run import run

    request = RunRequest(model, str(model), Recipe(tuple(stages), calibration, seed), out, measure=False, **where)
    prepare(request)  # imports what the model needs, which is no part of the work
    started = Stopwatch()
    prepared = prepare(request)
    structure = run(prepared, quiet=True).structure
    seconds, cpu_seconds = started.read()
    dtype = str(prepared.dtype).removeprefix("torch.")
    sizes = structure.bits_per_weight, structure.total_bytes, peak_host_bytes()
    return Compressed(out, seconds, cpu_seconds, prepared.micro_batch, dtype, *sizes)
