"""Trellis codes: the search in C against torch, its distortion, feedback between blocks, and a written checkpoint."""

import math
import sys
from itertools import pairwise, product
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
from compress.checkpoint.verify import verify_structure
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
@pytest.mark.parametrize(
    ("bits", "codebook"), [*product((1, 2, 3, 4, 8), CODEBOOKS), *((half, "mul1") for half in (1.5, 2.5, 3.5, 4.5))]
)
def test_the_library_finds_the_states_of_torch(bits: float, codebook: str) -> None:
    values, numbers, pair_bits = gaussian(2), numbers_of(codebook), Exl3(bits, codebook).pair_bits
    expected = search_by_torch(values, numbers, pair_bits)
    for instruction_set in range(min(best_instruction_set(), len(INSTRUCTION_SETS) - 2) + 1):
        found = search_states(values, numbers, pair_bits, instruction_set)
        assert torch.equal(found, expected), INSTRUCTION_SETS[instruction_set]


@pytest.mark.full
@pytest.mark.parametrize(("bits", "block"), [(1.5, 1 << 16), (8, 1 << 14)])
def test_triton_finds_the_states_of_torch(gpu: torch.device, bits: float, block: int) -> None:
    from compress.checkpoint.trellis_search_triton import search_in_triton

    values, numbers, pair_bits = gaussian(1)[:, :128].to(gpu), numbers_of("mul1").to(gpu), Exl3(bits, "mul1").pair_bits
    found = search_in_triton(values, numbers, pair_bits, 32, block)
    assert torch.equal(found, search_by_torch(values, numbers, pair_bits, 32))


@needs_library
def test_threads_change_nothing() -> None:
    values, numbers = gaussian(5), numbers_of("mul1")
    alone = search_states(values, numbers, 5)
    set_threads(3)
    try:
        assert torch.equal(search_states(values, numbers, 5), alone)
    finally:
        set_threads(0)


def follow_each_other(states: Tensor, bits: float) -> bool:
    """Whether each state is the one before it, the last one before the first, followed by its own code."""
    widths = torch.tensor([math.floor(bits), math.ceil(bits)]).repeat(128)
    return torch.equal((states.roll(1, -1) << widths | states & ((1 << widths) - 1)) & 0xFFFF, states)


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.071), (2.5, 0.0375), (3, 0.0185)])
def test_distortion_is_near_the_published_one(bits: float, distortion: float) -> None:
    """QTIP, table 1: 0.069 at 2 bits with the codes of 16 bits; a scalar quantizer of Lloyd and Max has 0.118. A half
    bit more divides it by 2."""
    values, numbers = 0.96 * gaussian(8), numbers_of("mul1")
    found = search_by_torch(values, numbers, Exl3(bits, "mul1").pair_bits)
    assert follow_each_other(found, bits)
    assert float((numbers[found.long()] - values).square().mean() / values.square().mean()) < distortion


@needs_library
def test_distortion_falls_with_every_half_bit() -> None:
    values, numbers = 0.92 * gaussian(8), numbers_of("mul1")
    errors = [
        float((numbers[search_states(values, numbers, pair_bits).long()] - values).square().mean())
        for pair_bits in range(2, 11)
    ]
    ratios = [after / before for before, after in pairwise(errors)]
    assert all(0.45 < ratio < 0.6 for ratio in ratios), ratios


@needs_library
@pytest.mark.parametrize(
    ("bits", "least"), [(1, 0.30), (1.5, 0.145), (2.5, 0.0395), (3, 0.0195), (3.5, 0.0105), (4, 0.0053), (4.5, 0.0029)]
)
def test_packed_states_are_read_back(bits: float, least: float) -> None:
    weight = torch.randn(72, 160, generator=torch.Generator().manual_seed(1))
    encoded = encode_trellis(weight, Exl3(bits, "mul1"))
    assert follow_each_other(states(encoded.trellis, encoded.scheme.pair_bits), bits)
    error = float((encoded.dequantize() - weight).square().mean() / weight.square().mean())
    assert error < least


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
    EXL3.check(Exl3(3.5, "mul1"), (128, 128))
    with pytest.raises(SchemeError, match=r"half bits up to 3\.5, not w4\.5a16"):
        EXL3.check(Exl3(4.5, "mul1"), (128, 128))


@pytest.mark.parametrize(("bits", "words"), [(2.5, 40), (3, 48)])
def test_tensors_are_those_that_exllamav3_asserts(bits: float, words: int) -> None:
    stored = EXL3.encode("m", random_weight((128, 256), Exl3(bits, "mul1"), 1), torch.bfloat16)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()} == {
        "m.trellis": (torch.int16, (16, 8, words)),
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
@pytest.mark.parametrize("bits", [2, 2.5])
def test_the_demo_model_in_both_containers(bits: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, exported = tmp_path / "packed", tmp_path / "exl3"
    options = "--method", "trellis", "--bits", str(bits), "--num-calibration-samples", "4", "--out", str(packed)
    for arguments in (["quantize", *options], ["export", str(packed), "--format", "exl3", "--out", str(exported)]):
        monkeypatch.setattr(sys, "argv", ["compress", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
    first, second = PackedCheckpoint.open(packed), PackedCheckpoint.open(exported)
    assert second.format == "exl3"
    assert first.modules == second.modules
    assert verify_structure(packed).problems == ()
    assert {scheme.bits for scheme in second.schemes.values()} == {bits}
    for module in first.modules[:4]:
        assert torch.equal(first.values(module, torch.float32), second.values(module, torch.float32))


@pytest.mark.parametrize("bits", [3, 2.5])
def test_recipes_keep_the_width(bits: float) -> None:
    stage = QuantizeStage.build({"method": "trellis", "bits": bits})
    assert stage.scheme == Exl3(bits, "mul1")
    assert QuantizeStage.build(stage.to_keys()).scheme == stage.scheme
    assert str(QuantizeStage.build({"method": "trellis", "bits": 3.0}).scheme) == "w3a16 exl3 mul1"


@pytest.mark.parametrize("method", ["gptq", "rtn", "signround"])
def test_other_methods_refuse_half_bits(method: str) -> None:
    with pytest.raises(SchemeError, match=r"bits=2\.5 is not a whole number from 2 to 8.*--method trellis"):
        QuantizeStage.build({"method": method, "bits": 2.5})
    with pytest.raises(SchemeError, match=r"half bits up to 4\.5 .* not 2\.3 bits"):
        QuantizeStage.build({"method": "trellis", "bits": 2.3})
