"""Verification finds what was broken on purpose; exports carry the same integers or refuse."""

import json

import pytest
import torch
from folders import change_tensors as change

from compress.checkpoint.config import read_config, write_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.verify import verify_against, verify_structure
from compress.checkpoint.weights import Activations, Int
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError, SchemeError

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def packed(dense_folder, pack, tmp_path):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: Int(4, 64))
    return tmp_path / "packed", {module: digest(weight) for module, weight in weights.items()}


def test_sound_checkpoint(packed, dense_folder):
    folder, digests = packed
    report = verify_structure(folder, TensorFiles.open(dense_folder))
    assert report.ok
    assert report.problems == ()
    assert verify_against(folder, digests) == []
    assert report.bits_per_weight == 4 + 16 / 64, "codes and scales as stored, nothing else"
    assert report.num_parameters == TensorFiles.open(dense_folder).nbytes // 2
    assert report.bits_per_parameter == 8 * (folder / "model.safetensors").stat().st_size / report.num_parameters
    reasons = {tensor.name: tensor.reason for tensor in report.dense}
    assert reasons["model.embed_tokens.weight"] == "embedding, also the output head (tied)"
    assert reasons["model.norm.weight"] == "norm or bias"
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


@pytest.mark.parametrize("ignore", [-1, True, [1], [["lm_head"]], {"lm_head": 1}])
def test_a_list_of_left_out_layers_that_is_none_is_told(packed, ignore):
    config = read_config(packed[0])
    config["quantization_config"]["ignore"] = ignore
    write_config(packed[0], config)
    assert any("ignore" in problem for problem in verify_structure(packed[0]).problems)


def test_left_out_layers_have_a_reason(dense_folder, pack, tmp_path):
    pack(dense_folder, tmp_path / "p", lambda module: None if "down_proj" in module else Int(4, 32, False))
    report = verify_structure(tmp_path / "p")
    assert {tensor.reason for tensor in report.dense if "down_proj" in tensor.name} == {"left out (ignore)"}
    assert report.bits_per_weight == 4 + 20 / 32


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda t: t[f"{DOWN}.weight_scale"].view(-1)[3:4].fill_(float("nan")), f"{DOWN} has 1 scales"),
        (lambda t: t["model.norm.weight"][0:1].fill_(float("inf")), "model.norm.weight holds NaN"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.pop(f"{DOWN}.weight_shape"), "weight_shape"),
        (lambda t: t.update({f"{DOWN}.weight": torch.ones(128, 256)}), f"{DOWN} is stored both"),
        (lambda t: t.update({f"{DOWN}.weight_zero_point": torch.ones(2)}), "zero points"),
        (lambda t: t.update({"model.x.weight_packed": torch.ones(2)}), "model.x.weight_packed belongs"),
        (lambda t: t.update({"model.x.weight": torch.ones(2, 2)}), "`ignore`: model.x"),
        (lambda t: t.update({"model.x.bias": torch.ones(2)}), "model.x.bias is not"),
        (lambda t: t[f"{DOWN}.weight_shape"][1].fill_(128), "pack to"),
        (
            lambda t: t.update({"model.norm.weight": t.pop("model.embed_tokens.weight")}),
            "embed_tokens.weight is missing",
        ),
    ],
)
def test_damage_is_found(packed, dense_folder, edit, complaint):
    folder, _ = packed
    change(folder, edit)
    report = verify_structure(folder, TensorFiles.open(dense_folder))
    assert any(complaint in problem for problem in report.problems), report.problems


def test_config_that_disagrees(packed):
    folder, _ = packed
    config = read_config(folder)
    write_config(folder, {**config, "intermediate_size": 512})
    assert any("(128, 512)" in problem for problem in verify_structure(folder).problems)
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*up_proj"]
    write_config(folder, config)
    with pytest.raises(CheckpointError, match=r"targets model\.layers\."):
        verify_structure(folder)


def test_one_flipped_code_is_found(packed):
    folder, digests = packed
    change(folder, lambda tensors: tensors[f"{DOWN}.weight_packed"][5, 7].bitwise_xor_(1))
    assert verify_structure(folder).ok, "structure alone cannot know"
    assert verify_against(folder, digests) == [
        f"{DOWN} reads back with other codes, scales or zero points than were chosen"
    ]
    digests["model.norm.weight"] = digest(TensorFiles.open(folder).tensor("model.norm.weight"))
    change(folder, lambda tensors: tensors["model.norm.weight"][0:1].add_(1))
    assert verify_against(folder, digests)[-1] == "model.norm.weight reads back with other bytes than were written"
    del digests["model.norm.weight"]
    digests["model.layers.9.x"] = digests.pop("model.layers.1.mlp.up_proj")
    assert len(verify_against(folder, digests)) == 3


@pytest.mark.parametrize(
    ("format", "scheme"),
    [
        ("gptq", Int(4, 64)),
        ("gptq", Int(8, None)),
        ("gptq", Int(3, 32)),
        ("awq", Int(4, 64)),
        ("awq", Int(4, 128, False)),
    ],
    ids=str,
)
def test_export_there_and_back(dense_folder, pack, tmp_path, format, scheme):
    weights = pack(dense_folder, tmp_path / "packed", lambda module: scheme)
    expected = {module: digest(weight) for module, weight in weights.items()}
    export_checkpoint(tmp_path / "packed", format, tmp_path / "there")
    assert PackedCheckpoint.open(tmp_path / "there").format == format
    assert verify_against(tmp_path / "there", expected) == []
    assert verify_structure(tmp_path / "there", TensorFiles.open(dense_folder)).problems == ()
    export_checkpoint(tmp_path / "there", "compressed-tensors", tmp_path / "back")
    assert verify_against(tmp_path / "back", expected) == []
    assert PackedCheckpoint.open(tmp_path / "back").scheme(DOWN) == scheme
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "packed", "there"]


def test_exported_words(dense_folder, pack, tmp_path):
    """Requirements that other engines check first: v1 zero points, float16 scales, shapes."""
    pack(dense_folder, tmp_path / "packed", lambda module: Int(4, 64))
    gptq = TensorFiles.open(export_checkpoint(tmp_path / "packed", "gptq", tmp_path / "gptq"))
    assert gptq.tensor(f"{DOWN}.qzeros").unique().tolist() == [0x77777777]
    assert gptq.tensor(f"{DOWN}.g_idx").tolist() == [column // 64 for column in range(256)]
    awq = TensorFiles.open(export_checkpoint(tmp_path / "packed", "awq", tmp_path / "awq"))
    assert awq.tensor(f"{DOWN}.qzeros").unique().tolist() == [0x88888888 - 2**32]
    assert (gptq.shape(f"{DOWN}.qweight"), awq.shape(f"{DOWN}.qweight")) == ((32, 128), (256, 16))
    assert gptq.dtype(f"{DOWN}.scales") == awq.dtype(f"{DOWN}.scales") == torch.float16
    assert gptq.dtype("model.layers.0.self_attn.q_proj.bias") == torch.bfloat16, "biases stay as they are"


def test_reports_travel_with_the_codes(packed):
    """The report lists digests of codes: it stays true in every format but the dense one."""
    folder, _ = packed
    (folder / "compression_report.json").write_text("{}")
    assert (export_checkpoint(folder, "gptq", folder.parent / "gptq") / "compression_report.json").is_file()
    dense = export_checkpoint(folder, "dense", folder.parent / "dense")
    assert not (dense / "compression_report.json").exists()
    assert (dense / "chat_template.jinja").is_file()


def refuse_export(folder, format, complaint):
    with pytest.raises((SchemeError, CheckpointError), match=complaint):
        export_checkpoint(folder, format, folder.parent / "out")
    assert not (folder.parent / "out").exists()
    assert not (folder.parent / "out.partial").exists()


def test_export_refusals(dense_folder, pack, tmp_path):
    pack(dense_folder, tmp_path / "asym", lambda module: Int(4, 64, False))
    pack(dense_folder, tmp_path / "w5", lambda module: Int(5, 64))
    pack(dense_folder, tmp_path / "mixed", lambda module: Int(8 if "down" in module else 4, 64))
    pack(dense_folder, tmp_path / "w8a8", lambda module: Int(8, None, activations=Activations.INT8))
    refuse_export(tmp_path / "asym", "gptq", "asymmetric")
    refuse_export(tmp_path / "w5", "gptq", r"gptq .*2, 3, 4 .*8 .* 5\. ")
    refuse_export(tmp_path / "w5", "awq", "awq .*4-bit.* w5a16")
    refuse_export(tmp_path / "mixed", "gptq", r"gptq .* 2\. .*compressed-tensors")
    refuse_export(tmp_path / "w8a8", "gptq", "gptq .*rounded")
    refuse_export(dense_folder, "gptq", f"^{dense_folder} .*compress quantize")
    refuse_export(tmp_path / "w5", "onnx", "'onnx'")
    export_checkpoint(tmp_path / "w8a8", "dense", tmp_path / "out")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/out exists"):
        export_checkpoint(tmp_path / "w8a8", "dense", tmp_path / "out")


def test_scales_outside_of_float16_are_refused(packed):
    folder, _ = packed
    change(folder, lambda tensors: tensors[f"{DOWN}.weight_scale"].view(-1)[0:1].fill_(1e-9))
    refuse_export(folder, "gptq", r"1 of 512 scales .*have no exact float16 value")
    change(folder, lambda tensors: tensors[f"{DOWN}.weight_scale"].view(-1)[0:1].fill_(1e6))
    refuse_export(folder, "awq", r"no exact float16 value.*--format dense")


def test_digest_sees_every_part(make_weight):
    weight = make_weight((8, 64), Int(4, 32, False))
    same = weight.scheme.weight(weight.qweight.clone(), weight.scales.to(torch.float32), weight.zero_points.clone())
    assert digest(same) == digest(weight), "the dtype of exact scales does not matter"
    for name in ("qweight", "scales", "zeros"):
        parts = {
            "qweight": weight.qweight.clone(),
            "scales": weight.scales.clone(),
            "zeros": weight.zero_points.clone(),
        }
        parts[name][0, 0] += 1
        assert digest(CodedWeight(**parts, scheme=weight.scheme)) != digest(weight)
