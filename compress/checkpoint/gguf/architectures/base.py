"""Description of one `general.architecture`: its keys and tensors, and those of Hugging Face they correspond to."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from compress.common.errors import CheckpointError
from compress.common.registry import Registry

Config = dict[str, Any]
Metadata = Mapping[str, Any]

FOLDER = "Name the model's safetensors folder"
"""Remedy for files that are not read."""
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys of config.json by those of metadata, which have the architecture in front of them."""

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
BLOCK = {**ATTENTION, "ffn_norm": "post_attention_layernorm", **MLP}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
ANY_EXPERT = "*"
"""Stands for the number of an expert in names of tensors that files store together, `[experts, rows, columns]`."""
MERGED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
"""Stacks of experts whose rows are those of several, by their names in files: of each expert first those of gate."""
ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
"""Scores of experts, float32 in files, and of what all tokens share."""


def expert_names(name: str, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, str]:
    """Returns names of gate, up and down of all experts, those of Hugging Face by those of GGUF."""
    own = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    return {stack: f"{name}.experts.{ANY_EXPERT}.{part}" for stack, part in zip(own, parts, strict=True)}


@dataclass(frozen=True)
class Source:
    """Metadata and small tensors of a file, from which functions read a configuration.

    Attributes:
        name: the architecture.
        metadata: all of it.
        vector: returns the values of a small tensor, None where it is missing.
        names: of all tensors.
    """

    name: str
    metadata: Metadata
    vector: Callable[[str], list[float] | None]
    names: Container[str] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value of the architecture."""
        return self.metadata.get(f"{self.name}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer, also of a list that repeats it for every layer.

        Raises:
            CheckpointError: it is missing, no positive integer, or differs between layers.
        """
        value = self.get(key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise damaged(f"{self.name}.{key} is {_short(value)}, where one positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number, that of a float32 in its shortest spelling. Raises CheckpointError for others."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not np.isfinite(value):
            raise damaged(f"{self.name}.{key} is {_short(value)}, where a number is needed")
        return shortest(value)


def shortest(value: float) -> float:
    """Returns the number with the fewest digits that has the same float32."""
    return float(str(np.float32(value)))


def damaged(problem: str) -> CheckpointError:
    """Returns the refusal of metadata that contradict themselves."""
    return CheckpointError(problem, "Convert the model again, or name its safetensors folder")


def _short(value: Any) -> str:
    text = repr(value)
    return "missing" if value is None else text if len(text) < 60 else f"{text[:56]}..."


def no_extras(_: Source) -> Config:
    """Adds nothing to a configuration."""
    return {}


@dataclass(frozen=True)
class Architecture:
    """One architecture, in both directions.

    Attributes:
        name: value of `general.architecture`.
        model_types: of config.json that are written as it; files become the first, unless `read` says another.
        block: names of tensors inside of a layer, those of Hugging Face by those of GGUF.
        fixed: keys of config.json with one value.
        read: adds to config.json what is not the same for all.
        write: returns the metadata that `read` reads, without the name in front.
        interleaved: matrices whose rows are stored in pairs of the channels that rotate together, and the key of
            config.json with their heads.
        norm_offset: added to the weights of norms in files.
    """

    name: str
    model_types: tuple[str, ...]
    block: Mapping[str, str]
    fixed: Config = field(default_factory=dict)
    read: Callable[[Source], Config] = no_extras
    interleaved: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0

    def config(self, source: Source) -> Config:
        """Returns config.json, without what the tensors alone say.

        Raises:
            CheckpointError: metadata that are missing or contradict each other.
        """
        counts = {
            own: source.count(key) for key, own in KEYS.items() if "head_count_kv" not in key and "rms" not in key
        }
        heads = counts["num_attention_heads"]
        config: Config = {
            "model_type": self.model_types[0],
            **counts,
            "num_key_value_heads": source.count("attention.head_count_kv", heads),
            "head_dim": source.count("attention.key_length", max(1, counts["hidden_size"] // heads)),
            "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
            **self.fixed,
        }
        channels = config["head_dim"]
        if (found := source.get("attention.value_length", channels)) != channels:
            raise CheckpointError(f"values have heads of {found} channels, keys of {channels}", FOLDER)
        if (rotated := source.count("rope.dimension_count", channels)) != channels:
            config["partial_rotary_factor"] = rotated / channels
        return {**config, **self.read(source)}

    def published_names(self, name: str, experts: int) -> list[str]:
        """Returns the names of the equal parts of a tensor in a folder of Hugging Face, in their order: of a stack one
        or, where it is merged, two for each of `experts`; none for a tensor that does not belong there."""
        stem, _, suffix = name.rpartition(".")
        if stem in ENDS:
            return [f"{ENDS[stem]}.{suffix}"]
        found = _BLOCK_NAME.fullmatch(stem)
        own = MERGED.get(found[2], (found[2],)) if found else ()
        if found is None or any(each not in self.block for each in own):
            return []
        published = [f"model.layers.{found[1]}.{self.block[each]}.{suffix}" for each in own]
        if ANY_EXPERT not in published[0]:
            return published
        if suffix != "weight":
            return []
        return [each.replace(ANY_EXPERT, str(expert)) for expert in range(experts) for each in published]

    def file_name(self, name: str) -> str | None:
        """Returns the name in a file of a tensor of Hugging Face, that of the stack for a tensor of an expert; None for
        one that has no place there."""
        stem, _, suffix = name.rpartition(".")
        ends = {published: own for own, published in ENDS.items()}
        if stem in ends:
            return f"{ends[stem]}.{suffix}"
        names = {published: own for own, published in self.block.items()}
        found = _LAYER_NAME.fullmatch(stem)
        inner = _EXPERT_NAME.sub(rf"\1.{ANY_EXPERT}.\3", found[2]) if found else ""
        return f"blk.{found[1]}.{names[inner]}.{suffix}" if found and inner in names else None

    def heads_of(self, name: str, config: Metadata) -> int | None:
        """Returns the number of heads of a matrix or bias, by its name in files, whose rows are interleaved."""
        key = self.interleaved.get(name.rpartition(".")[0].rpartition(".")[2])
        return None if key is None else config[key]

    def is_offset(self, name: str) -> bool:
        """Whether a tensor, by its name in files, is the weight of a norm that is stored with an offset."""
        return self.norm_offset != 0 and name.endswith("norm.weight")


ARCHITECTURES: Registry[Architecture] = Registry(
    "GGUF architecture", "compress.checkpoint.gguf.architectures", CheckpointError
)


def expert_of(name: str) -> int | None:
    """Returns the number of the expert to which a tensor of Hugging Face belongs; None for others."""
    found = _EXPERT_NAME.fullmatch(name)
    return int(found[2]) if found else None


def is_end(name: str) -> bool:
    """Whether a matrix, by its name in files, is the embedding or the output head."""
    return name in ("token_embd.weight", "output.weight")


def is_router(name: str) -> bool:
    """Whether a tensor, by its name in files, scores experts."""
    return name.rpartition(".")[0].rpartition(".")[2] in ROUTERS


def separated(rows: Tensor, heads: int) -> Tensor:
    """Returns rows in the order of Hugging Face, first halves of all pairs of a head before second halves."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Returns rows in the order of files, which `separated` undoes."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def scaled_rope(source: Source) -> Config:
    """Reads a rotary embedding: its base, and how it is stretched, by one factor or by those of Llama 3.

    Raises:
        CheckpointError: a kind that is not read.
    """
    base = {"rope_theta": source.number("rope.freq_base", 10000.0)}
    if base["rope_theta"] <= 1:
        raise damaged(f"{source.name}.rope.freq_base is {base['rope_theta']}, not above 1")
    kind, factors = source.get("rope.scaling.type", "none"), source.vector("rope_freqs.weight")
    if factors is not None:
        from compress.checkpoint.gguf.architectures.llama3_rope import find_parameters

        return {"rope_parameters": {**base, **find_parameters(factors, base["rope_theta"])}}
    if kind in ("none", ""):
        return {"rope_parameters": {**base, "rope_type": "default"}}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"rotary embeddings stretched by {kind!r} are not read", "Name the safetensors folder")
    stretched: Config = {**base, "rope_type": kind, "factor": source.number("rope.scaling.factor")}
    if kind == "yarn":
        stretched["original_max_position_embeddings"] = source.count("rope.scaling.original_context_length")
    return {"rope_parameters": stretched}
