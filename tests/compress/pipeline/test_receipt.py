"""Receipts: equal runs write equal ones, and what was changed is named."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import change_tensors, private_copy
from runs import compress, prepared

from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.common.files import RECEIPT_FILE
from compress.pipeline.receipt import changed_files, changed_inputs, inputs, read_receipt
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    """Runs `compress ARGUMENTS` in `tmp_path`; returns its status and what it wrote."""
    from compress.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["compress", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), "".join(capsys.readouterr())

    return call


def receipt_of(method: str, out: Path, source: Path | None = None) -> dict[str, Any]:
    return read_receipt(compress(source or demo_model_path(), out, QuantizeStage(method, Int(4, 64))).out)


@pytest.mark.parametrize("method", ["rtn", *(pytest.param(each, marks=pytest.mark.full) for each in ("awq", "gptq"))])
def test_two_runs_write_the_same_receipt(method: str, tmp_path: Path) -> None:
    first, second = (receipt_of(method, tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert (first["calibration"] is None) == (method == "rtn") == (first["bits_depend_on"] == [])
    assert {*first["bits_depend_on"]} <= {*first["environment"]}
    assert not [*changed_files(first["outputs"], tmp_path / "second")]
    assert not [*changed_files(first["source"]["files"], demo_model_path())]


def test_other_inputs_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One text, which will be another. " * 400)
    stage = QuantizeStage("gptq", Int(4, 64))

    def of(text: Path, seed: int = 0) -> dict[str, Any]:
        options = CalibrationOptions(str(text), samples=2, length=32)
        return inputs(prepared(demo_model_path(), tmp_path / "out", stage, calibration=options, seed=seed))

    before = of(text)
    assert changed_inputs(before, of(text)) == []
    assert any(line.startswith("recipe.seed was 0, now 1") for line in changed_inputs(before, of(text, seed=1)))
    text.write_text("Another text, which was something else. " * 400)
    changed = [line.split()[0] for line in changed_inputs(before, of(text))]
    assert {"calibration.sha256", "calibration.token_sha256"} <= {*changed}
    assert {each.partition(".")[0] for each in changed} == {"calibration"}


def test_a_copy_in_another_container_has_no_receipt(tiny_model, tmp_path: Path) -> None:
    out = compress(tiny_model(), tmp_path / "packed", QuantizeStage("rtn", Int(4, 32))).out
    assert (out / RECEIPT_FILE).is_file()
    export_checkpoint(out, "gptq", tmp_path / "exported")
    assert not (tmp_path / "exported" / RECEIPT_FILE).exists()
    with pytest.raises(CheckpointError, match=RECEIPT_FILE):
        read_receipt(tmp_path / "exported")
    receipt = read_receipt(out) | {"format_version": 99}
    (out / RECEIPT_FILE).write_text(json.dumps(receipt))
    with pytest.raises(CheckpointError, match="version"):
        read_receipt(out)


@pytest.mark.full
def test_a_command_is_repeated_and_what_changed_is_named(command, tiny_model, tmp_path: Path) -> None:
    source = private_copy(tiny_model(), tmp_path / "source")
    recipe = tmp_path / "strict.yaml"
    recipe.write_text("stages:\n- quantize: {method: rtn, bits: 4, group_size: 32}\n")
    assert command("run", "strict.yaml", "source", "--out", "packed", "--gate", "kl=0")[0] == 1
    assert command("verify", "packed", "--receipt")[0] == 0
    status, said = command("reproduce", "packed")
    assert status == 0
    assert said.startswith("model.safetensors: the same bytes\n")

    shutil.move(source, tmp_path / "elsewhere")
    assert command("reproduce", "packed")[0] == 1
    assert command("reproduce", "packed", "--model", "elsewhere", "--work", ".")[0] == 0
    assert {each.name for each in tmp_path.iterdir()} == {"elsewhere", "packed", "strict.yaml"}

    recipe.write_text(recipe.read_text().replace("bits: 4", "bits: 5"))
    status, said = command("reproduce", "packed", "--model", "elsewhere")
    assert status == 1
    assert "model.safetensors: other bytes" in said
    assert "recipe.stages.0.scheme.bits was 4, now 5" in said.splitlines()[-1]

    change_tensors(tmp_path / "elsewhere", lambda tensors: tensors["model.norm.weight"].add_(1))
    status, said = command("reproduce", "packed", "--model", "elsewhere")
    assert status == 1
    assert "the dense model changed: model.safetensors" in said
    change_tensors(tmp_path / "packed", lambda tensors: tensors["model.norm.weight"].add_(1))
    status, said = command("verify", "packed", "--receipt")
    assert status == 1
    assert "other bytes than the receipt says" in said


def test_a_checkpoint_of_a_script_cannot_be_repeated_by_a_command(command, tiny_model, tmp_path: Path) -> None:
    compress(tiny_model(), tmp_path / "packed", QuantizeStage("rtn", Int(4, 32)))
    status, said = command("reproduce", "packed")
    assert status == 1
    assert "script" in said


@pytest.mark.full
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_calibrated_commands_are_reproduced(command, method: str) -> None:
    options = ("--num-calibration-samples", 4, "--max-seq-length", 48, "--group-size", 64, "--seed", 3)
    assert command("quantize", "demo", "--method", method, *options)[0] == 0
    status, said = command("reproduce", "packed")
    assert status == 0
    assert "differs" not in said


def test_the_command_of_a_request_is_in_its_receipt(tiny_model, tmp_path: Path) -> None:
    context = prepared(tiny_model(), tmp_path / "packed", QuantizeStage("rtn", Int(4, 32)))
    context = replace(context, request=replace(context.request, command="compress quantize 'a b' --bits 4"))
    run(context, quiet=True)
    assert read_receipt(tmp_path / "packed")["command"] == ["compress", "quantize", "a b", "--bits", "4"]
