"""Layers divided among stages: evenly by bytes, and models of every family compute what one process computes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded_ranks import CPU, whole_logits
from tiny_configs import SIZES, VARIANTS
from tiny_models import pack_model, save_tiny_model
from torch import Tensor
from torch.distributed import TCPStore
from transformers import AutoConfig

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.errors import ToolkitError
from compress.models.cuts import Rank
from compress.models.registry import FAMILIES
from runtime.backends.scores import DenseAttention
from runtime.core.model_config import parse_config
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model, read_model
from runtime.parallel.group import HOST, Group, Others
from runtime.parallel.stages import Stage, allowed_cuts, divide, plan_stages
from runtime.parallel.vocabulary import ProductWanted, SharedHead

QUICK = ("llama", "qwen3_5_text", "qwen3_moe", "deepseek_v3", "gemma4_text")
"""Plain; recurrent layers; a mixture; latents; inputs of every layer, and layers that read keys of earlier ones."""


@pytest.mark.parametrize(
    ("costs", "count", "cuts", "sizes"),
    [
        ((1, 1, 1, 1), 2, (1, 2, 3), (2, 2)),
        ((5, 1, 1, 1), 2, (1, 2, 3), (1, 3)),
        ((1, 1, 1, 1, 6), 3, (1, 2, 3, 4), (2, 2, 1)),
        ((1, 1, 1, 1), 2, (3,), (3, 1)),
        ((2, 1, 1, 2), 4, (1, 2, 3), (1, 1, 1, 1)),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(
    costs: Sequence[float], count: int, cuts: Sequence[int], sizes: Sequence[int]
) -> None:
    parts = divide(costs, count, cuts)
    largest = [sum(costs[layer] for layer in part) for part in parts]
    wanted = [sum(costs[start:stop]) for start, stop in pairwise([0, *[sum(sizes[: i + 1]) for i in range(count)]])]
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert max(largest) == max(wanted)
    assert all(part.start in cuts for part in parts[1:])


def test_more_stages_than_cuts_are_refused() -> None:
    with pytest.raises(ToolkitError) as error:
        divide([1, 1, 1], 3, [2])
    assert "--pipeline-parallel-size 2" in error.value.remedy


def test_layers_stay_with_the_layer_whose_keys_they_read() -> None:
    model = parse_config(AutoConfig.for_model("gemma4_text", **(SIZES | VARIANTS["gemma4_text"])).to_dict())
    shared = [(layer, source) for layer, source in enumerate(model.kv_sources) if source not in (layer, -1)]
    assert shared
    cuts = allowed_cuts(model)
    assert not any(source < cut <= layer for cut in cuts for layer, source in shared)


def stages_of(folder: Path, count: int) -> tuple[Stage, ...]:
    checkpoint = PackedCheckpoint.open(folder)
    return plan_stages(read_model(checkpoint), checkpoint, count, 0)


def load_stages(folder: Path, count: int, ranks: int = 1, min_tokens: int = 0, **options: Any) -> list[Decoder]:
    """The part of each process, in threads of this one."""
    stages, total = stages_of(folder, count), count * ranks
    options = {"device": "cpu", "dtype": "float64", "kernels": "reference"} | options
    store = TCPStore(HOST, 0, total, is_master=True, wait_for_workers=False)

    def load(index: int) -> Decoder:
        own = store if index == 0 else TCPStore(HOST, store.port, total, is_master=False)
        rank, stage = Rank(index % ranks, ranks), stages[index // ranks]
        group = Group(rank, own, CPU, Others(), stage, min_tokens=min_tokens)
        return load_model(folder, group=group, **options)

    with ThreadPoolExecutor(total) as pool:
        return list(pool.map(load, range(total)))


@torch.inference_mode()
def part_logits(decoder: Decoder, tokens: Tensor) -> Tensor | None:
    """Logits `[T, V]` of one sequence, on the first of all processes, which are called at once."""
    length = len(tokens)
    attention = DenseAttention(length, decoder.config.windows, decoder.dtype, CPU, decoder.scores)
    states = decoder.whole_states([length])
    hidden = decoder.forward(tokens, torch.arange(length), attention, None, states)
    hidden = decoder.end.collect(hidden)
    head = decoder.head
    if not isinstance(head, SharedHead):
        return None
    if head.group.is_first:
        return decoder.logits(hidden)
    head.follow(ProductWanted(length), decoder.config.spec.hidden_size, decoder.dtype)
    return None


def check(folder: Path, count: int, ranks: int = 1, min_tokens: int = 0, num_tokens: int = 13) -> None:
    whole = load_model(folder, device="cpu", dtype="float64", kernels="reference")
    tokens = torch.arange(3, 3 + num_tokens)
    with torch.inference_mode():
        wanted = whole_logits(whole, tokens)
    parts = load_stages(folder, count, ranks, min_tokens)
    with ThreadPoolExecutor(len(parts)) as pool:
        found = next(iter(pool.map(part_logits, parts, [tokens] * len(parts))))
    assert found is not None
    assert wanted is not None
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()


def families() -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in sorted(FAMILIES)]


@pytest.mark.parametrize("family", families())
def test_logits_of_stages_are_those_of_one(family: str, tmp_path: Path) -> None:
    """Whatever the kinds of layers are: whole layers move."""
    save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    checkpoint = PackedCheckpoint.open(tmp_path / "model")
    cuts = allowed_cuts(read_model(checkpoint))
    if not cuts:
        with pytest.raises(ToolkitError):
            stages_of(tmp_path / "model", 2)
        return
    for count in range(2, min(len(cuts) + 1, 3) + 1):
        check(tmp_path / "model", count)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stages_of_packed_weights(ranks: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_key_value_heads": 4}
    save_tiny_model(tmp_path / "dense", "llama", torch.bfloat16, **sizes)
    pack_model(tmp_path / "dense", tmp_path / "packed", lambda module: Int(4, 32))
    check(tmp_path / "packed", 2, ranks)


@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
def test_ranks_of_stages_pass_on_the_tokens_that_they_share(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs of layers and without."""
    send, sent = Group.send, list[int]()
    monkeypatch.setattr(
        Group, "send", lambda group, tensor, index: sent.append(len(tensor)) or send(group, tensor, index)
    )
    save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    check(tmp_path / "model", 2, ranks=2, min_tokens=13)
    assert set(sent) == {7, 6, 13}, "the last stage gives all of them to the first rank"


def test_each_stage_holds_its_part_of_the_memory() -> None:
    whole = load_model(demo_model_path(), device="cpu", dtype="float64", kernels="reference")
    first, last = load_stages(demo_model_path(), 2)
    layers = sum(layer.nbytes for layer in whole.layers)
    own = [sum(layer.nbytes for layer in part.layers) for part in (first, last)]
    assert sum(own) == layers
    assert max(own) < 1.05 * layers / 2
    assert first.nbytes - own[0] == last.nbytes - own[1] == whole.head.nbytes
