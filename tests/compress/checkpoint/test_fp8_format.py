"""8-bit floats in a checkpoint: stored as compressed-tensors has them, read back to the bit, refused when damaged."""

import pytest
import torch
from folders import change_tensors

from compress.checkpoint.config import read_config, write_config
from compress.checkpoint.formats.awq import AWQ
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import FP8, quantize_tokens, round_tokens
from compress.checkpoint.verify import verify_against, verify_structure
from compress.checkpoint.weights import Activations, Fp8, Int, Scheme
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError, SchemeError

W8A16, W8A8 = Fp8(), Fp8(Activations.FP8)


@pytest.mark.parametrize(("scheme", "layout"), [(W8A8, "float-quantized"), (W8A16, "naive-quantized")], ids=str)
def test_codes_come_back_to_the_bit(dense_folder, pack, tmp_path, scheme, layout):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: scheme)
    assert verify_structure(tmp_path / "packed").problems == ()
    assert verify_against(tmp_path / "packed", {name: digest(weight) for name, weight in weights.items()}) == []
    packed = PackedCheckpoint.open(tmp_path / "packed")
    assert packed.format == "compressed-tensors"
    assert set(packed.schemes.values()) == {scheme}
    assert read_config(tmp_path / "packed")["quantization_config"]["format"] == layout
    for module, weight in weights.items():
        stored = packed.tensor(f"{module}.weight")
        assert stored.dtype == FP8
        assert torch.equal(stored.view(torch.uint8), weight.qweight.view(torch.uint8))
        assert torch.equal(packed.weight(module).dequantize(torch.bfloat16), weight.dequantize(torch.bfloat16))


def test_a_changed_code_is_noticed(dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: W8A8)
    module, weight = next(iter(weights.items()))
    other = CodedWeight(weight.qweight.clone(), weight.scales, W8A8)
    other.qweight.view(torch.uint8)[0, 0] ^= 0x80  # also where that makes 0 of -0
    assert digest(other) != digest(weight)
    digests = {name: digest(each) for name, each in weights.items()} | {module: digest(other)}
    assert len(verify_against(tmp_path / "packed", digests)) == 1


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_no_numbers_are_refused(dense_folder, pack, tmp_path, code):
    module = next(iter(pack(dense_folder, tmp_path / "packed", lambda module: W8A8)))
    change_tensors(tmp_path / "packed", lambda t: t[f"{module}.weight"].view(torch.uint8)[1].fill_(code))
    with pytest.raises(CheckpointError, match=rf"{module}\.weight .*\b256 NaN"):
        PackedCheckpoint.open(tmp_path / "packed").weight(module)
    problems = verify_structure(tmp_path / "packed").problems
    assert any(f"{module}.weight" in problem and "NaN" in problem for problem in problems)


def test_scales_that_are_not_finite_are_reported(dense_folder, pack, tmp_path):
    module = next(iter(pack(dense_folder, tmp_path / "packed", lambda module: W8A8)))
    change_tensors(tmp_path / "packed", lambda t: t[f"{module}.weight_scale"][3].fill_(float("inf")))
    assert any(problem.startswith(f"{module} has 1 ") for problem in verify_structure(tmp_path / "packed").problems)


def test_one_scale_for_a_matrix_is_read(dense_folder, pack, tmp_path):
    """As checkpoints of other tools have it, in float32."""
    weights = pack(dense_folder, tmp_path / "packed", lambda module: W8A8)
    scales = {f"{module}.weight_scale": torch.tensor([0.25 + 1e-6]) for module in weights}
    change_tensors(tmp_path / "packed", lambda tensors: tensors.update(scales))
    config = read_config(tmp_path / "packed")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    write_config(tmp_path / "packed", config)
    for module, weight in weights.items():
        read = PackedCheckpoint.open(tmp_path / "packed").weight(module)
        assert read.scales.shape == (weight.shape[0], 1)
        expected = weight.qweight.double() * read.scales[0].double()
        assert torch.equal(read.dequantize(torch.float64), expected)


def test_measured_scales_of_inputs_are_not_used(dense_folder, pack, tmp_path):
    modules = pack(dense_folder, tmp_path / "packed", lambda module: W8A8)
    scales = {f"{module}.input_scale": torch.tensor([0.01]) for module in modules}
    change_tensors(tmp_path / "packed", lambda tensors: tensors.update(scales))
    config = read_config(tmp_path / "packed")
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    write_config(tmp_path / "packed", config)
    assert set(PackedCheckpoint.open(tmp_path / "packed").schemes.values()) == {W8A16}
    assert verify_structure(tmp_path / "packed").problems == ()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}, "8-bit"),
        ({"weights": {"num_bits": 4, "type": "float", "strategy": "channel"}}, "4-bit"),
    ],
    ids=str,
)
def test_other_floats_are_refused_by_name(dense_folder, pack, tmp_path, change, complaint):
    pack(dense_folder, tmp_path / "packed", lambda module: W8A8)
    config = read_config(tmp_path / "packed")
    config["quantization_config"]["config_groups"]["group_0"] |= change
    write_config(tmp_path / "packed", config)
    with pytest.raises(CheckpointError, match=complaint):
        PackedCheckpoint.open(tmp_path / "packed")


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, Activations.INT8),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, Activations("float", stored=".input_scale")),
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "tensor"}, Activations("float", scales="other")),
        ({"num_bits": 8, "type": "float", "dynamic": True, "group_size": 32}, Activations("float", 8, 32)),
    ],
    ids=str,
)
def test_other_rounding_of_inputs_is_told_apart(dense_folder, pack, tmp_path, given, inputs):
    pack(dense_folder, tmp_path / "packed", lambda module: W8A8)
    config = read_config(tmp_path / "packed")
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = given
    write_config(tmp_path / "packed", config)
    packed = PackedCheckpoint.open(tmp_path / "packed")
    assert set(packed.schemes.values()) == {W8A16}
    assert packed.inputs == dict.fromkeys(packed.modules, inputs)


def test_what_export_makes_of_it(dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: W8A8)
    for format in (GPTQ.name, AWQ.name):
        with pytest.raises(SchemeError, match=f"{format} .*float.*--format dense"):
            export_checkpoint(tmp_path / "packed", format, tmp_path / format)
        assert not (tmp_path / format).exists()
    export_checkpoint(tmp_path / "packed", "compressed-tensors", tmp_path / "again")
    again = PackedCheckpoint.open(tmp_path / "again")
    assert all(digest(again.packed_weight(module)) == digest(weight) for module, weight in weights.items())
    export_checkpoint(tmp_path / "packed", "dense", tmp_path / "dense")
    dense = PackedCheckpoint.open(tmp_path / "dense")
    for module, weight in weights.items():
        assert torch.equal(dense.tensor(f"{module}.weight"), weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"group_size": 64},
        {"symmetric": False},
        {"sparsity": "2:4"},
        {"rank": 8},
        {"outliers": 2},
        {"activation_bits": 4},
    ],
    ids=str,
)
def test_schemes_that_do_not_exist(options):
    with pytest.raises(SchemeError):
        Scheme.from_dict({"bits": 8, "group_size": None, "fp8": True} | options)


def test_a_scheme_survives_its_dictionary():
    assert Scheme.from_dict(W8A8.to_dict()) == W8A8
    assert str(W8A8) == "w8a8 fp8 channel"
    assert W8A8.stored_bits(10, 20) == 10 * (20 * 8 + 16)


def test_parts_that_contradict_the_scheme():
    codes, scale = torch.zeros(4, 8), torch.ones(4, 1)
    with pytest.raises(SchemeError, match=r"torch\.float32"):
        CodedWeight(codes, scale, W8A8)
    with pytest.raises(SchemeError, match=r"\(1, 1\).*\(4, 1\)"):
        CodedWeight(codes.to(FP8), scale[:1], W8A8)
    with pytest.raises(SchemeError, match=r"w8a16.*float8_e4m3fn"):
        CodedWeight(codes.to(FP8), scale, Int(8, None))
    with pytest.raises(SchemeError, match="bfloat16"):
        COMPRESSED_TENSORS.encode("m", CodedWeight(codes.to(FP8), scale + 1e-4, W8A8), torch.bfloat16)


def test_tokens_are_rounded_to_the_nearest_float():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[1] = 0
    x[2, 0] = 1000
    levels, scale = quantize_tokens(x, Activations.FP8)
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()
    grid = torch.cat((-numbers.flip(0), numbers))
    nearest = (x.unsqueeze(-1) / scale.clamp_min(1e-300).unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.allclose((x / scale.clamp_min(1e-300) - levels).abs(), nearest, atol=1e-6)
    assert torch.equal(levels.abs().amax(-1), torch.tensor([448.0, 0, 448, 448, 448], dtype=torch.float64))
    assert torch.equal(round_tokens(x, Activations.FP8), levels * scale)
    x[3, 1] = float("nan")
    assert not torch.isfinite(quantize_tokens(x, Activations.FP8)[1][3])
