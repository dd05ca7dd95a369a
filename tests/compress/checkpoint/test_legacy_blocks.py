"""Types of GGUF with groups of 32 as forms: the bytes and values of the `gguf` package, codes of methods, and files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import compress, prepared
from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.gguf.export import export_gguf
from compress.checkpoint.gguf.file import GGUFFile
from compress.checkpoint.gguf.rounding import round_to
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Iq4Nl, Q4Minima, Q5Minima, Scheme
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.layouts import Blocks
from compress.common.cli import demo_model_path
from compress.common.errors import NumericsError, RecipeError, SchemeError
from compress.methods.awq import quantize_awq
from compress.methods.gptq import quantize_gptq
from compress.methods.shared.hessian import factorize
from compress.recipe import CalibrationOptions
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

gguf = pytest.importorskip("gguf")

BF16 = torch.bfloat16
M = "model.layers.0.mlp.up_proj"
ALL = Q4Minima(), Q5Minima(), Iq4Nl()


def heavy_tailed(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) ** 3 * 0.01


def correlated(columns: int) -> Tensor:
    """A Hessian in float64."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    mixing += 0.3 * torch.eye(columns)
    mixing *= torch.exp(torch.randn(columns, generator=generator, dtype=torch.float64))
    return mixing.T @ mixing


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_blocks_have_the_values_that_gguf_gives_them(scheme: Blocks) -> None:
    random = torch.Generator().manual_seed(scheme.bits)
    blocks = torch.randint(0, 256, (12, 3 * scheme.block_bytes), dtype=torch.uint8, generator=random)
    flat = blocks.view(-1, scheme.block_bytes)
    flat[:, 1:4:2] &= 0xBF  # scales and minima of random bytes, none of them infinite or NaN
    weight = scheme.from_blocks(blocks)
    theirs = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[scheme.word.upper()])
    assert weight.shape == (12, 96)
    assert np.array_equal(weight.dequantize().numpy(), theirs)
    assert torch.equal(weight.dequantize(BF16), torch.from_numpy(theirs).to(BF16))
    assert torch.equal(scheme.blocks(weight), blocks)
    fused = scheme.from_blocks(blocks[:5]).fuse([scheme.from_blocks(blocks[5:])])
    assert fused is not None
    assert digest(fused) == digest(weight)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_rounding_without_statistics_is_that_of_an_export(scheme: Blocks) -> None:
    weight = heavy_tailed(16, 96)
    weight[3] = 0
    weight[4, :32] = 0.25
    weight[5] = weight[5].abs()
    rounded = scheme.round(weight)
    assert torch.equal(scheme.blocks(rounded), round_to(weight, scheme.word))
    assert torch.equal(rounded.dequantize()[3], weight[3])
    weight[0, 0] = torch.inf
    with pytest.raises(NumericsError):
        scheme.round(weight)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_methods_lower_the_error_of_the_output(scheme: Blocks) -> None:
    hessian = correlated(128)
    factor, weight = factorize(hessian.float()), heavy_tailed(24, 128)
    weight[2] = 0
    plain, weighted = scheme.round(weight), scheme.round(weight, factor.importance)
    found = quantize_gptq(weight, factor, scheme)
    errors = []
    for each in (found, weighted, plain):
        change = weight.double() - each.dequantize(torch.float64)
        errors.append(float((change @ hessian * change).sum()))
    assert errors == sorted(errors)
    assert errors[0] < 0.85 * errors[2]
    assert torch.equal(scheme.from_blocks(scheme.blocks(found)).dequantize(), found.dequantize())
    assert digest(quantize_awq(weight, scheme, factor.importance)) == digest(weighted)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_the_container_keeps_the_blocks(scheme: Blocks, tmp_path: Path) -> None:
    weight = scheme.round(heavy_tailed(24, 96))
    tensors = COMPRESS_RUNTIME.encode(M, weight, BF16)
    assert sum(each.nbytes * 8 for each in tensors.values()) == scheme.stored_bits(24, 96)
    assert weight.nbytes == scheme.unpacked_bytes(24, 96)
    save_file(tensors, tmp_path / "model.safetensors")
    block = COMPRESS_RUNTIME.quantization_config({M: scheme}, [])
    config = {"model_type": "of_nobody", "dtype": "bfloat16", "quantization_config": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = PackedCheckpoint.open(tmp_path)
    assert (checkpoint.schemes, checkpoint.shape(M)) == ({M: scheme}, (24, 96))
    assert digest(checkpoint.packed_weight(M)) == digest(weight)
    assert verify_structure(tmp_path).problems == ()
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_numbers_that_are_not_finite_are_found(scheme: Blocks) -> None:
    blocks = scheme.blocks(scheme.round(heavy_tailed(4, 32)))
    blocks[1, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinity in float16
    assert list(scheme.from_blocks(blocks).problems(M)) == [f"{M} has 1 scales that are not finite"]


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_what_cannot_be_is_refused(scheme: Blocks, tiny_model, tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match=f"cannot hold the blocks of {scheme}"):
        COMPRESSED_TENSORS.check(scheme, (64, 128))
    with pytest.raises(SchemeError, match=f"{scheme.word} blocks of 32 do not divide 48 input features"):
        scheme.check((8, 48))
    with pytest.raises(SchemeError, match=rf"{scheme.word} .*bits=3"):
        type(scheme).parse({scheme.word: True, "bits": 3})
    source, stages = (
        tiny_model(hidden_size=64, intermediate_size=128),
        (PruneStage("wanda"), QuantizeStage("rtn", scheme)),
    )
    with pytest.raises(RecipeError, match=f"{scheme} has no exact zeros, and .* is pruned"):
        prepared(source, tmp_path / "out", *stages)


def test_shapes_that_contradict_each_other() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1).half()
    with pytest.raises(SchemeError, match=r"scales \(4, 1\) must be \(4, 2\) for w4a16 iq4_nl"):
        CodedWeight(codes, scales, Iq4Nl())
    with pytest.raises(SchemeError, match=r"minima \(4, 1\) must be \(4, 2\) for w5a16 q5_1"):
        CodedWeight(codes, scales.repeat(1, 2), Q5Minima(), minima=scales)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_the_words(scheme: Blocks) -> None:
    assert QuantizeStage.build({"weights": scheme.word, "method": "gptq"}) == QuantizeStage("gptq", scheme)


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "method"), [(Q4Minima(), "gptq"), (Q5Minima(), "gptaq"), (Iq4Nl(), "awq")], ids=str)
def test_the_file_holds_the_codes_of_the_run(scheme: Blocks, method: str, tmp_path: Path) -> None:
    packed, calibration = tmp_path / "packed", CalibrationOptions(samples=4, length=128)
    assert compress(demo_model_path(), packed, QuantizeStage(method, scheme), calibration=calibration).structure.ok
    exported = export_gguf(packed, tmp_path / "m.gguf", scheme.word)
    assert exported.types[scheme.word, "codes as they are"] == 42
    file, source = GGUFFile.open(tmp_path / "m.gguf"), PackedCheckpoint.open(packed)
    stored = source.packed_weight("model.layers.2.mlp.down_proj")
    assert torch.equal(file.blocks("blk.2.ffn_down.weight"), stored.scheme.blocks(stored))
    assert torch.equal(file.values("blk.2.ffn_down.weight"), stored.dequantize())
