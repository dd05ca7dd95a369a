"""K types of GGUF as a form: the bytes and values of the `gguf` package, the codes of each method, and the way to a
file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import change_tensors
from runs import compress, foreseen_bytes, prepared
from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint.formats import format_for
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.gguf.export import export_gguf
from compress.checkpoint.gguf.file import GGUFFile
from compress.checkpoint.gguf.rounding import round_to
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Q2K, Q3K, Q4K, Q5K, Q6K, Scheme
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.forms import KQuant
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, NumericsError, RecipeError, SchemeError
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.methods.awq import quantize_awq
from compress.methods.gptq import quantize_gptq
from compress.methods.shared.column_solver import GPTQSolver
from compress.methods.shared.hessian import HessianFactor, factorize
from compress.recipe import CalibrationOptions
from compress.search.space import parse_candidates
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model

gguf = pytest.importorskip("gguf")

BF16 = torch.bfloat16
M = "model.layers.0.mlp.up_proj"
ALL = Q2K(), Q3K(), Q4K(), Q5K(), Q6K()
TINY = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


def random_blocks(scheme: KQuant, rows: int = 24, blocks: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(scheme.bits)
    return torch.randint(0, 256, (rows, blocks * scheme.block_bytes), dtype=torch.uint8, generator=generator)


def heavy_tailed(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) ** 3 * 0.01


def correlated() -> tuple[Tensor, HessianFactor]:
    """A Hessian `[512, 512]` in float64, and its factors."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(512, 512, generator=generator, dtype=torch.float64) / 512**0.5 + 0.3 * torch.eye(512)
    mixing *= torch.exp(torch.randn(512, generator=generator, dtype=torch.float64))
    hessian = mixing.T @ mixing
    return hessian, factorize(hessian.float())


def loss(weight: Tensor, found: CodedWeight, hessian: Tensor) -> float:
    change = found.dequantize(torch.float64) - weight.double()
    return float(((change @ hessian) * change).sum())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_blocks_have_the_values_that_gguf_gives_them(scheme: KQuant) -> None:
    blocks = random_blocks(scheme)
    weight = scheme.from_blocks(blocks)
    theirs = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[scheme.word.upper()])
    assert np.array_equal(weight.dequantize().numpy(), theirs, equal_nan=True)
    assert torch.equal(scheme.blocks(weight), blocks)
    assert weight.nbytes == scheme.unpacked_bytes(24, 768)
    assert int(weight.qweight.max()) == scheme.max_code
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[scheme.word.upper()]][1] == scheme.block_bytes


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_rows_keep_their_blocks_when_weights_are_fused_or_cut(scheme: KQuant) -> None:
    blocks = random_blocks(scheme)
    first, second = scheme.from_blocks(blocks[:8]), scheme.from_blocks(blocks[8:])
    fused = first.fuse([second])
    assert torch.equal(scheme.blocks(fused), blocks)
    assert torch.equal(scheme.blocks(fused.changed(lambda part: part[8:])), blocks[8:])


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_the_container_keeps_the_blocks(scheme: KQuant, tmp_path: Path) -> None:
    weight = scheme.round(heavy_tailed(16, 512))
    tensors = COMPRESS_RUNTIME.encode(M, weight, BF16)
    assert sum(tensor.nbytes * 8 for tensor in tensors.values()) == scheme.stored_bits(16, 512)
    assert format_for({M: scheme}) is COMPRESS_RUNTIME
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "of_nobody", "dtype": "bfloat16"}
    config["quantization_config"] = COMPRESS_RUNTIME.quantization_config({M: scheme}, ["lm_head"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = PackedCheckpoint.open(tmp_path)
    assert packed.schemes == {M: scheme}
    assert packed.shape(M) == (16, 512)
    assert digest(packed.packed_weight(M)) == digest(weight)
    assert verify_structure(tmp_path).problems == ()
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    change_tensors(tmp_path, lambda stored: stored.update({f"{M}.weight_blocks": torch.zeros(16, 99)}))
    with pytest.raises(CheckpointError, match=rf"{M} should hold rows of blocks of {scheme.block_bytes} bytes"):
        PackedCheckpoint.open(tmp_path).packed_weight(M)


def test_numbers_that_are_not_finite_are_found() -> None:
    blocks = Q4K().blocks(Q4K().round(heavy_tailed(4, 256)))
    blocks[1, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinity in float16
    blocks[2, 2:4] = torch.tensor([0x01, 0x7E], dtype=torch.uint8)
    assert list(Q4K().from_blocks(blocks).problems(M)) == [f"{M} has 1 scales that are not finite"] * 2


def test_other_containers_refuse_them() -> None:
    weight = Q4K().round(heavy_tailed(4, 256))
    with pytest.raises(SchemeError, match=r"cannot hold the super-blocks of w4a16 q4_k"):
        COMPRESSED_TENSORS.encode(M, weight, BF16)
    with pytest.raises(SchemeError, match="q4_k blocks of 256 do not divide 96 input features"):
        Q4K().check((8, 96))
    with pytest.raises(SchemeError, match=r"q4_k .*bits=3"):
        Q4K.parse({"q4_k": True, "bits": 3})


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_rounding_without_statistics_is_that_of_an_export(scheme: KQuant) -> None:
    weight = heavy_tailed(16, 512)
    weight[3] = 0
    weight[4, :32] = 0
    weight[5] = weight[5].abs()
    rounded = scheme.round(weight)
    assert torch.equal(scheme.blocks(rounded), round_to(weight, scheme.word))
    assert torch.equal(scheme.grid(weight).encode(weight).qweight, rounded.qweight)
    assert torch.equal(rounded.dequantize()[3], weight[3])
    weight[0, 0] = torch.inf
    with pytest.raises(NumericsError):
        scheme.round(weight)


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_methods_lower_the_error_of_the_output(scheme: KQuant) -> None:
    hessian, factor = correlated()
    weight = heavy_tailed(32, 512)
    plain, weighted = scheme.round(weight), scheme.round(weight, factor.importance)
    found, again = (quantize_gptq(weight, factor, scheme) for _ in range(2))
    assert digest(found) == digest(again)
    errors = [loss(weight, each, hessian) for each in (found, weighted, plain)]
    assert errors == sorted(errors)
    assert errors[0] < 0.85 * errors[2]
    assert torch.equal(scheme.from_blocks(scheme.blocks(found)).dequantize(), found.dequantize())
    assert digest(quantize_awq(weight, scheme, factor.importance)) == digest(weighted)


@pytest.mark.parametrize("scheme", [Q3K(), Q4K()], ids=str)
def test_compiled_columns_and_those_of_torch_agree(scheme: KQuant) -> None:
    """Nearly all codes: both add errors up in orders of their own."""
    _, factor = correlated()
    weight = heavy_tailed(32, 512)
    weight[7, :64] = 0
    grid = scheme.grid(weight, factor.importance)
    codes = []
    for instruction_set in (0, None):
        solver = GPTQSolver(weight, factor.order, factor.feedback, grid, instruction_set=instruction_set)
        solver.run()
        codes.append(solver.in_original_order(solver.codes))
    assert (codes[0] == codes[1]).double().mean() > 0.99


def test_the_solver_sees_the_errors_of_values_with_minima() -> None:
    _, factor = correlated()
    weight = heavy_tailed(32, 512)
    grid = Q4K().grid(weight, factor.importance)
    solver = GPTQSolver(weight, factor.order, factor.feedback, grid)
    solver.run()
    found = grid.weight(solver.in_original_order(solver.codes)).dequantize()
    assert torch.allclose(solver.in_original_order(solver.errors), weight - found, atol=1e-6)


def test_words_and_options() -> None:
    for scheme in ALL:
        assert QuantizeStage.build({"weights": scheme.word, "method": "gptq"}) == QuantizeStage("gptq", scheme)
        first, _ = parse_candidates(f"{scheme.word},w4g128")
        assert (first.scheme, str(first)) == (scheme, scheme.word)
    for method in ("hqq", "smoothquant"):
        with pytest.raises(RecipeError, match=rf"{method} does not support w4a16 q4_k: "):
            QuantizeStage(method, Q4K())


def test_pruned_weights_need_a_type_with_zeros(tiny_model, tmp_path: Path) -> None:
    model, prune = tiny_model(**TINY), PruneStage("wanda", sparsity=0.5)
    with pytest.raises(RecipeError, match=r"w4a16 q4_k has no exact zeros, and .* is pruned"):
        prepared(model, tmp_path / "out", prune, QuantizeStage("gptq", Q4K()))
    compress(model, tmp_path / "packed", prune, QuantizeStage("gptq", Q3K()))
    checkpoint = PackedCheckpoint.open(tmp_path / "packed")
    zeros = [(checkpoint.weight(module).dequantize() == 0).float().mean() for module in checkpoint.modules]
    assert min(zeros) >= 0.5


def test_a_run_is_written_verified_and_loaded(tiny_model, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    plan = prepared(tiny_model(**TINY), packed, QuantizeStage("gptq", Q4K())).plan
    assert [note for note in plan.notes if "`compress export --format gguf` writes the same blocks" in note]
    assert not [note for note in plan.notes if "SGLang" in note]
    assert compress(tiny_model(**TINY), packed, QuantizeStage("gptq", Q4K())).structure.ok
    checkpoint = PackedCheckpoint.open(packed)
    assert checkpoint.format == "compress-runtime"
    assert plan.bytes_after == checkpoint.files.nbytes
    decoder = load_model(packed, device="cpu", dtype="float32")
    assert foreseen_bytes(packed, torch.float32) == decoder.nbytes
    with pytest.raises(SchemeError, match=r"compressed-tensors cannot hold"):
        export_checkpoint(packed, "compressed-tensors", tmp_path / "other")


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "method"), [(Q4K(), "gptq"), (Q3K(), "awq"), (Q5K(), "gptaq")], ids=str)
def test_the_file_holds_the_codes_of_the_run(scheme: KQuant, method: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed, calibration = tmp_path / "packed", CalibrationOptions(samples=4, length=128)
    compress(demo_model_path(), packed, QuantizeStage(method, scheme), calibration=calibration)
    request = EvaluationRequest(packed, demo_model_path(), "pydoc", max_tokens=512, device="cpu", dtype="float32")
    assert run_evaluation(request).result.kl_mean < 0.5
    exported = export_gguf(packed, tmp_path / "m.gguf", scheme.word)
    assert exported.types[scheme.word, "codes as they are"] == 42
    file, source = GGUFFile.open(tmp_path / "m.gguf"), PackedCheckpoint.open(packed)
    for theirs in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        if theirs.tensor_type == gguf.GGMLQuantizationType[scheme.word.upper()]:
            values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            assert np.array_equal(file.values(theirs.name).numpy(), values)
    stored = source.packed_weight("model.layers.2.mlp.down_proj")
    assert torch.equal(file.blocks("blk.2.ffn_down.weight"), stored.scheme.blocks(stored))
