"""Trellis codes: the search in C against torch, its distortion, feedback between blocks, and a written checkpoint."""

import sys
from pathlib import Path

import pytest
import torch
from runs import compress, some_tokens
from tiny_models import random_weight
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.checkpoint.formats.exl3 import EXL3
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.trellis_search import TurnedHessian, encode_trellis, search_by_torch
from compress.checkpoint.weights import Exl3, Int
from compress.checkpoint.weights.exl3 import CODEBOOKS, codebook_values, states
from compress.checkpoint.writer import export_checkpoint
from compress.cli import main
from compress.common.cli import bundled_path
from compress.common.errors import RecipeError, SchemeError
from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set, library, set_threads
from compress.cpu.trellis import search_states
from compress.methods.shared.hessian import HessianCache
from compress.methods.trellis import turned_hessian
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

needs_library = pytest.mark.skipif(library() is None, reason="the library is not compiled")


def gaussian(count: int) -> Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(0))


def numbers_of(codebook: str) -> Tensor:
    return codebook_values(codebook).float()


@needs_library
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_the_library_finds_the_states_of_torch(bits: int, codebook: str) -> None:
    values, numbers = gaussian(2), numbers_of(codebook)
    expected = search_by_torch(values, numbers, bits)
    for instruction_set in range(min(best_instruction_set(), len(INSTRUCTION_SETS) - 2) + 1):
        found = search_states(values, numbers, bits, instruction_set)
        assert torch.equal(found, expected), INSTRUCTION_SETS[instruction_set]


@needs_library
def test_threads_change_nothing() -> None:
    values, numbers = gaussian(5), numbers_of("mul1")
    alone = search_states(values, numbers, 2)
    set_threads(3)
    try:
        assert torch.equal(search_states(values, numbers, 2), alone)
    finally:
        set_threads(0)


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.071), (3, 0.0185)])
def test_distortion_is_near_the_published_one(bits: int, distortion: float) -> None:
    """QTIP, table 1: 0.069 at 2 bits with the codes of 16 bits; a scalar quantizer of Lloyd and Max has 0.118."""
    values, numbers = 0.96 * gaussian(8), numbers_of("mul1")
    found = search_by_torch(values, numbers, bits)
    assert torch.equal((found.roll(1, -1) << bits | found & ((1 << bits) - 1)) & 0xFFFF, found)  # cyclic
    assert float((numbers[found.long()] - values).square().mean() / values.square().mean()) < distortion


@needs_library
@pytest.mark.parametrize("bits", [1, 3, 4])
def test_packed_states_are_read_back(bits: int) -> None:
    weight = torch.randn(72, 160, generator=torch.Generator().manual_seed(1))
    encoded = encode_trellis(weight, Exl3(bits, "mul1"))
    stream = states(encoded.trellis, bits)
    assert torch.equal((stream.roll(1, -1) << bits | stream & ((1 << bits) - 1)) & 0xFFFF, stream)
    error = float((encoded.dequantize() - weight).square().mean() / weight.square().mean())
    assert error < {1: 0.30, 3: 0.0195, 4: 0.0053}[bits]


@needs_library
def test_feedback_lowers_the_error_under_the_hessian() -> None:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(600, 128, generator=generator) @ torch.randn(128, 128, generator=generator)
    weight = torch.randn(32, 128, generator=generator)
    statistics = InputStatistics(128, hessian=True)
    statistics.update(inputs)
    turned, facts = turned_hessian(HessianCache(statistics))
    assert facts["damping"] == 0.01

    def error(hessian: TurnedHessian | None) -> float:
        difference = encode_trellis(weight, Exl3(2, "mul1"), hessian).dequantize() - weight
        return float((inputs @ difference.T).square().mean())

    fed, scaled = error(turned), error(TurnedHessian(turned.values, None))
    assert fed < 0.8 * scaled < 0.8 * error(None)


def test_it_writes_trellis_codes_only() -> None:
    with pytest.raises(RecipeError, match="writes trellis codes"):
        QuantizeStage("trellis", Int(4))


@pytest.mark.parametrize("key", ["group_size", "activation_bits"])
def test_groups_and_rounded_inputs_are_refused(key: str) -> None:
    with pytest.raises(SchemeError, match="no groups and no 8-bit inputs"):
        QuantizeStage.build({"method": "trellis", key: 64 if key == "group_size" else 8})


def test_exllamav3_pads_scales_and_readers_cut_them() -> None:
    weight = random_weight((200, 300), Exl3(2, "mul1"), 1)
    stored = EXL3.encode("m", weight, torch.float16)
    assert [tuple(stored[f"m.{name}"].shape) for name in ("suh", "svh")] == [(384,), (256,)]
    assert stored["m.trellis"] is weight.trellis or torch.equal(stored["m.trellis"], weight.trellis)
    assert stored["m.suh"][300:].abs().sum() == stored["m.svh"][200:].abs().sum() == 0
    bias = EXL3.encode_bias(torch.ones(200))
    assert (len(bias), float(bias.sum())) == (256, 200)
    with pytest.raises(SchemeError, match="trellis codes only"):
        EXL3.check(Int(4), (128, 128))


def test_tensors_are_those_that_exllamav3_asserts() -> None:
    stored = EXL3.encode("m", random_weight((128, 256), Exl3(3, "mul1"), 1), torch.bfloat16)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()} == {
        "m.trellis": (torch.int16, (16, 8, 48)),
        "m.suh": (torch.float16, (256,)),
        "m.svh": (torch.float16, (128,)),
        "m.mul1": (torch.int32, ()),
    }
    assert int(stored["m.mul1"].view(torch.uint32)) == 0x83DCD12D


def test_the_head_is_described_apart_from_the_layers() -> None:
    layers = {"m": Exl3(2, "mul1"), "n": Exl3(3, "mul1")}
    dense = EXL3.quantization_config(layers, ["lm_head"])
    packed = EXL3.quantization_config(layers | {"lm_head": Exl3(6, "mul1")}, [])
    assert (dense["bits"], dense["head_bits"]) == (2.5, 16)
    assert (packed["bits"], packed["head_bits"]) == (2.5, 6)


def test_experts_of_a_layer_share_their_width() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in (0, 1) for expert in (0, 1)]
    widths = dict(zip(names, (Exl3(2, "mul1"), Exl3(2, "mul1"), Exl3(3, "mul1"), Exl3(3, "mul1")), strict=True))
    assert EXL3.quantization_config(widths, [])["bits"] == 2.5
    with pytest.raises(SchemeError, match=r"layers\.1\.mlp\.experts\.\*\.up_proj"):
        EXL3.quantization_config(widths | {names[3]: Exl3(4, "mul1")}, [])


@needs_library
@pytest.mark.full
def test_experts_are_encoded_and_served(tmp_path: Path) -> None:
    packed, exported = tmp_path / "packed", tmp_path / "exl3"
    stage = QuantizeStage("trellis", Exl3(3, "mul1"), ignore=("*.self_attn.*", "model.layers.[1-5].*"))
    compress(bundled_path("demo-mixture"), packed, stage)
    export_checkpoint(packed, "exl3", exported)
    tokens = some_tokens()
    dense = score(load_model(bundled_path("demo-mixture"), dtype="float32"), tokens)
    first, second = (score(load_model(path, dtype="float32"), tokens) for path in (packed, exported))
    assert sum(".experts." in module for module in PackedCheckpoint.open(exported).modules) == 8 * 3
    assert torch.equal(first, second)
    divergence = torch.nn.functional.kl_div(
        first.log_softmax(-1), dense.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert 0 < float(divergence) / tokens.numel() < 0.2


@needs_library
@pytest.mark.full
def test_the_demo_model_in_both_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, exported = tmp_path / "packed", tmp_path / "exl3"
    options = "--method", "trellis", "--bits", "2", "--num-calibration-samples", "4", "--out", str(packed)
    for arguments in (["quantize", *options], ["export", str(packed), "--format", "exl3", "--out", str(exported)]):
        monkeypatch.setattr(sys, "argv", ["compress", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
    first, second = PackedCheckpoint.open(packed), PackedCheckpoint.open(exported)
    assert second.format == "exl3"
    assert first.modules == second.modules
    for module in first.modules[:4]:
        assert torch.equal(first.values(module, torch.float32), second.values(module, torch.float32))


def test_recipes_keep_the_width() -> None:
    stage = QuantizeStage.build({"method": "trellis", "bits": 3})
    assert stage.scheme == Exl3(3, "mul1")
    assert QuantizeStage.build(stage.to_keys()).scheme == stage.scheme
