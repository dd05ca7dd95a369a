"""Models of every family, cut among ranks: in float64 their logits are those of one process."""

from pathlib import Path

import pytest
import torch
from threaded_ranks import load_parts, shared_logits, whole_logits
from tiny_configs import GEMMA4_EXPERTS, VARIANTS
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.config import read_config
from compress.checkpoint.weights import Int, RotatedInputs, Scheme
from compress.common.cli import demo_model_path
from compress.models.registry import FAMILIES
from runtime.core.model_config import parse_config
from runtime.model.loader import load_model

QUICK = ("llama", "phi3", "gpt_oss", "qwen3_moe", "qwen3_next", "mamba2", "deepseek_v3", "olmo2")
"""Plain; with fused projections; with sinks, biases and experts stored together; with experts; with gated delta nets
sorted by key head; with Mamba-2; with latents; with norms over all heads at once."""
FORMS = {
    "one group of Mamba-2": ("mamba2", {"n_groups": 1}),
    "a group of Mamba-2 for each head": ("mamba2", {"n_groups": 8}),
    "one key head under a norm over all of them": ("olmo2", {"num_key_value_heads": 1}),
    "one key head of a delta net": ("qwen3_5_text", {"linear_num_key_heads": 1}),
    "a mixture next to an MLP": ("gemma4_text", GEMMA4_EXPERTS),
}
"""Families with sizes or parts that their model in `VARIANTS` does not have."""
PACKED = ("deepseek_v3", "falcon_h1", "gemma4_text", "jamba", "kimi_linear", "lfm2", "mamba2", "olmo2", "qwen3_next")


def check(folder: Path, count: int, num_tokens: int = 13) -> None:
    whole = load_model(folder, device="cpu", dtype="float64", kernels="reference")
    tokens = torch.arange(3, 3 + num_tokens)
    with torch.inference_mode():
        wanted = whole_logits(whole, tokens)
    found = shared_logits(folder, count, tokens)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()


def families() -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in sorted(FAMILIES)]


@pytest.mark.parametrize("family", families())
def test_logits_of_ranks_are_those_of_one(family: str, tmp_path: Path) -> None:
    try:
        save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    except ValueError:
        pytest.skip("transformers has no such model")
    for count in (2, 3, 4):
        check(tmp_path / "model", count)


@pytest.mark.parametrize("form", FORMS)
def test_other_sizes_are_cut_as_well(form: str, tmp_path: Path) -> None:
    family, options = FORMS[form]
    save_tiny_model(tmp_path / "model", family, **(VARIANTS[family] | options))
    for count in (2, 3, 4):
        check(tmp_path / "model", count)


@pytest.mark.full
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("family", PACKED)
def test_packed_weights_of_other_mixers_are_cut(family: str, group: int, tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", family, torch.bfloat16, **VARIANTS[family])
    linears = {linear.name: linear for linear in parse_config(read_config(dense)).spec.linears()}
    packed = {name for name, linear in linears.items() if linear.in_features % group == 0}
    pack_model(dense, tmp_path / "packed", lambda module: Int(4, group) if module in packed else None)
    for count in (2, 3, 4):
        check(tmp_path / "packed", count)


PLAIN = Int(4, 32), Int(3, 16, symmetric=False), Int(4, 128), Int(8, None)


@pytest.mark.parametrize("scheme", [*PLAIN, RotatedInputs(Int(4, 32), 128)], ids=str)
def test_packed_weights_are_cut_between_groups(scheme: Scheme, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1, "num_key_value_heads": 4}
    save_tiny_model(tmp_path / "dense", "llama", torch.bfloat16, **sizes)
    pack_model(tmp_path / "dense", tmp_path / "packed", lambda module: scheme)
    check(tmp_path / "packed", 3)


def test_each_rank_holds_its_part_of_the_memory() -> None:
    whole = load_model(demo_model_path(), device="cpu", dtype="float64", kernels="reference").nbytes
    parts = [part.nbytes for part in load_parts(demo_model_path(), 2)]
    assert max(parts) < 1.05 * whole / 2
