"""Ranks with whole experts give the logits and tokens of one process, in float64."""

from pathlib import Path

import pytest
import torch
from rank_answers import EXACT, SCARCE, answers, plain, ranks
from threaded_ranks import load_parts, shared_logits, whole_logits
from tiny_configs import VARIANTS
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.weights import Int
from compress.common.cli import bundled_path
from compress.common.errors import ToolkitError
from compress.cpu.binding import library
from compress.models.cuts import Cuts, Rank
from runtime.core.config import RuntimeConfig
from runtime.llm import LLM
from runtime.model.loader import load_model

MIXTURES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "mixtral")
"""Plain; with groups of experts and a shared one; with experts stored together and biases; with a gate of the shared
expert; with few experts."""


def check(folder: Path, count: int, tolerance: float = 1e-9, **options: str) -> None:
    whole = load_model(folder, device="cpu", **({"dtype": "float64", "kernels": "reference"} | options))
    tokens = torch.arange(3, 16)
    with torch.inference_mode():
        wanted = whole_logits(whole, tokens)
    found = shared_logits(folder, count, tokens, has_whole_experts=True, **options)
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize(
    "family", [each if each in MIXTURES[:3] else pytest.param(each, marks=pytest.mark.full) for each in MIXTURES]
)
def test_logits_are_those_of_one(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "dense", family, **VARIANTS[family])
    for count in (2, 3, 4):
        check(tmp_path / "dense", count)
    pack_model(tmp_path / "dense", tmp_path / "packed", lambda module: Int(4, 16))
    check(tmp_path / "packed", 2)


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
def test_compiled_mixtures_leave_other_experts_out() -> None:
    check(bundled_path("demo-mixture"), 3, 2**-5, dtype="bfloat16", kernels="auto")


def test_each_rank_holds_its_experts_alone() -> None:
    """Eight experts of three ranks: two, three and three; everything else as without whole experts."""
    folder = bundled_path("demo-mixture")
    whole = load_model(folder, device="cpu", dtype="float64", kernels="reference")
    parts, cut = load_parts(folder, 3, has_whole_experts=True), load_parts(folder, 3)
    for index, layer in enumerate(whole.layers):
        if layer.experts is None:
            continue
        held = [part.layers[index].experts for part in parts]
        assert [len(each.experts) for each in held] == [2, 3, 3]
        assert [each.spec.first_held for each in held] == [0, 2, 5]
        for each, number in zip(held, (2, 3, 3), strict=True):
            own = sum(expert.nbytes for expert in each.experts)
            assert own == sum(expert.nbytes for expert in layer.experts.experts) * number / 8
        for part, other in zip(parts, cut, strict=True):
            assert part.layers[index].mixer.nbytes == other.layers[index].mixer.nbytes


@pytest.mark.parametrize(
    ("tensor", "stages"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.full), pytest.param(3, 2, marks=pytest.mark.full)],
)
def test_tokens_are_those_of_one(tensor: int, stages: int) -> None:
    options = {"block_size": 4, "num_blocks": SCARCE, "prefill_chunk": 7, "speculative_model": "ngram"}
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "enable_expert_parallel": True}
    llm = LLM(bundled_path("demo-mixture"), RuntimeConfig(**EXACT, **options, **sizes))
    assert answers(llm) == plain(bundled_path("demo-mixture"))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("demo", {"tensor_parallel_size": 2}),
        ("demo-mixture", {"pipeline_parallel_size": 2}),
        ("demo-mixture", {}),
    ],
    ids=str,
)
def test_ranks_without_experts_are_refused(model: str, sizes: dict[str, int]) -> None:
    before = ranks()
    with pytest.raises(ToolkitError, match="expert"):
        LLM(bundled_path(model), RuntimeConfig(**EXACT, **sizes, enable_expert_parallel=True))
    assert set(ranks()) == set(before)


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ToolkitError, match="3 ranks cannot share the 2 experts of model"):
        Cuts(Rank(0, 3, has_whole_experts=True), lambda module: 1, prefix="model.layers.0.").experts(2, "mlp")
