"""Smaller models compute what is left of the source, load everywhere, and are taken by other stages and commands."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from folders import change_tensors
from killed_runs import killed_after_block
from runs import compress, prepared, same_bytes
from safetensors.torch import load_file
from tiny_models import load_reference, reference_logits
from typer.testing import CliRunner

from compress.checkpoint.config import read_config
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.cli import make_app
from compress.common.cli import bundled_path, demo_model_path
from compress.common.errors import RecipeError
from compress.common.files import REPORT_FILE
from compress.pipeline.run import run
from compress.stages.finish import FinishStage
from compress.stages.quantize import QuantizeStage
from compress.stages.shrink import ShrinkStage

TOKENS = torch.arange(10, 58).view(2, 24) * 131 % 8000 + 10
NARROW = ShrinkStage(heads=1, channels=0.5, channel_multiple=32)


def logits(folder: Path) -> torch.Tensor:
    return reference_logits(load_reference(folder), TOKENS)


@pytest.mark.parametrize("score", ["kl", "influence"])
def test_a_block_that_does_nothing_leaves_first(tiny_model, tmp_path: Path, score: str) -> None:
    source = Path(shutil.copytree(tiny_model("qwen2", torch.float32), tmp_path / "dense"))
    idle = [f"model.layers.1.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj")]
    change_tensors(source, lambda tensors: [tensors[name].zero_() for name in idle])
    result = compress(source, tmp_path / "out", ShrinkStage(blocks=1, block_score=score))
    (step,) = result.report["shrink"]["blocks"]
    assert step["removed"] == 1
    assert step["scores"]["1"] == pytest.approx(0, abs=1e-5) != step["scores"]["0"]
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0, atol=1e-9)
    before, after = read_config(source), read_config(tmp_path / "out")
    assert after["num_hidden_layers"] == before["num_hidden_layers"] - 1
    assert after["layer_types"] == [before["layer_types"][0], before["layer_types"][2]]


def test_channels_and_heads_of_zeros_leave_and_logits_stay(tiny_model, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("phi3", torch.float32), tmp_path / "dense"))

    def empty(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("mlp.down_proj.weight"):
                tensor[:, 1::2] = 0
            elif name.endswith("self_attn.o_proj.weight"):
                tensor[:, : tensor.shape[1] // 2] = 0

    change_tensors(source, empty)
    result = compress(source, tmp_path / "out", NARROW)
    for record in result.report["shrink"]["units"]:
        assert record["heads"]["removed"] == [0]
        assert record["channels"]["removed"] == list(range(1, 256, 2))
    config, tensors = read_config(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 32)
    assert config["intermediate_size"] == 128
    assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == (4 * 32, 128)
    assert tensors["model.layers.0.mlp.gate_up_proj.weight"].shape == (2 * 128, 128)
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0, atol=0.02)


def test_the_experts_that_add_least_leave(tiny_model, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("mixtral", torch.float32), tmp_path / "dense"))

    def weaken(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts.2." in name or ".experts.5." in name:
                tensor *= 0.01

    change_tensors(source, weaken)
    result = compress(source, tmp_path / "out", ShrinkStage(experts=2))
    assert all(record["experts"]["removed"] == [2, 5] for record in result.report["shrink"]["units"])
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    gates = [name for name in before if name.endswith("gate.weight")]
    assert all(torch.equal(after[name], before[name][[0, 1, 3, 4, 6, 7]]) for name in gates)
    assert read_config(tmp_path / "out")["num_local_experts"] == 6
    assert verify_structure(tmp_path / "out").ok


def test_other_stages_work_on_what_is_left(tmp_path: Path) -> None:
    stages = (
        ShrinkStage(blocks=1, block_score="influence", channels=0.3),
        QuantizeStage("rtn", Int(4, 64)),
        FinishStage(steps=2),
    )
    result = compress(demo_model_path(), tmp_path / "out", *stages)
    config = read_config(tmp_path / "out")
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (5, 512)
    assert len(result.structure.quantized) == 5 * 7
    assert result.finish is not None
    assert result.report["plan"]["bytes_before"] > 13e6


def test_a_shrunk_model_is_healed_by_updates_of_its_matrices(tmp_path: Path) -> None:
    narrow, heal = ShrinkStage(channels=0.5, refit=False), FinishStage(steps=20, rank=8, learning_rate=0.003)
    result = compress(demo_model_path(), tmp_path / "out", narrow, heal)
    assert result.finish is not None
    assert result.finish.kl_after < 0.9 * result.finish.kl_before
    assert read_config(tmp_path / "out")["intermediate_size"] == 384
    assert verify_structure(tmp_path / "out").ok


def test_an_interrupted_run_continues_and_writes_the_same_bytes(tiny_model, tmp_path: Path) -> None:
    source, stage = tiny_model("llama", torch.float32), ShrinkStage(blocks=1, channels=0.5, channel_multiple=32)
    compress(source, tmp_path / "whole", stage)
    with killed_after_block(0):
        compress(source, tmp_path / "out", stage)
    assert (tmp_path / "out.partial").exists()
    assert not (tmp_path / "out").exists()
    compress(source, tmp_path / "out", stage)
    assert same_bytes(tmp_path / "whole", tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("family", "stage", "problem"),
    [
        ("olmo2", ShrinkStage(heads=1), "no heads"),
        ("gemma4_text", ShrinkStage(blocks=1), "read keys, values or choices of earlier ones"),
        ("mamba2", ShrinkStage(channels=0.5), "no channels"),
        ("llama", ShrinkStage(experts=1), "no experts"),
        ("mixtral", ShrinkStage(experts=7), "leaves 1 of 8"),
        ("llama", ShrinkStage(blocks=3), "cannot say fewer than 1 of 3 blocks"),
        ("llama", ShrinkStage(heads=2), "leaves 0 of 2"),
        ("llama", ShrinkStage(channels=0.99), "leaves 0 of 256"),
        ("deepseek_v3", ShrinkStage(experts=2), "6 experts cannot be chosen from 4 groups"),
        ("falcon", ShrinkStage(blocks=1), "model type 'falcon' cannot shrink"),
    ],
)
def test_what_no_config_can_say_is_refused_before_the_run(
    tiny_model, tmp_path: Path, family: str, stage: ShrinkStage, problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        prepared(tiny_model(family), tmp_path / "out", stage)
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_the_command_writes_a_model_that_quantize_takes(tmp_path: Path) -> None:
    def command(*arguments: str) -> str:
        found = CliRunner().invoke(make_app(), list(arguments))
        assert found.exit_code == 0, found.output
        return found.output

    shrunk, short = tmp_path / "shrunk", ("--num-calibration-samples", "8", "--max-seq-length", "128")
    assert "removed" in command("shrink", "--channels", "0.3", "--out", str(shrunk), "--dry-run", *short)
    command("shrink", "--channels", "0.3", "--out", str(shrunk), "--gate", "kl=0.5", *short)
    report = json.loads((shrunk / REPORT_FILE).read_text())
    assert report["structure"]["format"] == "dense"
    assert 0 < report["quality"]["kl_mean"] < 0.5
    command("verify", str(shrunk))
    command("quantize", str(shrunk), "--method", "rtn", "--out", str(tmp_path / "packed"))
    refused = CliRunner().invoke(make_app(), ["shrink", "--out", str(tmp_path / "none")])
    assert "removes nothing" in str(refused.exception)


@pytest.mark.full
def test_scores_and_fit_lower_the_divergence(tmp_path: Path) -> None:
    """The demo model on text other than that of the calibration."""

    def divergence(name: str, **options) -> float:
        context = prepared(demo_model_path(), tmp_path / name, ShrinkStage(**options), measure=True)
        return run(context, quiet=True).quality["kl_mean"]

    fitted, plain = (divergence(f"channels-{fits}", channels=0.3, refit=fits) for fits in (True, False))
    assert fitted < 0.75 * plain
    by_kl, by_influence = (divergence(score, blocks=1, block_score=score) for score in ("kl", "influence"))
    assert by_kl <= by_influence


@pytest.mark.full
def test_experts_of_the_demo_mixture(tmp_path: Path) -> None:
    context = prepared(bundled_path("demo-mixture"), tmp_path / "out", ShrinkStage(experts=2), measure=True)
    assert run(context, quiet=True).quality["kl_mean"] < 0.3
