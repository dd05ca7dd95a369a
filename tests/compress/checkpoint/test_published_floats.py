"""8-bit floats in blocks and MXFP4: the values that transformers and compressed-tensors make of the same bytes."""

import json

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import save_file
from tiny_models import load_reference, pack_model, save_tiny_model
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.formats.fp8 import FP8 as FP8_CONTAINER
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import BlockFp8, Fp8, Mxfp4, Scheme
from compress.checkpoint.weights.base import StoredTensors, digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError, SchemeError

BF16 = torch.bfloat16
M = "model.layers.0.mlp.up_proj"


def random_codes(rows: int, columns: int) -> Tensor:
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    return numbers[torch.randint(0, len(numbers), (rows, columns))].view(FP8)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def exponents(*shape: int) -> Tensor:
    return torch.randint(100, 140, shape, dtype=torch.uint8)


def read(tensors: dict[str, Tensor], block: dict, folder) -> PackedCheckpoint:
    folder.mkdir(exist_ok=True)
    save_file({f"{M}{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "of_nobody", "dtype": "bfloat16", "quantization_config": block}
    (folder / "config.json").write_text(json.dumps(config))
    return PackedCheckpoint.open(folder)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float32, BF16, torch.float8_e8m0fnu], ids=str)
def test_blocks_are_what_transformers_makes_of_them(tmp_path, dtype, scale_dtype):
    codes, scales = random_codes(256, 384), (torch.rand(2, 3) * 1e-3).to(scale_dtype)
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    packed = read({".weight": codes, ".weight_scale_inv": scales, ".activation_scale": torch.ones(1)}, block, tmp_path)
    assert packed.schemes == {M: BlockFp8((128, 128))}
    assert packed.shape(M) == (256, 384)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
    assert same_bits(packed.packed_weight(M).dequantize(dtype), expected)


def test_a_published_folder_is_what_transformers_loads(tmp_path):
    """On a CPU transformers dequantizes such a checkpoint as it loads it."""
    dense, packed = save_tiny_model(tmp_path / "dense", dtype=BF16), tmp_path / "packed"
    modules = pack_model(dense, packed, lambda module: BlockFp8((32, 32)), "fp8")
    model = load_reference(packed, BF16, exact=False)
    checkpoint = PackedCheckpoint.open(packed)
    for module in modules:
        expected = model.get_submodule(module).weight.data
        assert same_bits(checkpoint.packed_weight(module).dequantize(BF16), expected)


def test_the_last_blocks_may_be_smaller(tmp_path):
    codes, scales = random_codes(200, 320), torch.rand(2, 3) * 1e-3
    packed = read(
        {".weight": codes, ".weight_scale_inv": scales},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        tmp_path,
    )
    found = packed.packed_weight(M)
    expected = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32)
    assert same_bits(found.dequantize(), expected)
    assert torch.equal(found.tensors(BF16)[".weight_scale"], scales)


@pytest.mark.parametrize("name", [".weight_scale_inv", ".weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (96, 1)], ids=str)
def test_one_scale_for_a_matrix_or_a_row(tmp_path, name, shape):
    codes, scales = random_codes(96, 320), torch.rand(shape) * 1e-3
    packed = read({".weight": codes, name: scales, ".input_scale": torch.ones(())}, {"quant_method": "fp8"}, tmp_path)
    assert packed.schemes == {M: Fp8()}
    expected = _dequantize_fp8_weight(codes, scales, None, torch.float32)
    assert same_bits(packed.packed_weight(M).dequantize(BF16), expected.to(BF16))


def test_blocks_of_compressed_tensors(tmp_path):
    codes, scales = random_codes(200, 256), torch.rand(2, 2) * 1e-3
    block = COMPRESSED_TENSORS.quantization_config({M: BlockFp8()}, [])
    packed = read({".weight": codes, ".weight_scale": scales}, block, tmp_path)
    assert packed.schemes == {M: BlockFp8()}
    scheme = QuantizationScheme(**QuantizationConfig(**block).config_groups["group_0"].model_dump())
    theirs = FloatQuantizationCompressor.decompress({"weight": codes[:128], "weight_scale": scales[:1]}, scheme)
    assert same_bits(packed.packed_weight(M).dequantize()[:128], theirs["weight"])
    # As published: inputs are rounded in groups of 128, which keep 16 bits here.
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    block["config_groups"]["group_0"]["input_activations"] = inputs
    assert set(COMPRESSED_TENSORS.schemes(block, [M]).values()) == {BlockFp8()}


def test_experts_of_gpt_oss_are_what_transformers_makes_of_them():
    blocks, scales = random_bytes(3, 64, 4, 16), exponents(3, 64, 4)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=BF16)
    for number in range(3):
        tensors = {"e.weight_packed": blocks[number], "e.weight_scale": scales[number]}
        stored = StoredTensors("e", tensors.__getitem__)
        assert Mxfp4().shape(stored) == (64, 128)
        weight = Mxfp4().read(stored)
        assert same_bits(weight.dequantize(BF16), theirs[number].T)
        kept = weight.tensors(BF16)
        assert torch.equal(kept[".weight_packed"], blocks[number].flatten(1))
        assert torch.equal(kept[".weight_scale"], scales[number])


def test_mxfp4_of_compressed_tensors(tmp_path):
    block = COMPRESSED_TENSORS.quantization_config({M: Mxfp4()}, [])
    scheme = QuantizationScheme(**QuantizationConfig(**block).config_groups["group_0"].model_dump())
    scale = 2.0 ** torch.randint(-8, 3, (64, 4))
    theirs = MXFP4PackedCompressor.compress({"weight": torch.randn(64, 128), "weight_scale": scale}, scheme)
    stored = {f".{name}": theirs[name] for name in ("weight_packed", "weight_scale")}
    packed = read(stored, block, tmp_path)
    assert packed.schemes == {M: Mxfp4()}
    values = MXFP4PackedCompressor.decompress(theirs, scheme)["weight"].to(BF16)
    assert same_bits(packed.packed_weight(M).dequantize(BF16), values)
    again = COMPRESSED_TENSORS.encode(M, packed.packed_weight(M), BF16)
    assert all(torch.equal(again[f"{M}{name}"], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize(
    "format", [COMPRESSED_TENSORS, COMPRESS_RUNTIME, FP8_CONTAINER], ids=lambda format: format.name
)
def test_containers_keep_the_codes(tmp_path, format):
    scheme = BlockFp8((32, 32))
    weight = CodedWeight(random_codes(64, 96), scheme.repeated(torch.rand(2, 3), (64, 96)), scheme)
    tensors = format.encode(M, weight, BF16)
    config = format.quantization_config({M: weight.scheme}, ["lm_head"])
    packed = read({name.removeprefix(M): tensor for name, tensor in tensors.items()}, config, tmp_path / "one")
    assert digest(packed.packed_weight(M)) == digest(weight)
    assert verify_structure(tmp_path / "one").problems == ()
    export_checkpoint(tmp_path / "one", "compressed-tensors", tmp_path / "two")
    assert digest(PackedCheckpoint.open(tmp_path / "two").packed_weight(M)) == digest(weight)
    with pytest.raises(SchemeError, match="--format dense"):
        export_checkpoint(tmp_path / "one", "gptq", tmp_path / "three")


@pytest.mark.parametrize("scheme", [BlockFp8((64, 32)), Mxfp4()], ids=str)
def test_schemes_survive_their_dictionaries(scheme):
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_parts_that_contradict_each_other(tmp_path):
    block = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    packed = read({".weight": random_codes(64, 64), ".weight_scale_inv": torch.ones(2, 3)}, block, tmp_path / "scales")
    with pytest.raises(CheckpointError, match=rf"{M} .*\(2, 3\).*\(2, 2\)"):
        packed.weight(M)
    bad = random_codes(64, 64).view(torch.uint8).fill_(0x7F).view(FP8)
    packed = read({".weight": bad, ".weight_scale_inv": torch.ones(2, 2)}, block, tmp_path / "codes")
    with pytest.raises(CheckpointError, match=rf"{M}.* 4096 NaN"):
        packed.weight(M)
    with pytest.raises(SchemeError, match=r"\(2, 3\).*\(2, 2\)"):
        CodedWeight(torch.zeros(2, 64, dtype=torch.uint8), exponents(2, 3), Mxfp4())
    wrong = CodedWeight(torch.zeros(2, 64, dtype=torch.uint8), torch.full((2, 2), 255, dtype=torch.uint8), Mxfp4())
    assert len(list(wrong.problems(M))) == 1
    with pytest.raises(SchemeError, match="--format compressed-tensors"):
        CONTAINERS.find("mxfp4").quantization_config({M: Mxfp4()}, [])
