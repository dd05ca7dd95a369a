"""Results of a run: they load elsewhere, their integers are those that were chosen, and calibration pays."""

import json

import pytest
import torch
from covering import covering
from runs import compress, same_bytes

from compress.checkpoint.config import read_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Int, Scheme
from compress.reporting.report_data import read_report
from compress.stages.quantize import QuantizeStage


@pytest.mark.parametrize(("bits", "symmetric", "group_size"), covering(range(2, 9), [True, False], [32, None]))
def test_rtn_at_every_width(tiny_model, tmp_path, bits, symmetric, group_size) -> None:
    scheme = Int(bits, group_size, symmetric)
    result = compress(tiny_model(), tmp_path / "packed", QuantizeStage("rtn", scheme))
    packed = PackedCheckpoint.open(tmp_path / "packed")
    assert set(packed.schemes.values()) == {scheme}
    assert result.structure.bits_per_weight == pytest.approx(expected_bits(scheme))
    errors = [linear["relative_error"] for block in result.report["blocks"] for linear in block["linears"]]
    assert max(errors) < 0.5 * 4.0 ** (2 - bits)


def expected_bits(scheme: Scheme) -> float:
    """Bits per weight of the tiny model's linears, by the definition of the formats."""
    shapes = [(128, 128), (64, 128), (64, 128), (128, 128), (256, 128), (256, 128), (128, 256)]
    bits = sum(scheme.stored_bits(rows, columns) for rows, columns in shapes)
    return bits / sum(rows * columns for rows, columns in shapes)


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("scheme", [Int(2, 32, False), Int(3, None), Int(8, 128)])
def test_calibrated_methods_at_other_widths(tiny_model, tmp_path, method, scheme) -> None:
    result = compress(tiny_model(), tmp_path / "packed", QuantizeStage(method, scheme))
    assert result.structure.ok
    assert PackedCheckpoint.open(tmp_path / "packed").scheme("model.layers.2.mlp.down_proj") == scheme


def test_rtn_needs_no_tokenizer_and_no_forward_pass(tiny_model, tmp_path, monkeypatch) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_model() / name).read_bytes())
    monkeypatch.setattr("torch.nn.Linear.forward", None)
    assert compress(bare, tmp_path / "packed", QuantizeStage("rtn")).structure.ok


def test_gptq_gives_outputs_closer_to_the_dense_blocks(tiny_model, tmp_path) -> None:
    errors = {}
    for method in ("rtn", "gptq"):
        # One 8-bit GPTQ layer makes the RTN run calibrate too, so both measure their blocks alike.
        stages = (
            QuantizeStage(method, Int(3, 64)),
            QuantizeStage("gptq", Int(8, 128), targets=("*.0.self_attn.k_proj",)),
        )
        result = compress(tiny_model(), tmp_path / method, *stages)
        errors[method] = [block["relative_error"] for block in result.report["blocks"]]
    assert all(gptq < 0.8 * rtn for gptq, rtn in zip(errors["gptq"], errors["rtn"], strict=True))


def test_smoothing_is_recorded_and_never_worse(tiny_model, tmp_path) -> None:
    report = compress(tiny_model(), tmp_path / "packed", QuantizeStage("awq", Int(3, 64))).report
    edges = [edge for block in report["blocks"] for edge in block["smoothing"]]
    assert len(edges) == 3 * 4
    assert all(edge["loss_after"] <= edge["loss_before"] for edge in edges)


def test_different_layers_may_get_different_methods_and_widths(tiny_model, tmp_path) -> None:
    compress(
        tiny_model(),
        tmp_path / "packed",
        QuantizeStage("awq", Int(4, 64)),
        QuantizeStage("gptq", Int(3, 32, False), targets=("*.down_proj",)),
        QuantizeStage("rtn", Int(8, None), targets=("model.layers.0",)),
    )
    packed = PackedCheckpoint.open(tmp_path / "packed")
    assert packed.scheme("model.layers.0.mlp.down_proj") == Int(8, None)
    assert packed.scheme("model.layers.1.mlp.down_proj") == Int(3, 32, False)
    assert packed.scheme("model.layers.1.mlp.up_proj") == Int(4, 64)


def test_dense_tensors_and_side_files_survive_bit_for_bit(tiny_model, tmp_path) -> None:
    source = tiny_model("qwen2")
    compress(source, tmp_path / "packed", QuantizeStage("rtn", ignore=("down_proj",)))
    before, after = TensorFiles.open(source), TensorFiles.open(tmp_path / "packed")
    names = ["model.embed_tokens", "lm_head", "model.layers.1.input_layernorm", "model.layers.2.mlp.down_proj"]
    for name in (*(f"{module}.weight" for module in names), "model.layers.1.self_attn.q_proj.bias"):
        assert torch.equal(before.tensor(name), after.tensor(name))
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            assert (tmp_path / "packed" / file.name).read_bytes() == file.read_bytes()
    assert "model.layers.0.mlp.down_proj" in read_config(tmp_path / "packed")["quantization_config"]["ignore"]


def test_config_and_report_say_where_it_came_from(tiny_model, tmp_path) -> None:
    source = tiny_model()
    compress(source, tmp_path / "packed", QuantizeStage("gptq", Int(4, 64)), measure=True)
    recorded = read_config(tmp_path / "packed")["compression_config"]
    assert recorded["source"] == str(source)
    assert recorded["recipe"]["stages"][0]["method"] == "gptq"
    assert recorded["calibration"]["tokens"] == 6 * 48
    assert recorded["dense"]["lm_head"] == "output head"
    report = json.loads((tmp_path / "packed" / "compression_report.json").read_text())
    assert report["bit_compared"] == 21
    assert report["structure"]["ok"]
    assert report["quality"]["kl_mean"] >= 0
    assert {linear["damping"] for block in report["blocks"] for linear in block["linears"]} == {0.01}


def test_micro_batch_changes_the_result_no_more_than_rounding(tiny_model, tmp_path) -> None:
    source = tiny_model(dtype=torch.float32)
    for size in (1, 6):
        compress(source, tmp_path / str(size), QuantizeStage("gptq", Int(4, 64)), micro_batch=size)
    one, six = (read_report(tmp_path / size).linears for size in "16")
    # A sum on the border of two codes may take the other one, which the columns and blocks after it then follow; their
    # errors stay what they were (by 0.8 % where one code in a thousand moved).
    for first, second in zip(one, six, strict=True):
        assert second.relative_error == pytest.approx(first.relative_error, rel=0.03), first.module


def test_sharded_source(tiny_model, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.bfloat16)
    model.save_pretrained(sharded, max_shard_size="1MB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    for stem in ("one", "many"):
        source = tiny_model() if stem == "one" else sharded
        compress(source, tmp_path / stem, QuantizeStage("rtn"))
    assert same_bytes(tmp_path / "one", tmp_path / "many")
