"""The recipe stage mtp: a head of multi-token prediction is packed only while its drafts stay good."""

import json
import re
import shutil

import pytest
from runs import compress
from tiny_models import save_tiny_model
from tiny_mtp import save_copying_model, save_mtp_model, wrap_mtp_model

from compress.checkpoint.config import read_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, RecipeError
from compress.common.files import REPORT_FILE
from compress.pipeline.finish import compare_with_report
from compress.pipeline.mtp_head import HeadResult
from compress.recipe_file import parse_recipe
from compress.stages.mtp import MtpStage
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model
from runtime.model.mtp import load_head

TEXT = {"tokens": 512, "max_seq_length": 128, "group_size": 32}
HEAD = "model.layers.1."


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return with_tokenizer(save_copying_model(tmp_path_factory.mktemp("models") / "copying", vocab_size=8192))


def with_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_path() / name, folder / name)
    return folder


def reported(out):
    return json.loads((out / REPORT_FILE).read_text())["mtp"]


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 2])
def test_the_gate_decides_by_measured_drafts(bits, source, tmp_path) -> None:
    out = tmp_path / "packed"
    result = compress(source, out, QuantizeStage("rtn", Int(8, 32)), MtpStage(bits=bits, **TEXT))
    found, packed = result.mtp, PackedCheckpoint.open(out)
    assert found.dense > 0.8, "the head computes the model again"
    assert found.is_packed == (bits == 8) == (found.packed >= 0.95 * found.dense)
    names = [module for module in packed.modules if module.startswith(HEAD)]
    assert names == (sorted(found.modules) if bits == 8 else [])
    assert len(found.modules) == 7
    assert {str(packed.scheme(name)) for name in names} <= {str(Int(8, 32))}
    assert reported(out) == found.to_dict()
    assert not verify_structure(out).problems
    assert not compare_with_report(out)
    dense = json.loads((out / REPORT_FILE).read_text())["dense"]
    assert any(module.startswith(f"{HEAD}mlp") for module in dense) == (bits == 2)
    load_head(out, load_model(out))


@pytest.mark.full
def test_a_rejected_head_leaves_the_bytes_of_a_run_without_the_stage(source, tmp_path) -> None:
    stage = QuantizeStage("rtn", Int(8, 32))
    compress(source, tmp_path / "alone", stage)
    result = compress(source, tmp_path / "rejected", stage, MtpStage(bits=2, **TEXT))
    assert not result.mtp.is_packed
    alone, rejected = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("alone", "rejected"))
    assert alone == rejected


@pytest.mark.full
def test_experts_and_projections_of_a_mixture(tmp_path) -> None:
    """Routers and stacks of experts stay dense; a head whose drafts never fit is not judged."""
    folder = with_tokenizer(save_mtp_model(tmp_path / "model", "deepseek_v3", vocab_size=8192))
    result = compress(folder, tmp_path / "packed", QuantizeStage("rtn", Int(8, 32)), MtpStage(**TEXT))
    assert not any(module.endswith("mlp.gate") for module in result.mtp.modules)
    assert any(".experts." in module for module in result.mtp.modules)
    assert result.mtp.is_packed == (result.mtp.dense > 0 and result.mtp.packed >= 0.95 * result.mtp.dense)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_head_beside_a_multimodal_model(family, tmp_path, monkeypatch) -> None:
    """Packed although its drafts are random; towers and what stays dense of the head are named apart."""
    monkeypatch.setattr(HeadResult, "is_packed", True)
    sizes = {"shared_expert_intermediate_size": 64} if "moe" in family else {}
    folder = save_mtp_model(tmp_path / "model", family, vocab_size=8192, **sizes)
    folder = with_tokenizer(wrap_mtp_model(folder, family.removesuffix("_text")))
    out = tmp_path / "packed"
    found = compress(folder, out, QuantizeStage("rtn", Int(8, 32)), MtpStage(**TEXT)).mtp
    packed = PackedCheckpoint.open(out)
    assert sorted(found.modules) == [module for module in packed.modules if module.startswith("mtp.")]
    assert packed.scheme("mtp.fc") is None
    ignored = [entry.removeprefix("re:") for entry in read_config(out)["quantization_config"]["ignore"]]
    assert not any(re.match(pattern, module) for pattern in ignored for module in found.modules)
    assert any(re.match(pattern, "mtp.fc") for pattern in ignored)
    assert any(re.match(pattern, "model.visual.blocks.0.attn.qkv") for pattern in ignored)
    assert not verify_structure(out).problems
    load_head(out, load_model(out))
    export_checkpoint(out, "dense", tmp_path / "dense")
    load_head(tmp_path / "dense", load_model(tmp_path / "dense"))


def test_a_model_without_a_head_is_refused_before_the_run(tmp_path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    with pytest.raises(CheckpointError, match="multi-token") as caught:
        compress(folder, tmp_path / "packed", MtpStage())
    assert "mtp" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{min_acceptance: 0}", "min_acceptance=0"),
        ("{tokens: 2}", "tokens=2 .* 3.*tokens 8192"),
        ("{}\n- mtp: {}", "two mtp stages"),
        ("{format: 4}", "'format'.*mtp"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(text, problem) -> None:
    with pytest.raises(RecipeError, match=problem):
        parse_recipe(f"stages:\n- mtp: {text}\n", "mtp.yaml")


def test_a_recipe_file_has_the_stage() -> None:
    recipe = parse_recipe("stages:\n- mtp: {bits: 8, group_size: -1, min_acceptance: 0.9}\n", "mtp.yaml")
    stage = recipe.find(MtpStage)
    assert stage == MtpStage(8, -1, 0.9)
    assert stage.scheme == Int(8, None)
