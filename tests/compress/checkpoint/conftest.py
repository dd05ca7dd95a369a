"""Tiny models and integer weights that the tests of this folder share."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import random_weight
from torch import Tensor

from compress.checkpoint.config import packed_config, read_config
from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Scheme, Weight
from compress.checkpoint.writer import BlockStore, assemble

HIDDEN, INNER, VOCAB = 128, 256, 96
SIDE_FILES = {
    "tokenizer_config.json": '{"unknown_thing": [1, 2],   "odd spacing": true}',
    "chat_template.jinja": "{{ messages }}\n",
    "notes/README.md": "kept\n",
}


@pytest.fixture(scope="session")
def make_weight() -> Callable[..., Weight]:
    return random_weight


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory) -> Path:
    """A random two-layer Llama with tied embeddings and biases, saved by transformers in bfloat16, with side files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("dense") / "model"
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    for name, text in SIDE_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def linears(folder: Path) -> dict[str, tuple[int, int]]:
    """Linear modules of the blocks and their shapes."""
    files = TensorFiles.open(folder)
    names = [name for name in files.names() if name.endswith("proj.weight")]
    return {name.removesuffix(".weight"): files.shape(name) for name in names}


@pytest.fixture(scope="session")
def pack() -> Callable[..., dict[str, Weight]]:
    """Writes `dense` to `out` with random codes for the chosen modules; gives the weights it wrote."""

    def write(
        dense: Path,
        out: Path,
        scheme: Callable[[str], Scheme | None],
        format: str = "compressed-tensors",
        shapes: dict[str, tuple[int, int]] | None = None,
    ) -> dict[str, Weight]:
        files, config = TensorFiles.open(dense), read_config(dense)
        codec = CONTAINERS.find(format)
        weights: dict[str, Weight] = {}
        tensors: dict[str, Tensor] = {name: files.tensor(name) for name in files.names()}
        for number, (module, shape) in enumerate((shapes or linears(dense)).items()):
            chosen = scheme(module)
            if chosen is not None:
                weights[module] = random_weight(shape, chosen, seed=number)
                tensors.pop(f"{module}.weight", None)
                tensors.update(codec.encode(module, weights[module], torch.bfloat16))
        ignored = sorted({"lm_head", *linears(dense)} - set(weights))
        block = codec.quantization_config({module: weight.scheme for module, weight in weights.items()}, ignored)
        store = BlockStore(out.parent / f"{out.name}.partial" / "pieces")
        store.write("all", tensors)
        new_config = packed_config(config, block, weights, {"source": str(dense), "seed": 0})
        assemble(store, ["all"], out, config=new_config, source=files)
        store.discard()
        return weights

    return write


def side_texts(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in SIDE_FILES}


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture(scope="session")
def raw_safetensors() -> Callable[..., Path]:
    return write_raw
