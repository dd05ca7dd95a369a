"""A GGUF file of a real shape with random weights in llama.cpp's Q4_0 form: only its speed and size mean anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarking.random_model import Shape

BLOCK = 32
HEAD_BLOCK, HEAD_BYTES = 256, 210
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
    for name, rows, columns in _linears(shape):
        writer.add_tensor(name, _q4(rows, columns, random), raw_dtype=q4)
    writer.add_tensor("output.weight", _q6(shape.vocabulary, shape.hidden, random), raw_dtype=q6)
    for name in _norms(shape):
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _linears(shape: Shape) -> list[tuple[str, int, int]]:
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


def _norms(shape: Shape) -> list[str]:
    layers = [f"blk.{layer}.{kind}_norm.weight" for layer in range(shape.layers) for kind in ("attn", "ffn")]
    return [*layers, "output_norm.weight"]


def _q4(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Blocks of 32: a float16 scale and 16 bytes of nibbles."""
    blocks = random.integers(0, 256, (rows, columns // BLOCK, 2 + BLOCK // 2), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(0.005).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _q6(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Blocks of 256: codes, 16 small scales, and a float16 scale at the end."""
    blocks = random.integers(0, 256, (rows, columns // HEAD_BLOCK, HEAD_BYTES), dtype=np.uint8)
    blocks[..., 192:208] = 16
    blocks[..., 208:] = np.frombuffer(np.float16(0.0001).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)
