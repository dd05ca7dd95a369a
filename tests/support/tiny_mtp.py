"""Tiny random models with a head of multi-token prediction, and the head in plain torch."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_configs import SIZES, VARIANTS
from tiny_models import load_reference, save_tiny_model
from torch import Tensor, nn

FAMILIES = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Families with a description of a head."""
LAST = {"layer_types": "full_attention", "mlp_layer_types": "sparse", "indexer_types": "full"}
"""Kind of the block of a head, by the field with a kind for each layer."""
PARTS = {
    "qwen": ("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "": ("", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
}
"""Block, projection, norms of embedding and hidden state, last norm; without `qwen` inside of the block."""


def save_mtp_model(folder: Path, family: str, **options: Any) -> Path:
    """A model whose last layer becomes the block of its head."""
    options = {**SIZES, **VARIANTS[family], **options}
    count, hidden = options["num_hidden_layers"], options["hidden_size"]
    kinds = {key: [*options[key], kind] for key, kind in LAST.items() if key in options}
    save_tiny_model(folder, family, **options | {"num_hidden_layers": count + 1} | kinds)
    tensors, block = load_file(folder / "model.safetensors"), f"model.layers.{count}"
    name, projection, *norms = (_name(part, block) for part in _parts(family))
    tensors = {key.replace(f"{block}.", f"{name}."): tensor for key, tensor in tensors.items()}
    tensors[f"{projection}.weight"] = torch.randn(hidden, 2 * hidden) * 0.15
    tensors |= {f"{norm}.weight": torch.randn(hidden) * 0.3 + 1 for norm in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    config |= {key: config[key][:count] for key in LAST if config.get(key)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _parts(family: str) -> tuple[str, ...]:
    return PARTS["qwen" if family.startswith("qwen") else ""]


def _name(part: str, block: str) -> str:
    return part if part.startswith("mtp") else f"{block}.{part}".rstrip(".")


@dataclass
class PlainHead:
    """The head of a folder in float64, its block computed by transformers."""

    target: Any
    block: Any
    tensors: dict[str, Tensor]
    names: list[str]
    offset: float

    @classmethod
    def load(cls, folder: Path, family: str) -> "PlainHead":
        target = load_reference(folder)
        tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        config = json.loads((folder / "config.json").read_text())
        count = config["num_hidden_layers"]
        names = [_name(part, f"model.layers.{count}") for part in _parts(family)]
        config |= {"num_hidden_layers": count + 1}
        config |= {key: [*config[key], kind] for key, kind in LAST.items() if config.get(key)}
        longer = folder.with_name(f"{folder.name} longer")
        longer.mkdir()
        (longer / "config.json").write_text(json.dumps(config))
        renamed = {name.replace(f"{names[0]}.", f"model.layers.{count}."): tensor for name, tensor in tensors.items()}
        save_file(renamed, longer / "model.safetensors", metadata={"format": "pt"})
        block = load_reference(longer)
        block.model.layers = nn.ModuleList([block.model.layers[-1]])
        block.config.num_hidden_layers = 1
        if config.get("layer_types"):
            block.config.layer_types = ["full_attention"]
        block.model.norm = nn.Identity()
        block.lm_head = nn.Identity()
        return cls(target, block, tensors, names, 1.0 if family.startswith("qwen") else 0.0)

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor:
        """Final hidden states of the target."""
        return self.target(tokens, use_cache=False, output_hidden_states=True).hidden_states[-1]

    @torch.no_grad()
    def states(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """States before the last norm, of the tokens after the positions of these hidden states."""
        embedded = self._norm(self.names[2], self.tensors["model.embed_tokens.weight"][tokens])
        both = torch.cat((embedded, self._norm(self.names[3], hidden)), -1)
        inputs = both @ self.tensors[f"{self.names[1]}.weight"].T
        return self.block(inputs_embeds=inputs, use_cache=False).logits

    def normed(self, states: Tensor) -> Tensor:
        return self._norm(self.names[4], states)

    def logits(self, states: Tensor) -> Tensor:
        return self.normed(states) @ self.target.get_output_embeddings().weight.T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (self.tensors[f"{name}.weight"] + self.offset)


def save_copying_model(folder: Path, **options: Any) -> Path:
    """A model of one layer whose head computes it again over the tokens alone: its drafts are those of the model except
    for the first token of the text, which the head does not see."""
    save_mtp_model(folder, "glm4_moe", num_hidden_layers=1, first_k_dense_replace=2, **options)
    tensors = load_file(folder / "model.safetensors")
    embedding, first, head = tensors["model.embed_tokens.weight"], "model.layers.0.", "model.layers.1."
    tensors["model.embed_tokens.weight"] = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    tensors |= {name.replace(first, head): tensor.clone() for name, tensor in tensors.items() if first in name}
    hidden = embedding.shape[1]
    tensors[f"{head}eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    tensors[f"{head}enorm.weight"] = torch.ones(hidden)
    tensors[f"{head}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def wrap_mtp_model(folder: Path, model_type: str) -> Path:
    """Names config and tensors of a text model of Qwen as its multimodal checkpoints do, with one tensor of a tower."""
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": model_type, "text_config": text, "dtype": text["dtype"], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    stored = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    stored["model.visual.merger.linear.weight"] = torch.randn(32, 32)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
