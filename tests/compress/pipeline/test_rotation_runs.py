"""Rotated models compute what they computed, load in transformers, and stream and resume like any other."""

from pathlib import Path

import pytest
import runs
import torch
from folders import change_tensors
from runs import prepared
from safetensors.torch import load_file
from tiny_configs import VARIANTS
from tiny_models import load_reference, reference_logits, save_tiny_model

from compress.checkpoint.config import read_config
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import RecipeError
from compress.pipeline.run import RunResult
from compress.recipe import Recipe
from compress.recipe_file import parse_recipe
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

TOKENS = torch.arange(24).view(2, 12) * 7 % 112
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def rotate(model: Path, out: Path) -> RunResult:
    return runs.compress(model, out, RotateStage())


def assert_same_logits(folder: Path) -> None:
    before, after = (reference_logits(load_reference(folder / name), TOKENS) for name in ("dense", "rotated"))
    assert float((after - before).abs().max()) < 1e-9


def test_a_copy_of_the_embedding_that_is_stored_as_head_counts_once(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "dense", dtype=torch.float64, tie_word_embeddings=True)
    change_tensors(model, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    rotate(model, tmp_path / "rotated")
    assert_same_logits(tmp_path)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"num_key_value_heads": 4}),
        # 48 = 4 x 12 channels by a Hadamard matrix of Paley's, and heads of 20.
        ("qwen3", {"hidden_size": 48, "head_dim": 20, "tie_word_embeddings": True}),
        # 7 channels by a random matrix.
        ("mistral", {"hidden_size": 56, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 14}),
        *(
            (family, VARIANTS[family])
            for family in ("granite", "hunyuan_v1_dense", "ministral3", "seed_oss", "smollm3")
        ),
    ],
)
def test_logits_are_those_of_the_source_in_float64(tmp_path: Path, family: str, options: dict) -> None:
    model = save_tiny_model(tmp_path / "dense", family, torch.float64, **options)
    rotate(model, tmp_path / "rotated")
    assert_same_logits(tmp_path)
    stored = load_file(tmp_path / "rotated" / "model.safetensors")
    norms = [name for name in stored if name.endswith(("input_layernorm.weight", "attention_layernorm.weight"))]
    assert len(norms) == 2 * 2
    assert all(bool((stored[name] == 1).all()) for name in [*norms, "model.norm.weight"])
    name = "model.layers.1.mlp.down_proj.weight"
    assert not stored[name].allclose(load_file(model / "model.safetensors")[name])


def test_a_tied_head_becomes_a_matrix_of_its_own_and_the_plan_says_so(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "dense", tie_word_embeddings=True)
    plan = prepared(model, tmp_path / "rotated", RotateStage()).plan
    rows = {row.tensor: row for row in plan.rows}
    head, bytes_of_head = rows["lm_head.weight"], 112 * 64 * 4
    assert (head.bytes_before, head.bytes_after) == (0, bytes_of_head)
    assert head.reason == "output head, no longer the token embedding"
    assert plan.bytes_after - plan.bytes_before == bytes_of_head
    assert f"a separate matrix, {bytes_of_head:,} bytes more" in plan.notes[0]
    assert "ones" in rows["model.norm.weight"].reason
    result = rotate(model, tmp_path / "rotated")
    assert read_config(tmp_path / "rotated")["tie_word_embeddings"] is False
    assert result.structure.ok


def test_a_head_stays_tied_where_the_final_norm_scales_all_channels_alike(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "dense", dtype=torch.float64, tie_word_embeddings=True)
    change_tensors(model, lambda tensors: tensors["model.norm.weight"].fill_(1.75))
    rotate(model, tmp_path / "rotated")
    assert "lm_head.weight" not in TensorFiles.open(tmp_path / "rotated")
    assert_same_logits(tmp_path)


def test_the_seed_decides_and_heads_may_be_left_out(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "dense")
    first, again, other = (
        prepared(model, tmp_path / "out", RotateStage(), seed=seed).files.tensor("model.embed_tokens.weight")
        for seed in (0, 0, 1)
    )
    assert first.equal(again)
    assert not first.equal(other)
    name = "model.layers.0.self_attn.v_proj.weight"
    plain, turned = (
        prepared(model, tmp_path / "out", RotateStage(heads=heads)).files.tensor(name) for heads in (False, True)
    )
    assert not plain.allclose(turned)
    torch.testing.assert_close(plain.norm(), turned.norm())


def test_rotation_stands_first() -> None:
    with pytest.raises(RecipeError, match=r"^rotate "):
        Recipe((QuantizeStage("rtn"), RotateStage()))
    text = "stages:\n  - rotate: {heads: false}\n  - quantize: {method: rtn, bits: 3, group_size: -1}\n"
    assert parse_recipe(text, "r.yaml").stages[0] == RotateStage(heads=False)
    with pytest.raises(RecipeError, match=r"r\.yaml:2.*'head'"):
        parse_recipe(text.replace("heads", "head"), "r.yaml")
    with pytest.raises(RecipeError, match=r"r\.yaml:2.*'yes please'"):
        parse_recipe(text.replace("false", "yes please"), "r.yaml")
