"""Where logits come from: dequantized transformers models, and the agreement of both backends."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from calibration.sources import load_texts
from calibration.tokenizer import load_tokenizer
from compress.checkpoint.demo import demo_model_path
from compress.checkpoint.errors import CheckpointError
from compress.evaluate.perplexity import evaluate
from compress.evaluate.scorers import TransformersScorer, load_dequantized, open_scorer
from compress.evaluate.windows import cut_windows

TOKENS = torch.arange(2, 66).view(2, 32)


def test_demo_perplexity_equals_the_loss_of_transformers():
    path = demo_model_path()
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(path), length=128, max_tokens=1024)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        losses = [model(row[None], labels=row[None]).loss.item() for row in windows.tokens]
    by_hand = math.exp(sum(losses) / len(losses))
    for backend in ("transformers", "runtime"):
        measured = evaluate(open_scorer(path, backend, dtype="float32"), windows)
        assert measured.perplexity == pytest.approx(by_hand, rel=1e-5)
        assert measured.tokens == 8 * 127


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {}])
def test_dense_weights_give_the_logits_of_transformers(make_model, options: dict):
    path = make_model(**options)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(TransformersScorer(path).logits(TOKENS), expected)


def test_dtype_follows_the_config_unless_named(make_model):
    path = make_model()
    assert load_dequantized(path).dtype == torch.float32
    assert load_dequantized(path, dtype="float64").dtype == torch.float64
    assert TransformersScorer(path, dtype="float64").logits(TOKENS).dtype == torch.float64
    assert load_dequantized(demo_model_path()).dtype == torch.bfloat16
    assert TransformersScorer(demo_model_path()).logits(TOKENS).dtype == torch.float32


def test_missing_and_misshapen_weights_are_named(make_model):
    path = make_model()
    tensors = load_file(path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 weights, model\.norm\.weight first"):
        load_dequantized(path)
    save_file(tensors | {"model.norm.weight": norm[:-1].clone()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not fit its own config\.json: .*model\.norm\.weight"):
        load_dequantized(path)
