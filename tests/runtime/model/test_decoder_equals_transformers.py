import json

import pytest
import torch
from tiny_configs import GEMMA4_EXPERTS, VARIANTS
from tiny_models import load_reference, reference_logits, save_tiny_model

from compress.common.cli import BUNDLED, bundled_path
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (2, 70), generator=torch.Generator().manual_seed(3))
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied, with biases, heads of another size": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "llama, one key-value head": ("llama", {"num_key_value_heads": 1}),
    "llama, no shared heads": ("llama", {"num_key_value_heads": 4}),
    "llama, rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}}),
    "llama, rope llama3": (
        "llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32, "rope_theta": 500.0}},
    ),
    "llama, rope yarn": ("llama", {"rope_parameters": YARN}),
    "llama, rope yarn with its options": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
    "llama, rope dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 5e3}}),
    "phi3, short factors": ("phi3", VARIANTS["phi3"] | {"original_max_position_embeddings": 128}),
    "mistral, window 16": ("mistral", {"sliding_window": 16}),
    "mistral, window longer than the text": ("mistral", {"sliding_window": 128}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "phi3, with a window": ("phi3", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, window in the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma4, with experts": ("gemma4_text", {**VARIANTS["gemma4_text"], **GEMMA4_EXPERTS}),
    **{f"{family}, all features": (family, options) for family, options in VARIANTS.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_float64(name, tmp_path):
    family, options = MODELS[name]
    folder = save_tiny_model(tmp_path / "model", family, **options)
    expected = reference_logits(load_reference(folder), TOKENS)
    found = score(load_model(folder, dtype="float64"), TOKENS)
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_logits_in_float32(family, tmp_path):
    folder = save_tiny_model(tmp_path / "model", family)
    expected = reference_logits(load_reference(folder, torch.float32), TOKENS)
    found = score(load_model(folder), TOKENS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_in_bfloat16_round_where_transformers_rounds(family, tmp_path):
    """Most logits have the very same bits; a matrix product may sum in another order."""
    folder = save_tiny_model(tmp_path / "model", family, torch.bfloat16)
    expected = reference_logits(load_reference(folder, torch.bfloat16), TOKENS).float()
    found = score(load_model(folder, dtype="bfloat16", kernels="reference"), TOKENS)
    assert (found == expected).float().mean() > 0.5
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_in_float64(name):
    """transformers computes RMSNorm in float32 even here; without that the logits agree to 1e-9."""
    tokens = torch.randint(0, 8192, (1, 200), generator=torch.Generator().manual_seed(0))
    found = score(load_model(bundled_path(name), dtype="float64"), tokens)
    expected = reference_logits(load_reference(bundled_path(name)), tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    theirs = reference_logits(load_reference(bundled_path(name), exact=False), tokens)
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "old_style",
    [
        {"rope_theta": 500.0, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_theta": 500.0, "rope_scaling": None},
    ],
)
def test_config_of_transformers_4_means_the_same(old_style, tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | old_style))
    expected = reference_logits(load_reference(folder), TOKENS)
    torch.testing.assert_close(score(load_model(folder, dtype="float64"), TOKENS), expected, rtol=0, atol=1e-10)


def test_scoring_splits_the_batch_by_memory_without_changing_it(tmp_path, monkeypatch):
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float64")
    whole = score(decoder, TOKENS)
    monkeypatch.setattr("runtime.model.scoring.TOKENS_AT_ONCE", 100)
    torch.testing.assert_close(score(decoder, TOKENS), whole, rtol=0, atol=1e-12)
