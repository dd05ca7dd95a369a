"""Mixtures that no family describes, as published: packed one matrix of an expert after the other, by the mapping that
transformers has for loading them."""

import shutil
from pathlib import Path

import pytest
import runs
import torch
from mixture_configs import OTHER_MIXTURES, REFUSED, STACKED_MIXTURES
from runtime_command import runtime_here
from tiny_models import auto_class, compute_in_float64, reference_logits, save_tiny_model

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.evaluate.scorers import load_dequantized
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(10, 8000, (2, 40), generator=torch.Generator().manual_seed(3))
QUICK = {("hy_v3", "gptq"), ("granitemoeshared", "rtn"), ("sarvam_moe", "rtn")}
"""Files with other names, with all experts in one tensor, and with queries, keys and values in one matrix."""
CASES = [
    pytest.param(family, method, marks=() if (family, method) in QUICK else pytest.mark.full)
    for family in OTHER_MIXTURES
    for method in ("rtn", "gptq")
]


def saved(folder: Path, family: str, **options: object) -> Path:
    """A random model as it is published, with the tokenizer of the demo model."""
    save_tiny_model(folder, family, **OTHER_MIXTURES[family] | {"vocab_size": 8192} | options)
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def exact_logits(folder: Path) -> torch.Tensor:
    decoder = load_model(folder, device="cpu", dtype="float64")
    for part in (decoder.body, decoder.language_model):
        compute_in_float64(part)
    return score(decoder, TOKENS)


@pytest.mark.parametrize(("family", "method"), CASES)
def test_packed_weights_compute_what_dequantized_ones_do(tmp_path: Path, family: str, method: str) -> None:
    source, out = saved(tmp_path / "source", family), tmp_path / "packed"
    result = runs.compress(source, out, QuantizeStage(method, Int(4, 16)))
    assert result.structure.ok
    assert verify_structure(out).ok
    packed = PackedCheckpoint.open(out)
    assert len([module for module in packed.modules if ".experts." in module]) in (8 * 3, 2 * 8 * 3)
    assert not any(".gate." in name or ".router." in name for name in packed.modules)
    expected = reference_logits(compute_in_float64(load_dequantized(out, dtype="float64")), TOKENS)
    torch.testing.assert_close(exact_logits(out), expected, rtol=0, atol=1e-9 * float(expected.std() + 1))
    if family not in STACKED_MIXTURES:
        loaded = auto_class(family).from_pretrained(out, dtype=torch.float32, experts_implementation="eager").eval()
        found = reference_logits(loaded, TOKENS).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))
    dense = reference_logits(load_dequantized(source, dtype="float32"), TOKENS)
    assert torch.corrcoef(torch.stack((dense.flatten().double(), expected.flatten())))[0, 1] > 0.8


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "aria_text" else pytest.mark.full) for name in OTHER_MIXTURES]
)
def test_a_dense_export_has_the_names_and_numbers_that_files_had(tmp_path: Path, family: str) -> None:
    source, out = saved(tmp_path / "source", family, dtype=torch.float32), tmp_path / "packed"
    runs.compress(source, out, QuantizeStage("rtn", Int(4, 16)))
    dense = export_checkpoint(out, "dense", tmp_path / "dense")
    before, after = TensorFiles.open(source), TensorFiles.open(dense)
    assert before.names() == after.names()
    assert all(before.shape(name) == after.shape(name) for name in before.names())
    loaded = auto_class(family).from_pretrained(dense, dtype=torch.float32, experts_implementation="eager").eval()
    expected = exact_logits(out)
    found = reference_logits(loaded, TOKENS).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))


@pytest.mark.full
@pytest.mark.parametrize("family", OTHER_MIXTURES)
def test_the_packed_model_generates(tmp_path: Path, family: str) -> None:
    runs.compress(saved(tmp_path / "source", family), tmp_path / "packed", QuantizeStage("rtn", Int(4, 16)))
    answer = runtime_here("generate", "packed", "--prompt", "Once", "--max-tokens", "4", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "olmo_hybrid" else pytest.mark.full) for name in REFUSED]
)
def test_what_is_neither_compressed_nor_served_is_refused_before_the_work(tmp_path: Path, family: str) -> None:
    """Files whose tensors transformers joins, experts that compute nothing, and states."""
    source = save_tiny_model(tmp_path / "source", family, **REFUSED[family] | {"vocab_size": 8192})
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, source)
    for work in (
        lambda: runs.prepared(source, tmp_path / "out", QuantizeStage("rtn", Int(4, 16))),
        lambda: load_model(source, device="cpu"),
    ):
        with pytest.raises(CheckpointError) as refused:
            work()
        assert "\n" not in str(refused.value)
