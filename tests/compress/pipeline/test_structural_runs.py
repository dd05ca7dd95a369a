"""Models of no family: their linears are found by structure, and the plan says what transformers cannot run."""

import shutil
from pathlib import Path

import pytest
import runs
import torch
from covering import sample
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.evaluate.scorers import load_dequantized
from compress.stages.quantize import QuantizeStage

TOKENS = torch.randint(10, 8000, (1, 24), generator=torch.Generator().manual_seed(0))
RUN_PACKED = {
    "biogpt": {},
    "ctrl": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
}
"""Tied heads of another name, an embedding of another name, a projected embedding."""
READ_WEIGHTS = {
    "falcon": {},
    "gpt_bigcode": {},
    "mamba2": {"head_dim": 16, "num_heads": 8, "state_size": 16, "n_groups": 1},
    "nanochat": {"head_dim": 16},
    "recurrent_gemma": {},
}
"""Their modules read the weight of a linear."""


def packed_model(folder: Path, family: str, options: dict[str, object]) -> tuple[Path, list[str]]:
    """A packed model with its notes."""
    source = save_tiny_model(folder / "source", family, **options | {"vocab_size": 8192})
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, source)
    result = runs.compress(source, folder / "out", QuantizeStage("rtn", Int(4, 16)))
    assert result.structure.ok
    return folder / "out", [note for note in result.report["plan"]["notes"] if "export --format dense" in note]


@pytest.mark.parametrize("family", sample(RUN_PACKED))
@torch.no_grad()
def test_transformers_runs_what_was_packed_by_structure(family: str, tmp_path: Path) -> None:
    out, notes = packed_model(tmp_path, family, RUN_PACKED[family])
    assert not notes
    expected = load_dequantized(out, dtype="float32")(TOKENS, use_cache=False).logits
    found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.full
@pytest.mark.parametrize("family", READ_WEIGHTS)
def test_the_plan_says_what_transformers_cannot_run_packed(family: str, tmp_path: Path) -> None:
    out, notes = packed_model(tmp_path, family, READ_WEIGHTS[family])
    assert notes
    with pytest.raises(AttributeError, match="weight"):
        AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(TOKENS, use_cache=False)
    assert load_dequantized(out, dtype="float32")(TOKENS, use_cache=False).logits.isfinite().all()
