"""Ranks that share the residual stream by tokens (sequence parallelism): in float64 the logits of one process."""

from pathlib import Path

import pytest
import torch
from threaded_ranks import load_parts, on_ranks, parts_logits, whole_logits
from tiny_configs import GEMMA4_EXPERTS, VARIANTS
from tiny_models import save_tiny_model
from torch import Tensor

from compress.common.cli import bundled_path
from compress.cpu.binding import library
from compress.models.registry import FAMILIES
from runtime.model.loader import load_model
from runtime.parallel.group import Group

QUICK = ("llama", "qwen3_next", "deepseek_v3", "cohere2", "mamba2", "olmo2", "gemma4_text")
"""Plain; a hybrid with experts; with latents; MLP next to attention; recurrent; norms after mixers; with inputs of
layers."""
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
"""Experts alone, also with biases; with a shared one, for which tokens are gathered."""
TOKENS = torch.arange(3, 16)


def check(folder: Path, count: int, **options: bool) -> int:
    """Compares logits; returns how many times the first rank sent rows to others."""
    with torch.inference_mode():
        wanted = whole_logits(load_model(folder, device="cpu", dtype="float64", kernels="reference"), TOKENS)
    parts = load_parts(folder, count, min_tokens=len(TOKENS), **options)
    found = parts_logits(parts, TOKENS)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()
    sent = parts[0].head.group.sent
    assert all(len(each) == count for each in sent)
    parts_logits(parts, TOKENS[1:])
    assert parts[0].head.group.sent == sent, "steps with fewer tokens are summed"
    return len(sent)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in QUICK else pytest.mark.full) for each in sorted(FAMILIES)]
)
def test_logits_are_those_of_one(family: str, tmp_path: Path) -> None:
    """13 tokens: 7 and 6; 5, 5 and 3; 4, 4, 4 and 1."""
    try:
        save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    except ValueError:
        pytest.skip("transformers has no such model")
    for count in (2, 3, 4):
        assert check(tmp_path / "model", count) > 1


def test_tokens_are_shared_from_the_embedding_to_the_last_layer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama", **VARIANTS["llama"])
    num_layers = len(load_model(tmp_path / "model", device="cpu").layers)
    assert check(tmp_path / "model", 3) == 1 + 2 * num_layers


def test_a_mixture_next_to_an_mlp_reads_all_tokens(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "gemma4_text", **(VARIANTS["gemma4_text"] | GEMMA4_EXPERTS))
    for experts in (False, True):
        assert check(tmp_path / "model", 3, has_whole_experts=experts) > 1


@pytest.mark.parametrize("family", MIXTURES)
def test_tokens_go_to_the_ranks_with_their_experts(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    mixtures = [layer.experts for layer in load_model(tmp_path / "model", device="cpu").layers]
    num_sent = sum(each is not None and each.shared is None for each in mixtures)
    assert bool(num_sent) == (family != "deepseek_v3")
    for count in (2, 3, 4):
        # Numbers of rows, rows, weights and experts there, rows back, in place of a sum.
        assert check(tmp_path / "model", count, has_whole_experts=True) == 1 + 2 * len(mixtures) + 4 * num_sent


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("model", ["demo", "demo-mixture"])
def test_compiled_kernels_take_shares_of_any_size(model: str) -> None:
    """Five tokens of four ranks: 2, 2, 1 and none."""
    folder, options = bundled_path(model), {"dtype": "bfloat16", "kernels": "auto"}
    with torch.inference_mode():
        wanted = whole_logits(load_model(folder, device="cpu", **options), TOKENS[:5])
    for experts in {False, model == "demo-mixture"}:
        parts = load_parts(folder, 4, has_whole_experts=experts, min_tokens=1, **options)
        found = parts_logits(parts, TOKENS[:5])
        assert parts[0].head.group.sent[0] == [2, 2, 1, 0]
        assert (found - wanted).abs().max() < 2**-5 * wanted.abs().max()


def test_ranks_without_a_token_take_part() -> None:
    def work(group: Group) -> tuple[Tensor, Tensor]:
        parts = torch.arange(10.0).view(5, 2) * (1 + group.rank.index)
        own = group.sum_rows(parts)
        assert torch.equal(own, 10 * torch.arange(10.0).view(5, 2)[group.own_rows(5)])
        return own, group.gather_rows(own, 5)

    found = on_ranks(4, work, min_tokens=1)
    assert [len(own) for own, _ in found] == [2, 2, 1, 0]
    assert all(torch.equal(rows, torch.cat([own for own, _ in found])) for _, rows in found)
