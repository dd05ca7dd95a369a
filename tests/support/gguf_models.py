"""Tiny models of Hugging Face as GGUF files, written by the `gguf` package with its names of tensors."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_model
from torch import Tensor

VOCAB = 264
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
WINDOWS = {"query_pre_attn_scalar": 64, "sliding_window": 8, "tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama 3": {"rope_parameters": LLAMA3, "head_dim": 128},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"head_dim": 32},
    "gemma2": {**WINDOWS, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0},
    "gemma3_text": {**WINDOWS, "num_hidden_layers": 7, "final_logit_softcapping": None},
    "phi3": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
            "short_factor": [round(1 + 0.01 * step, 2) for step in range(32)],
            "long_factor": [1 + 0.5 * step for step in range(32)],
        },
    },
}
"""Options by family, and what more its name says."""
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def quick_first(cases: Iterable[str], *quick: str) -> list[Any]:
    """Returns parameters of a test, all except `quick` left to the full tier."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.full) for case in cases]


def save_family(folder: Path, name: str) -> Path:
    """Saves the Hugging Face model of an entry of `FAMILIES`."""
    return save_tiny_model(folder, name.split()[0], **(SIZES | FAMILIES[name]))


def byte_tokens() -> tuple[list[str], list[int], list[str]]:
    """Returns texts and types of 264 tokens, 4 special ones, all bytes and 4 of two letters; and their merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [*map(chr, printable), *(chr(256 + place) for place, _ in enumerate(others))]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    merges = ["t h", "i n", "o n", "th in"]
    return [*special, *letters, *(merge.replace(" ", "") for merge in merges)], [3] * 4 + [1] * 260, merges


def write_gguf(
    model: Any, out: Path, kind_of: Callable[[str], str], tensors_per_part: int = 0, **changes: Any
) -> dict[str, Tensor]:
    """Writes a model of transformers.

    Args:
        kind_of: from names in files to names of types.
        tensors_per_part: splits the model into files numbered after the stem of `out`; 0 writes one file.
        changes: metadata that replace those of the model, by key; None leaves one out.

    Returns:
        the values that the file has, float32 by names of Hugging Face.
    """
    import gguf

    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(out, name, split_max_tensors=tensors_per_part)
    for key, value in (metadata_of(config, name) | tokenizer_metadata() | changes).items():
        add_metadata(writer, key, value)
    tensors = _file_tensors(model, name)
    values = {}
    for own, (published, tensor, change, undo) in tensors.items():
        kind = gguf.GGMLQuantizationType[kind_of(own).upper() if tensor.ndim > 1 else "F32"]
        data = encode(change(tensor.float()).numpy(), kind, gguf)
        writer.add_tensor(own, data, raw_dtype=kind)
        values[published] = undo(torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), dtype=np.float32)))
    for own, factors in _rope_factors(config).items():
        writer.add_tensor(own, factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {published: value.view(model.state_dict()[published].shape) for published, value in values.items()}


def encode(values: np.ndarray, kind: Any, gguf: Any) -> np.ndarray:
    """Rounds as `gguf` does, or takes random bytes with small scales for types that it cannot round to."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        rows, blocks = values.shape[0], values.shape[1] // size
        data = np.random.default_rng(0).integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
        places = {"Q6_K": (208,), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "IQ4_NL": (0,)}
        for place in places[kind.name]:
            data[:, place : place + 2] = np.array([2e-5], dtype=np.float16).view(np.uint8)
        return data.reshape(rows, blocks * nbytes)


def metadata_of(config: Any, name: str) -> dict[str, Any]:
    """Returns the metadata of a model in the types of `gguf`."""
    rope = config.rope_parameters
    theta = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(theta["rope_theta"]),
        "rope.dimension_count": head_dim,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope.scaling.original_context_length": theta.get("original_max_position_embeddings"),
    }
    return {f"{name}.{key}": value for key, value in found.items()}


def tokenizer_metadata() -> dict[str, Any]:
    tokens, types, merges = byte_tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def add_metadata(writer: Any, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if value is not None:
        adders.get(type(value), writer.add_array)(key, value)


Change = Callable[[Tensor], Tensor]


def _file_tensors(model: Any, name: str) -> dict[str, tuple[str, Tensor, Change, Change]]:
    """Returns name, values, and what files do to them and its inverse, of each tensor by its name in files."""
    import gguf

    config = model.config
    architecture = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found = {}
    for published, tensor in model.state_dict().items():
        if published == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(published, try_suffixes=(".weight", ".bias"))
        changes: tuple[Change, Change] = (lambda x: x, lambda x: x)
        if name == "llama" and ("attn_q." in own or "attn_k." in own):
            heads = config.num_attention_heads if "attn_q." in own else config.num_key_value_heads
            changes = _pairs(heads)
        elif name.startswith("gemma") and own.endswith("norm.weight"):
            changes = (lambda x: x + 1, lambda x: x - 1)
        found[own] = (published, tensor, *changes)
    return found


def _pairs(heads: int) -> tuple[Change, Change]:
    """Returns what puts the two channels that rotate together next to each other, one index at a time, and back."""

    def order(rows: int) -> list[int]:
        half = rows // heads // 2
        return [
            head * 2 * half + part * half + pair for head in range(heads) for pair in range(half) for part in (0, 1)
        ]

    def back(x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result[order(len(x))] = x
        return result

    return lambda x: x[order(len(x))], back


def _rope_factors(config: Any) -> dict[str, Tensor]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        lists = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return {own: torch.tensor(rope[key]) for own, key in lists.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return {"rope_freqs.weight": (plain / stretched.double()).float()}
