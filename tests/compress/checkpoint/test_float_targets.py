"""Floats in groups as targets: what rounding gives, and the bytes and values of compressed-tensors bit for bit."""

import json
from itertools import product

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
from safetensors.torch import save_file
from tiny_models import random_weight
from torch import Tensor, nn

from compress.checkpoint.float_scales import E2M1, E4M3, Numbers, positive_floats
from compress.checkpoint.form_grids import DIVISOR, divisor_of
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import BlockFp8, Fp8, Mxfp4, Mxfp8, Nvfp4, Scheme
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.coded import CodedWeight, powers_of_two
from compress.checkpoint.weights.forms import E2M1_VALUES
from compress.common.errors import CheckpointError, SchemeError

BF16 = torch.bfloat16
M = "model.layers.0.mlp.up_proj"
GROUPED = Nvfp4(), Mxfp4(), Mxfp8()
PRESETS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "mxfp8": "MXFP8A16"}


def heavy_tailed(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) ** 3 * 0.01


def described(scheme: Scheme) -> QuantizationScheme:
    block = COMPRESSED_TENSORS.quantization_config({M: scheme}, [])
    return QuantizationScheme(**QuantizationConfig(**block).config_groups["group_0"].model_dump())


@pytest.mark.parametrize("numbers", [E2M1(), E4M3()], ids=lambda numbers: type(numbers).__name__)
def test_numbers_are_the_nearest_ties_to_even(numbers: Numbers) -> None:
    codes = torch.arange(8 if numbers.largest == 6 else 127, dtype=torch.uint8)
    exact = torch.tensor(E2M1_VALUES)[:8] if numbers.largest == 6 else codes.view(FP8).float()
    assert torch.equal(numbers.nearest(exact), exact)
    assert torch.equal(numbers.codes(exact), codes)
    assert torch.equal(numbers.codes(-exact[1:]), codes[1:] + len(codes) + (numbers.largest != 6))
    middle = (exact[1:] + exact[:-1]) / 2
    even = torch.where(codes[1:] % 2 == 0, exact[1:], exact[:-1])
    assert torch.equal(numbers.nearest(middle), even)
    assert torch.equal(numbers.nearest(-middle), -even)
    assert torch.equal(numbers.nearest(torch.nextafter(middle, exact[1:])), exact[1:])
    assert torch.equal(numbers.nearest(torch.tensor([1e30, -1e30])), torch.tensor([1.0, -1.0]) * numbers.largest)


@pytest.mark.parametrize("scheme", GROUPED, ids=str)
def test_compressed_tensors_gives_the_same_bytes_and_values(scheme: Scheme, tmp_path) -> None:
    weight = heavy_tailed(48, 128)
    rounded = scheme.round(weight)
    ours = COMPRESSED_TENSORS.encode(M, rounded, BF16)
    theirs = described(scheme)
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(nn.Linear, theirs).value)
    given = {name.rpartition(".")[2]: tensor for name, tensor in ours.items()}
    values = compressor.decompress(dict(given), theirs)["weight"]
    assert torch.equal(values.to(BF16), rounded.dequantize(BF16))
    scale = ours[f"{M}.weight_scale"]
    scale = scale.float() if scale.dtype == FP8 else torch.exp2(scale.float() - 127)
    dense = {"weight": weight, "weight_scale": scale}
    if scheme == Nvfp4():
        dense["weight_global_scale"] = ours[f"{M}.weight_global_scale"]
    packed = compressor.compress(dense, theirs)
    assert {name.removeprefix(f"{M}.") for name in ours} == set(packed)
    for name, tensor in packed.items():
        stored = ours[f"{M}.{name}"]
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored.view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("scheme", GROUPED, ids=str)
def test_the_description_is_their_preset(scheme: Scheme) -> None:
    ours, preset = described(scheme), preset_name_to_scheme(PRESETS[scheme.word], ["Linear"])
    found, expected = ours.weights.model_dump(), preset.weights.model_dump()
    for key in expected.keys() - {"observer", "observer_kwargs", "actorder"}:
        assert found[key] == expected[key], key
    assert ours.input_activations is None
    assert ours.format == infer_module_format(nn.Linear, ours)


@pytest.mark.parametrize("scheme", [BlockFp8(), Fp8(), Fp8.target()], ids=str)
def test_formats_of_8_bit_floats_are_those_that_they_infer(scheme: Scheme) -> None:
    assert described(scheme).format == infer_module_format(nn.Linear, described(scheme))


@pytest.mark.parametrize("scheme", [Nvfp4(), Mxfp4()], ids=str)
def test_scales_have_the_least_error_of_all(scheme: Scheme) -> None:
    """Every stored scale is tried here; the search tries a few, among which the best one nearly always is."""
    weight = heavy_tailed(16, 4 * scheme.group_size)
    importance = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(1)) + 0.1
    columns = importance / importance.mean() + 1e-4
    groups = weight.double().view(-1, 1, scheme.group_size)
    floats = positive_floats() / divisor_of(float(weight.abs().max()))
    scales = (floats if scheme == Nvfp4() else powers_of_two(torch.arange(255)))[1:].double().view(1, -1, 1)
    rounded = E2M1().nearest((groups / scales).float()).double() * scales
    errors = ((rounded - groups).square() * columns.double().view(1, 4, -1).repeat(16, 1, 1).view(64, 1, -1)).sum(-1)
    found = (scheme.round(weight, importance).dequantize().double() - weight.double()).square() * columns.double()
    ratio = found.view(64, -1).sum(-1) / errors.amin(-1)
    assert ratio.max() < 1.1
    assert (ratio < 1 + 1e-5).float().mean() > 0.9


def test_siblings_share_the_global_scale_and_others_keep_their_range() -> None:
    assert divisor_of(0.02) == divisor_of(1.3) == DIVISOR
    for largest in (1e-30, 1e-6, 5.0, 1e4, 1e30):
        divisor = divisor_of(largest)
        assert divisor == 2 ** round(torch.tensor(divisor).log2().item())
        if 2.0**-120 < largest < 2.0**120:
            assert 448 / 4 < largest / 6 * divisor <= 448
    weights = [heavy_tailed(32, 64), heavy_tailed(32, 64, 1) * 1e4]
    first, other = (Nvfp4().round(weight) for weight in weights)
    assert first.fuse([other]) is None
    fused = first.fuse([first])
    assert torch.equal(fused.dequantize(), first.dequantize().repeat(2, 1))
    parts = first.named_parts().items()
    mixed = CodedWeight(scheme=Nvfp4(), **{name: torch.cat([part, getattr(other, name)]) for name, part in parts})
    with pytest.raises(SchemeError, match="several global scales"):
        mixed.tensors(BF16)
    for weight, rounded in zip(weights, (first, other), strict=True):
        assert (rounded.dequantize() - weight).norm() < 0.15 * weight.norm()


@pytest.mark.parametrize("scheme", [*GROUPED, BlockFp8((16, 32)), BlockFp8((40, 48))], ids=str)
def test_zeros_and_extremes_stay_finite(scheme: Scheme) -> None:
    weight = heavy_tailed(32, 96)
    weight[:, :32] = 0
    weight[0] *= 1e6
    weight[1] *= 1e-6
    rounded = scheme.round(weight)
    values = rounded.dequantize()
    assert torch.isfinite(values).all()
    assert (values[:, :32] == 0).all()
    assert list(rounded.problems(M)) == []
    assert (scheme.round_in_range(weight) - weight).norm() < 0.2 * weight.norm()


@pytest.mark.parametrize(
    ("scheme", "format"), [*product((*GROUPED, BlockFp8((32, 32))), (COMPRESSED_TENSORS, COMPRESS_RUNTIME))], ids=str
)
def test_containers_keep_the_codes_of_targets(scheme: Scheme, format, tmp_path) -> None:
    weight = random_weight((64, 96), scheme, 0)
    tensors = format.encode(M, weight, BF16)
    bits = sum(tensor.nbytes * 8 for tensor in tensors.values())
    assert bits == scheme.stored_bits(64, 96)
    save_file(tensors, tmp_path / "model.safetensors")
    block = format.quantization_config({M: scheme}, ["lm_head"])
    config = {"model_type": "of_nobody", "dtype": "bfloat16", "quantization_config": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = PackedCheckpoint.open(tmp_path)
    assert packed.schemes == {M: scheme}
    assert packed.shape(M) == (64, 96)
    assert digest(packed.packed_weight(M)) == digest(weight)
    assert torch.equal(packed.packed_weight(M).dequantize(), weight.dequantize())
    assert verify_structure(tmp_path).problems == ()
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_published_nvfp4_with_rounded_inputs_is_read() -> None:
    block = COMPRESSED_TENSORS.quantization_config({M: Nvfp4()}, [])
    inputs = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    block["config_groups"]["group_0"]["input_activations"] = inputs
    assert COMPRESSED_TENSORS.schemes(block, [M]) == {M: Nvfp4()}


def test_tensors_of_other_kinds_are_refused(tmp_path) -> None:
    tensors = COMPRESSED_TENSORS.encode(M, random_weight((32, 64), Nvfp4(), 0), BF16)
    for name, bad in (("weight_scale", torch.zeros(32, 4)), ("weight_global_scale", torch.ones(2))):
        folder = tmp_path / name
        folder.mkdir()
        save_file({**tensors, f"{M}.{name}": bad}, folder / "model.safetensors")
        block = COMPRESSED_TENSORS.quantization_config({M: Nvfp4()}, [])
        config = {"model_type": "of_nobody", "dtype": "bfloat16", "quantization_config": block}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"{M} should hold"):
            PackedCheckpoint.open(folder).packed_weight(M)
    with pytest.raises(SchemeError, match=r"nvfp4 has 4 bits.*bits=3"):
        Nvfp4.parse({"nvfp4": True, "bits": 3})
    with pytest.raises(SchemeError, match="groups of 16 do not divide 40"):
        Nvfp4().check((8, 40))
