"""Configs and files that say two things: the runtime takes the one that transformers takes, or refuses."""

from pathlib import Path

import pytest
import torch
from folders import change_config as edit_config
from folders import change_tensors
from safetensors.torch import load_file
from tiny_configs import SIZES
from tiny_models import load_reference, reference_logits, save_tiny_model

from compress.checkpoint.reader import PackedCheckpoint
from runtime.model.loader import load_model
from runtime.model.scoring import score

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    change_tensors(folder, lambda stored: stored.update(tensors))


def assert_equals_transformers(folder: Path) -> None:
    tokens = torch.randint(SIZES["vocab_size"], (2, 100), generator=torch.Generator().manual_seed(3))
    expected = reference_logits(load_reference(folder), tokens)
    logits = score(load_model(folder, device="cpu", dtype="float64"), tokens)
    assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": YARN},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": YARN, "rope_theta": 7000.0},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 32}},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 32}, "original_max_position_embeddings": 128},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}, "original_max_position_embeddings": 128},
        {"rope_scaling": {}, "rope_parameters": LLAMA3 | {"rope_theta": 2e4}},
    ],
)
def test_rope_scaling_wins_and_so_does_the_outer_original_length(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = save_tiny_model(tmp_path)
    edit_config(folder, rope_parameters=None)
    edit_config(folder, **changes)
    assert_equals_transformers(folder)


def test_a_head_that_differs_from_the_tied_embedding_is_kept(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add_tensors(folder, {"lm_head.weight": embedding})
    assert PackedCheckpoint.open(folder).tied
    add_tensors(folder, {"lm_head.weight": embedding.flip(0)})
    assert not PackedCheckpoint.open(folder).tied
    assert_equals_transformers(folder)
    assert any("lm_head" in line and "embedding" in line for line in load_model(folder, device="cpu").description)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_biases_that_the_config_does_not_announce_are_ignored_aloud(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(tmp_path)
    add_tensors(folder, {f"model.layers.0.{name}.bias": torch.ones(64)})
    assert_equals_transformers(folder)
    description = load_model(folder, device="cpu").description
    assert any(f"model.layers.0.{name}.bias" in line for line in description), description


def test_heads_of_another_size_than_the_hidden_channels_allow(tmp_path: Path) -> None:
    """`head_dim` is not a field of the class of Cohere 2, whose modeling code reads it."""
    folder = edit_config(save_tiny_model(tmp_path, "cohere2", head_dim=24), head_dim=24)
    assert load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape[0] == 4 * 24
    assert_equals_transformers(folder)
