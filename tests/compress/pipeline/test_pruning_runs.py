"""Pruning from a checkpoint to a served one: zeros stay zeros, files shrink as computed, outputs propagate."""

import pytest
import torch
from runs import assert_served_as_exported, compress, same_bytes

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import NM, Int, NMSparsity
from compress.checkpoint.writer import BlockStore, export_checkpoint
from compress.common.errors import CheckpointError, SchemeError
from compress.pipeline.finish import compare_with_report
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

TWO_OF_FOUR = NMSparsity(2, 4)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria", "sparsegpt"])
@pytest.mark.parametrize("quantize", [None, QuantizeStage("gptq", Int(4, 64)), QuantizeStage("rtn", Int(8, 64))])
def test_two_of_four_is_packed_verified_and_served(tiny_model, tmp_path, method, quantize) -> None:
    source, out = tiny_model("llama"), tmp_path / "packed"
    result = compress(source, out, PruneStage(method, TWO_OF_FOUR), *([quantize] if quantize else []))
    assert result.structure.ok
    expected = NM(None, TWO_OF_FOUR)
    if quantize:
        expected = NM(Int(quantize.scheme.bits, 64), TWO_OF_FOUR)
    packed = PackedCheckpoint.open(out)
    assert packed.format == "compress-runtime"
    assert set(packed.schemes.values()) == {expected}
    assert result.structure.bits_per_weight == expected.stored_bits(64, 128) / (64 * 128)
    for module in packed.modules:
        weight = packed.packed_weight(module).dequantize()
        assert ((weight.view(len(weight), -1, 4) != 0).sum(-1) <= 2).all()
    assert verify_structure(out).ok
    assert compare_with_report(out) == []
    assert_served_as_exported(out, tmp_path / "dense")


def test_transformers_reads_the_dense_export(tiny_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    compress(tiny_model("qwen3"), tmp_path / "packed", PruneStage("wanda", TWO_OF_FOUR))
    dense = export_checkpoint(tmp_path / "packed", "dense", tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    packed = PackedCheckpoint.open(tmp_path / "packed")
    for module in packed.modules:
        assert torch.equal(model.get_submodule(module).weight, packed.weight(module).float())
    with pytest.raises(ValueError, match="quant_method"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_sparse_integers_export_to_what_others_read(tiny_model, tmp_path) -> None:
    compress(
        tiny_model("llama"), tmp_path / "packed", PruneStage("wanda", TWO_OF_FOUR), QuantizeStage("gptq", Int(4, 64))
    )
    out = export_checkpoint(tmp_path / "packed", "compressed-tensors", tmp_path / "exported")
    packed, exported = PackedCheckpoint.open(tmp_path / "packed"), PackedCheckpoint.open(out)
    assert set(exported.schemes.values()) == {Int(4, 64)}
    for module in packed.modules:
        assert torch.equal(packed.packed_weight(module).values.qweight, exported.packed_weight(module).qweight)


def test_sixteen_bit_patterns_export_only_dense(tiny_model, tmp_path) -> None:
    compress(tiny_model("llama"), tmp_path / "packed", PruneStage("magnitude", TWO_OF_FOUR))
    with pytest.raises(SchemeError, match=r"2:4.*--format dense"):
        export_checkpoint(tmp_path / "packed", "compressed-tensors", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_unstructured_zeros_are_stored_and_load_everywhere(tiny_model, tmp_path, method) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "packed"
    result = compress(tiny_model("llama"), out, PruneStage(method, sparsity=0.3))
    assert result.structure.ok
    assert compare_with_report(out) == []
    assert any("makes no layer smaller" in note for note in result.report["plan"]["notes"])
    zeros = [linear["zeros"] for block in result.report["blocks"] for linear in block["linears"]]
    assert all(share == pytest.approx(0.3, abs=0.01) for share in zeros)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    down = model.get_submodule("model.layers.1.mlp.down_proj").weight
    assert float((down == 0).float().mean()) == pytest.approx(0.3, abs=0.01)


def test_pruned_then_quantized_without_a_pattern_keeps_its_zeros(tiny_model, tmp_path) -> None:
    out = tmp_path / "packed"
    compress(tiny_model("llama"), out, PruneStage("wanda", sparsity=0.5), QuantizeStage("gptq", Int(4, 64, False)))
    packed = PackedCheckpoint.open(out)
    assert packed.format == "compressed-tensors"
    for module in packed.modules:
        assert float((packed.packed_weight(module).dequantize() == 0).float().mean()) >= 0.5


def test_stages_apply_where_they_are_told(tiny_model, tmp_path) -> None:
    out = tmp_path / "packed"
    compress(
        tiny_model("llama"),
        out,
        PruneStage("wanda", TWO_OF_FOUR, targets=("*.mlp.*",)),
        QuantizeStage("rtn", Int(4, 64), ignore=("gate_proj",)),
    )
    schemes = PackedCheckpoint.open(out).schemes
    assert schemes["model.layers.0.mlp.gate_proj"] == NM(None, TWO_OF_FOUR)
    assert schemes["model.layers.0.mlp.up_proj"] == NM(Int(4, 64), TWO_OF_FOUR)
    assert schemes["model.layers.0.self_attn.q_proj"] == Int(4, 64)


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_zeros_are_where_the_first_pass_put_them(tiny_model, tmp_path, method) -> None:
    stage = PruneStage(method, sparsity=0.6, layerwise="owl", owl_m=2.0, ignore=("down_proj",))
    report = compress(tiny_model("llama"), tmp_path / "out", stage).report
    shares = {each["block"]: each["share"] for each in report["layerwise"]}
    assert len(set(shares.values())) == 3
    assert sum(shares.values()) / 3 == pytest.approx(0.6)
    for block in report["blocks"]:
        zeros = [linear["zeros"] for linear in block["linears"]]
        assert zeros == pytest.approx([shares[block["block"]]] * len(zeros), abs=0.01)
    assert any("first pass" in note for note in report["plan"]["notes"])
    assert any("owl M=2" in (layer["pruning"] or "") for layer in report["plan"]["layers"])


def test_mixed_patterns_are_packed_with_integers(tiny_model, tmp_path) -> None:
    stage = PruneStage("wanda", NMSparsity(4, 8), layerwise="owl", owl_m=2.0, owl_lambda=0.25)
    report = compress(tiny_model("llama"), tmp_path / "out", stage, QuantizeStage("gptq", Int(4, 64))).report
    patterns = {each["block"]: each["pattern"] for each in report["layerwise"]}
    assert len(set(patterns.values())) > 1
    assert sum(int(pattern.partition(":")[0]) for pattern in patterns.values()) == 4 * len(patterns)
    for module, scheme in PackedCheckpoint.open(tmp_path / "out").schemes.items():
        assert str(scheme.sparsity) == patterns[module.rpartition(".self_attn")[0] or module.rpartition(".mlp")[0]]


@pytest.mark.parametrize("write", [2, 4])
def test_a_run_broken_off_in_its_first_pass_continues_there(tiny_model, tmp_path, monkeypatch, write) -> None:
    stage = PruneStage("wanda", sparsity=0.6, layerwise="owl", owl_m=2.0)
    whole = compress(tiny_model("llama"), tmp_path / "whole", stage)
    original, written = BlockStore.write, []

    def failing(store: BlockStore, key: str, *args, **kwargs) -> None:
        written.append(key)
        if len(written) == write:
            raise CheckpointError("the disk is full")
        original(store, key, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(BlockStore, "write", failing)
        with pytest.raises(CheckpointError, match="disk is full"):
            compress(tiny_model("llama"), tmp_path / "broken", stage)
    assert any(key.startswith("survey-hidden") for key in written)
    again = compress(tiny_model("llama"), tmp_path / "broken", stage)
    assert again.report["layerwise"] == whole.report["layerwise"]
    assert same_bytes(whole.out, again.out)
