"""8-bit floats from a checkpoint to a served one: chosen in one word, smoothed where asked, read by everyone."""

from functools import partial

import pytest
import runs
import torch
from runs import compared_with, foreseen_bytes, some_tokens

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import MAX_FP8, round_tokens
from compress.checkpoint.weights import Activations, Fp8
from compress.common.cli import demo_model_path
from compress.cpu.binding import library
from compress.methods.smoothquant import SmoothQuantOptions
from compress.recipe import CalibrationOptions
from compress.recipe_file import parse_recipe
from compress.stages.quantize import QuantizeStage
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.model.loader import load_model

W8A16, W8A8 = Fp8(), Fp8(Activations.FP8)


SHORT = {"calibration": CalibrationOptions(samples=8, length=256), "dtype": "float32"}
prepared = partial(runs.prepared, demo_model_path(), **SHORT)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    out = tmp_path_factory.mktemp("fp8") / "packed"
    assert runs.compress(demo_model_path(), out, QuantizeStage("rtn", W8A8), **SHORT).structure.ok
    return out


def test_the_plan_is_what_is_written(packed):
    plan = prepared(packed.parent / "other", QuantizeStage("rtn", W8A8)).plan
    checkpoint = PackedCheckpoint.open(packed)
    assert plan.bytes_after == checkpoint.files.nbytes
    assert set(checkpoint.schemes.values()) == {W8A8}


def test_what_is_served_was_planned_and_is_close_to_the_model(packed):
    decoder = load_model(packed, device="cpu", dtype="float32")
    lines = [line for line in decoder.description if "fp8" in line]
    assert [line.split(":")[0] for line in lines] == [
        f"6 x {name}" for name in ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj")
    ]
    kernel = "dequantized" if library() is None else "cpu_fp8"
    assert all(f"kernel {kernel} " in line for line in lines)
    assert foreseen_bytes(packed, torch.float32) == decoder.nbytes
    assert compared_with(demo_model_path(), packed, tokens=1024).kl_mean < 0.03


def test_transformers_computes_the_same(packed):
    """Every linear, with the activations that transformers gives it: both round them to the same 8-bit floats.

    Whole models cannot be compared closely: float32 sums in another order, as every library and processor has them,
    move some activation across a boundary of rounding, later layers more, and KL varies tenfold."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    checkpoint, target, errors = PackedCheckpoint.open(packed), Target(torch.device("cpu"), torch.float32), {}

    def compare(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor], found: torch.Tensor) -> None:
        x, weight = inputs[0].flatten(0, 1), checkpoint.packed_weight(name)
        ours = choose_linear(weight.scheme, x.shape[1], target).kernel.prepare(weight, None, target)(x)
        rounded = round_tokens(x, Activations.FP8)
        unrounded, exact = (each.double() @ weight.dequantize().double().T for each in (x, rounded))
        errors[name] = [
            ((each - exact).norm() / exact.norm()).item() for each in (found.flatten(0, 1), ours, unrounded)
        ]

    for name in checkpoint.schemes:
        theirs.get_submodule(name).register_forward_hook(partial(compare, name))
    with torch.no_grad():
        theirs(some_tokens(48))
    assert set(errors) == set(checkpoint.schemes)
    for name, (theirs_error, ours_error, unrounded_error) in errors.items():
        # Float32 sums of n products are off by about sqrt(n) * 2^-24, which is 2e-6 for the longest.
        assert max(theirs_error, ours_error) < 4e-6, name
        assert unrounded_error > 1000 * max(theirs_error, ours_error), name


def test_smoothing_works_with_it(tiny_model, tmp_path):
    result = runs.compress(tiny_model(), tmp_path / "packed", QuantizeStage("smoothquant", W8A8))
    smoothing = [edge for block in result.report["blocks"] for edge in block["smoothing"]]
    assert smoothing
    assert all(edge["loss_after"] <= edge["loss_before"] for edge in smoothing)
    assert set(PackedCheckpoint.open(tmp_path / "packed").schemes.values()) == {W8A8}


def test_scales_have_the_least_error_and_clip_nothing():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 96, generator=generator)
    weight[3] = 0
    importance = torch.rand(96, generator=generator)
    found = W8A16.round(weight, importance)
    assert (weight.abs().amax(1) / found.scales[:, 0].float() < MAX_FP8 * 1.01).all()
    errors = [
        ((each - weight).square() * importance).sum(1) for each in (found.dequantize(), W8A16.round_in_range(weight))
    ]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].sum() < errors[1].sum()
    assert torch.equal(found.dequantize()[3], torch.zeros(96))
    for dtype in (torch.bfloat16, torch.float16):
        tiny = W8A16.round(weight * 1e-9, scale_dtype=dtype)
        assert torch.isfinite(tiny.dequantize()).all()


def test_words_for_it():
    recipe = parse_recipe("stages:\n- quantize: {fp8: true}\n", "r.yaml")
    assert recipe.stages == (QuantizeStage("rtn", W8A8),)
    text = "stages:\n- quantize: {method: smoothquant, fp8: true, alpha: 0.5}\n"
    assert parse_recipe(text, "r.yaml").stages == (QuantizeStage("smoothquant", W8A8, options=SmoothQuantOptions(0.5)),)
    text = "stages:\n- quantize: {fp8: true, activation_bits: 16}\n"
    assert parse_recipe(text, "r.yaml").stages == (QuantizeStage("rtn", W8A16),)
    assert QuantizeStage.build({"fp8": True}).scheme == W8A8
    assert QuantizeStage.build({"fp8": True, "activation_bits": 16}).scheme == W8A16
