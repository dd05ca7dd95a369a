"""Where logits come from: dequantized transformers models, and the agreement of both backends."""

import math
from pathlib import Path

import pytest
import torch
from folders import change_tensors, private_copy
from transformers import AutoModelForCausalLM

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.weights import Int, Scheme
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import TransformersScorer, load_dequantized, open_scorer

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
def test_dense_weights_give_the_logits_of_transformers(tiny_model, options: dict):
    path = tiny_model(dtype=torch.float32, **options)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(TransformersScorer(path).logits(TOKENS), expected)


def test_dtype_follows_the_config_unless_named(tiny_model):
    path = tiny_model(dtype=torch.float32)
    assert load_dequantized(path).dtype == torch.float32
    assert load_dequantized(path, dtype="float64").dtype == torch.float64
    assert TransformersScorer(path, dtype="float64").logits(TOKENS).dtype == torch.float64
    assert load_dequantized(demo_model_path()).dtype == torch.bfloat16
    assert TransformersScorer(demo_model_path()).logits(TOKENS).dtype == torch.float32


def test_missing_and_misshapen_weights_are_named(tiny_model, tmp_path: Path):
    path, name = private_copy(tiny_model(dtype=torch.float32), tmp_path / "model"), "model.norm.weight"
    change_tensors(path, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    with pytest.raises(CheckpointError, match=r"config\.json.*model\.norm\.weight"):
        load_dequantized(path)
    change_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"1 weights.*model\.norm\.weight"):
        load_dequantized(path)


@pytest.mark.parametrize("options", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_packed_weights_give_the_logits_of_their_dequantized_twin(make_packed, options: dict):
    packed, dequantized = make_packed(**options)
    expected = AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(TransformersScorer(packed).logits(TOKENS), expected)


@pytest.mark.parametrize("scheme", [Int(4, 32), Int(4, 64, symmetric=False), Int(8, None), Int(3, 32)])
def test_both_backends_agree_on_packed_checkpoints(make_packed, scheme: Scheme):
    packed, _ = make_packed(scheme, attention_bias=True)
    assert_backends_agree(packed, load_tokenizer(packed))


def test_both_backends_agree_on_a_dense_checkpoint(tiny_model):
    path = tiny_model(dtype=torch.float32, tie_word_embeddings=True)
    assert_backends_agree(path, load_tokenizer(path))


def assert_backends_agree(path: Path, tokenizer) -> None:
    windows = cut_windows(load_texts("pydoc"), tokenizer, length=64, max_tokens=256)
    runtime, cross_check = (open_scorer(path, backend, dtype="float32") for backend in ("runtime", "transformers"))
    result = evaluate(runtime, windows, cross_check)
    assert result.perplexity == pytest.approx(result.baseline_perplexity, rel=1e-4)
    assert abs(result.kl_mean) < 1e-6
