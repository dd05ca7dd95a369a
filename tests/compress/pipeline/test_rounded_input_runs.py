"""Weights of 4 bits with inputs of 8 and 4 bits, from a checkpoint to a served one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from runs import compared_with, some_tokens, with_outliers
from torch import nn

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import round_tokens
from compress.checkpoint.weights import Activations, Int
from compress.common.cli import demo_model_path
from compress.evaluate.scorers import RuntimeScorer
from compress.methods.signround import SignRoundOptions
from compress.pipeline.block import LoadedBlock
from compress.pipeline.smoothing import activations_quantized
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

W4A8, W4A4 = (Int(4, 64, activations=kind) for kind in (Activations.INT8, Activations.INT4))
compress = partial(runs.compress, calibration=CalibrationOptions(samples=16, length=256), dtype="float32")


def logits_by_hand(packed: Path, tokens: torch.Tensor, kind: Activations | None) -> torch.Tensor:
    """Log-probabilities of the dense model with dequantized weights, whose packed linears round their inputs."""
    from transformers import AutoModelForCausalLM

    def hook(_module: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor]:
        return (round_tokens(args[0], kind) if kind else args[0],)

    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    checkpoint = PackedCheckpoint.open(packed)
    for module in checkpoint.modules:
        linear = model.get_submodule(module)
        linear.weight = nn.Parameter(checkpoint.packed_weight(module).dequantize(torch.float32))
        linear.register_forward_pre_hook(hook)
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    return (expected.exp() * (expected - found)).sum(-1).mean().item()


@pytest.mark.parametrize("scheme", [W4A8, W4A4], ids=str)
def test_what_is_served_rounds_inputs_as_the_checkpoint_says(scheme: Int, tmp_path: Path) -> None:
    result = compress(demo_model_path(), tmp_path / "packed", QuantizeStage("rtn", scheme))
    assert result.structure.ok
    assert set(PackedCheckpoint.open(tmp_path / "packed").schemes.values()) == {scheme}
    tokens = some_tokens(8)  # of more, an input may be rounded to its other neighbour, after sums in another order
    served = RuntimeScorer(tmp_path / "packed", dtype="float32").logits(tokens).log_softmax(-1)
    rounded, exact = (logits_by_hand(tmp_path / "packed", tokens, kind) for kind in (scheme.activations, None))
    assert divergence(rounded, served) < 1e-4 * divergence(exact, served)


def test_codes_take_the_bytes_of_codes_with_16_bit_inputs(tmp_path: Path) -> None:
    for name, scheme in (("w4a4", W4A4), ("w4a16", Int(4, 64))):
        compress(demo_model_path(), tmp_path / name, QuantizeStage("rtn", scheme))
    assert runs.same_bytes(tmp_path / "w4a4", tmp_path / "w4a16")


def test_gradients_pass_through_rounded_inputs() -> None:
    linear = nn.Linear(64, 8, bias=False)
    block = LoadedBlock("block", nn.ModuleDict({"linear": linear}))
    x = torch.randn(5, 64, requires_grad=True)
    with activations_quantized(block, {"linear": W4A4}):
        y = linear(x)
    torch.testing.assert_close(y, round_tokens(x.detach(), Activations.INT4) @ linear.weight.T)
    y.sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand_as(x))


@pytest.mark.full
def test_methods_learn_weights_of_rounded_inputs(tmp_path: Path) -> None:
    kl = {}
    for method in ("rtn", "gptq", "awq", "signround"):
        options = SignRoundOptions(steps=20) if method == "signround" else None
        compress(demo_model_path(), tmp_path / method, QuantizeStage(method, W4A4, options=options))
        kl[method] = compared_with(demo_model_path(), tmp_path / method, tokens=2048).kl_mean
    assert kl["signround"] < kl["rtn"]
    assert max(kl.values()) < 2 * kl["rtn"]


@pytest.mark.full
def test_a_rotation_spreads_outliers_of_4_bit_inputs(tmp_path: Path) -> None:
    model = with_outliers(demo_model_path(), tmp_path / "model", [11], 32.0)
    kl = {}
    for name, stages in (("plain", ()), ("rotated", (RotateStage(),))):
        compress(model, tmp_path / name, *stages, QuantizeStage("rtn", W4A4))
        kl[name] = compared_with(model, tmp_path / name, tokens=2048).kl_mean
    assert kl["rotated"] < 0.5 * kl["plain"]
