"""Models of real shapes with random weights, as safetensors and as GGUF, and their compression.

Only speed and size of such models mean anything.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarking.cpu.kernels import random_weight
from benchmarking.machine import Stopwatch, peak_device_bytes, peak_host_bytes
from calibration.sources import load_texts
from compress.checkpoint.config import HEAD
from compress.checkpoint.weights import Scheme
from compress.common.cli import demo_model_path
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.base import Stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CHARACTERS_PER_TOKEN = 5


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama model, of a Qwen3, which also has norms of heads, of its mixtures, or of a Qwen3.5.

    Attributes:
        experts, chosen: of every layer, each expert `intermediate` wide; 0 for an MLP.
        delta_heads: of the gated delta nets that three of four layers are, `DELTA_DIM` wide; 0 for attention only.
        head_size: dimensions of a head; 0: the heads share `hidden`.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    family: str = "llama"
    experts: int = 0
    chosen: int = 0
    delta_heads: int = 0
    head_size: int = 0

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden // self.heads

    def is_delta(self, layer: int) -> bool:
        """Whether a layer is a gated delta net."""
        return self.delta_heads > 0 and (layer + 1) % DELTA_INTERVAL > 0


DELTA_DIM, DELTA_TAPS, DELTA_INTERVAL = 128, 4, 4
"""Channels of a head of a gated delta net, tokens that its convolution sees, and how often a layer has attention."""
SHAPES = {
    "tiny": Shape(128, 256, 2, 4, 2, 8192),
    "125m": Shape(768, 2048, 12, 12, 4, 32000),
    "1.1b": Shape(2048, 5632, 22, 32, 4, 32000),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "8b-8k": Shape(4096, 14336, 32, 32, 8, 8192),  # tokens that the tokenizer has a text for
    "14b": Shape(5120, 17408, 40, 40, 8, 151936, "qwen3"),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "1b-hybrid": Shape(2048, 6144, 16, 8, 2, 32000, "qwen3_5_text", delta_heads=16),
    "9b-hybrid": Shape(4096, 12288, 32, 16, 4, 151936, "qwen3_5_text", delta_heads=32),
    "2b-a400m": Shape(1024, 512, 20, 16, 4, 32000, "qwen3_moe", experts=64, chosen=10),
    "30b-a3b": Shape(2048, 768, 48, 32, 4, 151936, "qwen3_moe", experts=128, chosen=8, head_size=128),
    "tiny-hybrid": Shape(256, 512, 4, 4, 2, 8192, "qwen3_5_text", delta_heads=2),
    "tiny-mixture": Shape(128, 128, 2, 4, 2, 8192, "qwen3_moe", experts=4, chosen=2),
}


def write_model(folder: Path, shape: Shape, seed: int = 0, device: str = "cpu") -> int:
    """Writes config, tokenizer (the demo model's) and bfloat16 weights. A GPU makes random numbers a hundred times
    faster, and others.

    Returns the number of weights.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")
    _copy_tokenizer(folder)
    return model.num_parameters()


def write_packed_model(
    folder: Path, shape: Shape, scheme: Scheme | None, head: Scheme | None = None, device: str = "cpu"
) -> None:
    """Writes a model whose linears have random codes of a scheme, and its output head of another; None: in bfloat16.

    All layers and experts have the same tensors, which are made once: so a large model is there in seconds.
    """
    from compress.checkpoint.config import packed_config, write_config
    from compress.checkpoint.formats import format_for

    config = config_of(shape)
    named = _modules(config)
    schemes = {name: head if name == HEAD else scheme for name, size in named.items() if _is_linear(name, size)}
    packed = {name: found for name, found in schemes.items() if found is not None}
    folder.mkdir(parents=True)
    shards = _write_shards(folder, named, packed, device)
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    ignored = sorted(set(schemes) - set(packed))
    quantization = format_for(packed).quantization_config(packed, ignored) if packed else {}
    write_config(folder, packed_config({**config.to_dict(), "dtype": "bfloat16"}, quantization, packed))
    _copy_tokenizer(folder)


def write_headers(folder: Path, shape: Shape) -> None:
    """Writes a model for plans: config, tokenizer, and a file whose bfloat16 numbers are a hole that takes no space."""
    config = config_of(shape)
    config.save_pretrained(folder)
    _copy_tokenizer(folder)
    header: dict[str, Any] = {}
    end = 0
    for name, size in _modules(config).items():
        begin, end = end, end + 2 * math.prod(size)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(stream.tell() + end)


def _modules(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model by name, without `.weight`; of experts one by one."""
    found: dict[str, tuple[int, ...]] = {}
    for name, size in _parameters(config).items():
        experts, _, kind = name.rpartition(".experts.")
        for expert in range(size[0] if experts else 0):
            rows, columns = size[1:]
            halves = {"gate_proj": rows // 2, "up_proj": rows // 2} if kind == "gate_up_proj" else {kind: rows}
            found |= {f"{experts}.experts.{expert}.{half}": (count, columns) for half, count in halves.items()}
        if not experts:
            found[name.removesuffix(".weight")] = size
    return found


def _parameters(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model by name."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


LINEAR = re.compile(r"_proj(_qkv|_z)?$")
UNNAMED = ("A_log", "dt_bias")
"""Parameters whose names do not end in `.weight`."""


def _is_linear(name: str, size: tuple[int, ...]) -> bool:
    return len(size) == 2 and (name == HEAD or LINEAR.search(name) is not None)


def _write_shards(
    folder: Path, named: Mapping[str, tuple[int, ...]], packed: Mapping[str, Scheme], device: str
) -> dict[str, str]:
    """Writes one file for each layer and one for the rest, and returns the file of each tensor."""
    files: dict[str, str] = {}
    layers: dict[str, list[str]] = defaultdict(list)
    for name in named:
        layers[".".join(name.split(".")[:3]) if ".layers." in name else "rest"].append(name)
    made: dict[tuple[str, tuple[int, ...]], dict[str, Tensor]] = {}
    for layer, names in layers.items():
        tensors, file = {}, f"model-{layer.rpartition('.')[2]}.safetensors"
        for name in names:
            own = re.sub(r"\.experts\.\d+", "", name.removeprefix(f"{layer}."))
            if (own, named[name]) not in made:
                made[own, named[name]] = _random_tensors(named[name], packed.get(name), packed, device)
            for suffix, tensor in made[own, named[name]].items():
                tensors[name + suffix * (not name.endswith(UNNAMED))] = tensor.clone()
        save_file(tensors, folder / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    return files


def _random_tensors(
    size: tuple[int, ...], scheme: Scheme | None, packed: Mapping[str, Scheme], device: str
) -> dict[str, Tensor]:
    """Stored tensors of one parameter in the memory of the host, by suffix."""
    from compress.checkpoint.formats import format_for

    if scheme is None:
        numbers = torch.ones(size) if len(size) == 1 else torch.randn(size, device=device) * 0.02
        return {".weight": numbers.bfloat16().cpu()}
    weight = random_weight(*size, scheme, torch.device(device))
    weight.scales.mul_(16 / 2**scheme.bits)
    found = format_for(packed).encode("", weight, torch.bfloat16)
    return {suffix: tensor.cpu().contiguous() for suffix, tensor in found.items()}


def _copy_tokenizer(folder: Path) -> None:
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, folder)


def write_calibration(path: Path, tokens: int) -> None:
    """Writes the Python manual, repeated until it has this many tokens of the demo tokenizer."""
    documents = load_texts("pydoc").documents
    repeats = 1 + tokens * CHARACTERS_PER_TOKEN // sum(map(len, documents))
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(repeats):
            stream.writelines(json.dumps({"text": document}) + "\n" for document in documents)


def config_of(shape: Shape, **changed: int) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape.family,
        **{
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "bos_token_id": None,
            "eos_token_id": None,
            **_mixture(shape),
            **_delta_nets(shape),
            **changed,
        },
    )


def _mixture(shape: Shape) -> dict[str, object]:
    sizes = {"num_experts": shape.experts, "num_experts_per_tok": shape.chosen}
    return {**sizes, "moe_intermediate_size": shape.intermediate, "norm_topk_prob": True} if shape.experts else {}


def _delta_nets(shape: Shape) -> dict[str, object]:
    if not shape.delta_heads:
        return {}
    kinds = ["linear_attention" if shape.is_delta(layer) else "full_attention" for layer in range(shape.layers)]
    heads = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), shape.delta_heads)
    sizes = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), DELTA_DIM)
    return {"layer_types": kinds, "linear_conv_kernel_dim": DELTA_TAPS, **heads, **sizes}


Q4_BLOCK = 32
Q6_BLOCK, Q6_BYTES = 256, 210
"""llama.cpp keeps the output head of a Q4_0 file in Q6_K: 6.56 bits for each weight."""


def write_gguf(path: Path, shape: Shape, seed: int = 0) -> None:
    """Writes random 4-bit weights, with head and routers as llama.cpp keeps them. Needs the package `gguf`, which
    knows the names of tensors."""
    import gguf

    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES[shape.family])
    for name, value in _gguf_facts(shape).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_token_types([gguf.TokenType.NORMAL] * shape.vocabulary)
    q4, q6 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q6_K
    for name, size in _gguf_tensors(shape):
        if len(size) == 1:
            writer.add_tensor(name, np.full(size, 1 if "norm" in name else -1, np.float32))
        elif name == "output.weight":
            writer.add_tensor(name, _q6(*size, random), raw_dtype=q6)
        elif "ffn_gate_inp" in name or "conv1d" in name:
            writer.add_tensor(name, random.normal(0, 0.02, size).astype(np.float32))
        else:
            writer.add_tensor(name, _q4(size, random), raw_dtype=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}


def _gguf_facts(shape: Shape) -> dict[str, object]:
    """Metadata by what follows `add_` in the names of the writer's methods."""
    experts = {
        "expert_count": shape.experts,
        "expert_used_count": shape.chosen,
        "expert_feed_forward_length": shape.intermediate,
    }
    return {
        "context_length": 8192,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.intermediate,
        "head_count": shape.heads,
        "head_count_kv": shape.kv_heads,
        "key_length": shape.head_dim,
        "value_length": shape.head_dim,
        "layer_norm_rms_eps": 1e-5,
        "rope_dimension_count": shape.head_dim,
        "rope_freq_base": 10000.0,
        "vocab_size": shape.vocabulary,
        "tokenizer_model": "llama",
        "token_list": [f"<{token}>".encode() for token in range(shape.vocabulary)],
        "token_scores": [0.0] * shape.vocabulary,
        **(experts if shape.experts else {}),
        **(_gguf_delta_facts(shape) if shape.delta_heads else {}),
    }


def _gguf_delta_facts(shape: Shape) -> dict[str, object]:
    rotated = shape.head_dim // 4  # Qwen3.5 rotates a quarter of each head
    return {
        "full_attention_interval": DELTA_INTERVAL,
        "ssm_conv_kernel": DELTA_TAPS,
        "ssm_state_size": DELTA_DIM,
        "ssm_group_count": shape.delta_heads,
        "ssm_time_step_rank": shape.delta_heads,
        "ssm_inner_size": shape.delta_heads * DELTA_DIM,
        "rope_dimension_count": rotated,
        "rope_dimension_sections": [rotated // 2, 0, 0, 0],
    }


def _gguf_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes of tensors in a file, where all experts of a layer are one."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(numbers[GGUF_ARCHITECTURES[shape.family]], shape.layers)
    for name, size in _parameters(config_of(shape)).items():
        published = {name.replace("dt_bias", "dt_proj.bias"): tuple(length for length in size if length > 1)}
        if name.endswith("gate_up_proj"):
            experts, rows, columns = size
            published = {name.replace("gate_up", half): (experts, rows // 2, columns) for half in ("gate", "up")}
        for part, lengths in published.items():
            own = known.get_name(part, (".weight", ".bias"))
            yield f"{own}.weight" if own.endswith("_exps") else own, lengths


def _q4(size: Sequence[int], random: np.random.Generator) -> np.ndarray:
    """Blocks of 32 numbers of the last dimension: a float16 scale and 16 bytes of nibbles."""
    *rows, columns = size
    blocks = random.integers(0, 256, (*rows, columns // Q4_BLOCK, 2 + Q4_BLOCK // 2), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(0.005).tobytes(), np.uint8)
    return blocks.reshape(*rows, -1)


def _q6(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Blocks of 256: codes, 16 small scales, and a float16 scale at the end."""
    blocks = random.integers(0, 256, (rows, columns // Q6_BLOCK, Q6_BYTES), dtype=np.uint8)
    blocks[..., 192:208] = 16
    blocks[..., 208:] = np.frombuffer(np.float16(0.0001).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


@dataclass(frozen=True)
class Cost:
    """Cost of a compression, from opening the model to the verified checkpoint, or of a pass over the dense model.

    Attributes:
        cpu_seconds: processor time, all threads together.
        peak_host_bytes, peak_device_bytes: the most memory this process ever held; None: there is no GPU.
        dtype: in which the calibration ran.
        bits_per_weight: stored bits per quantized weight: codes, scales, zero points; None for a dense pass.
        total_bytes: size of the weight files; None for a dense pass.
    """

    seconds: float
    cpu_seconds: float
    peak_host_bytes: int
    peak_device_bytes: int | None
    dtype: str
    bits_per_weight: float | None = None
    total_bytes: int | None = None


def compress(
    model: Path, out: Path, stages: Sequence[Stage], calibration: CalibrationOptions, seed: int = 0, **options: Any
) -> Cost:
    """Runs the pipeline that `compress quantize` runs, without its closing measurement of quality.

    Args:
        options: of the request, such as `devices` and `dtype` of the calibration.
    """
    from compress.pipeline.prepare import RunRequest, prepare
    from compress.pipeline.run import run

    request = RunRequest(model, str(model), Recipe(tuple(stages), calibration, seed), out, measure=False, **options)
    prepare(request)  # imports what the model needs, which is not part of the measured work
    started = Stopwatch()
    prepared = prepare(request)
    structure = run(prepared, quiet=True).structure
    times, dtype = started.read(), str(prepared.dtype).removeprefix("torch.")
    peaks = peak_host_bytes(), peak_device_bytes()
    return Cost(*times, *peaks, dtype, structure.bits_per_weight, structure.total_bytes)
