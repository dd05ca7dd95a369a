"""Every registered family, packed by the main methods, computes what its own dequantized weights compute, here and in
transformers."""

from pathlib import Path

import pytest
import torch
from runs import compress
from tiny_configs import MIXTURES
from tiny_models import auto_class, compute_in_float64, reference_logits
from transformers import PreTrainedModel

from compress.checkpoint.config import read_config
from compress.checkpoint.formats.base import TRANSFORMERS
from compress.checkpoint.formats.readers import readers
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.evaluate.scorers import load_dequantized
from compress.models.registry import FAMILIES
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

METHODS = ["awq", "gptq", "rtn"]
UNREADABLE = {"mamba2"}
"""Families whose packed weights transformers does not load, which the table says."""
DENSE = ["llama_biased", *sorted(set(FAMILIES) - MIXTURES)]
QUICK = {
    "arcee": "rtn",
    "apertus": "gptq",
    "cohere2": "awq",
    "gemma2": "awq",
    "gemma4_text": "awq",
    "lfm2": "awq",
    "llama_biased": "awq",
    "phi3": "awq",
    "qwen2_moe": "awq",
    "qwen3_5_text": "awq",
    "youtu": "awq",
}
"""One of each kind of block for the quick tier."""
CASES = [
    pytest.param(family, method, marks=[pytest.mark.full] * (QUICK.get(family) != method))
    for family in [*DENSE, *sorted(MIXTURES)]
    for method in METHODS
]
FIRST = 10
"""First token whose logits are compared: transformers zeros the row of the pad token in some models."""
TOKENS = torch.randint(FIRST, 8000, (2, 40), generator=torch.Generator().manual_seed(3))


def load_packed(out: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Loads as a user of transformers does, with compressed-tensors."""
    loader = auto_class(read_config(out)["model_type"])
    return loader.from_pretrained(out, dtype=dtype, experts_implementation="eager").eval()


def is_refused(out: Path) -> bool:
    """Whether transformers was measured not to load it."""
    packed = PackedCheckpoint.open(out)
    known = readers(packed.format, packed.config, packed.schemes.values())
    return any(each.engine == TRANSFORMERS and each.loads is False for each in known)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_packed_weights_compute_what_dequantized_ones_do(tiny_model, tmp_path: Path, family: str, method: str) -> None:
    # transformers leaves experts that it decompresses in the dtype of the checkpoint.
    dtype = torch.float32 if family in MIXTURES else torch.bfloat16
    source, out = tiny_model(family, dtype), tmp_path / "packed"
    result = compress(source, out, QuantizeStage(method, Int(4, 16)))
    assert result.structure.ok
    assert not result.report["recovered"]
    assert not (tmp_path / "packed.partial").exists()
    expected = reference_logits(compute_in_float64(load_dequantized(out, dtype="float64")), TOKENS)
    served = score(load_model(out, dtype="float64"), TOKENS)
    expected, served = expected[..., FIRST:], served[..., FIRST:]
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-9 * float(expected.std() + 1))
    assert is_refused(out) or family not in UNREADABLE
    if not is_refused(out):
        found = reference_logits(load_packed(out, torch.float32), TOKENS)[..., FIRST:].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))
    # A wrong tensor leaves nothing of random weights.
    dense = score(load_model(source, dtype="float32"), TOKENS)[..., FIRST:].double()
    assert torch.nn.functional.cosine_similarity(served.flatten(), dense.flatten(), dim=0) > 0.5


@pytest.mark.full
def test_a_hybrid_whose_mixtures_have_no_experts(tiny_model, tmp_path: Path) -> None:
    source, out = tiny_model("granitemoehybrid", torch.float32, num_local_experts=0), tmp_path / "packed"
    assert compress(source, out, QuantizeStage("awq", Int(4, 16))).structure.ok
    assert sum("shared_mlp" in name for name in PackedCheckpoint.open(out).modules) == 2 * 3
    expected = reference_logits(compute_in_float64(load_dequantized(out, dtype="float64")), TOKENS)
    found = score(load_model(out, dtype="float64"), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.std() + 1))


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in DENSE if family not in UNREADABLE])
def test_transformers_decompresses_every_linear_to_the_same_numbers(tiny_model, tmp_path: Path, family: str) -> None:
    compress(tiny_model(family), tmp_path / "packed", QuantizeStage("rtn", Int(4, 16)))
    packed, model = PackedCheckpoint.open(tmp_path / "packed"), load_packed(tmp_path / "packed", torch.bfloat16)
    reference_logits(model, TOKENS)
    for module in packed.modules:
        assert torch.equal(model.get_submodule(module).weight, packed.values(module, torch.bfloat16)), module


@pytest.mark.full
@pytest.mark.parametrize("family", [*DENSE, *sorted(MIXTURES)])
def test_quality_is_measured(tiny_model, tmp_path: Path, family: str) -> None:
    quality = compress(tiny_model(family), tmp_path / "packed", QuantizeStage("rtn", Int(8, 16)), measure=True).quality
    # Rounded inputs choose other experts in mixtures of random weights: 0.1, where most families have 0.0001.
    assert 0 < quality["kl_mean"] < 0.5
    assert quality["backend"] == "runtime"
