"""`compress eval` as it is typed: what it prints, which model it takes, how it refuses."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from compress.checkpoint.config import read_config
from compress.checkpoint.state_dtype import measured_states, require_measured
from compress.checkpoint.verify import verify_structure
from compress.cli import main
from compress.common.cli import demo_model_path
from compress.evaluate import session
from compress.evaluate.streamed import StreamedScorer

SHORT = ["--tokens", "128", "--max-seq-length", "64"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    """Runs `compress eval ...` in an empty folder: (status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compress", "eval", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A stand-in for `packed/`: the demo model, claiming to be made from itself."""
    folder = shutil.copytree(demo_model_path(), tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"compression_config": {"source": "demo"}}))
    return folder


def test_without_a_model_it_measures_the_demo_model_and_says_so(run):
    status, out, error = run("--ppl", *SHORT)
    assert status == 0
    assert re.search("packed/ .*demo model", error)
    assert "perplexity" in out
    assert "126" in out
    assert "Protocol: pydoc_data.topics of Python" in out


def test_without_a_model_packed_is_preferred(run, packed: Path):
    status, out, error = run("--ppl", *SHORT)
    assert status == 0
    assert " packed/" in error
    assert "baseline perplexity" in out
    assert "KL mean" in out


def test_json_is_one_object_with_the_promised_keys(run, packed: Path):
    status, out, _ = run("--ppl", "packed", *SHORT, "--json")
    values = json.loads(out)
    assert status == 0
    assert values["perplexity"] == values["baseline_perplexity"] > 1
    assert values["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert values["kl_p999"] == pytest.approx(0, abs=1e-5)
    assert values["tokens"] == 2 * 63


def test_streamed_figures_are_the_same(run, packed: Path, tmp_path: Path):
    status, out, error = run("--ppl", "packed", *SHORT, "--stream", "--json")
    assert status == 0
    assert "baseline, layer 1 of 6\n" in error
    assert not (tmp_path / "packed.eval.partial").exists()
    assert json.loads(out) == json.loads(run("--ppl", "packed", *SHORT, "--json")[1])


@pytest.mark.full
@pytest.mark.parametrize("family", ["demo-mixture", "qwen3_5_text", "gemma4_text"])
def test_streamed_figures_of_mixtures_and_hybrids_are_the_same(run, tiny_model, tmp_path: Path, capsys, family: str):
    model, packed = family if family == "demo-mixture" else str(tiny_model(family)), str(tmp_path / "small")
    compress_rtn(model, packed)
    capsys.readouterr()
    streamed, resident = (json.loads(run("--ppl", packed, *SHORT, *options, "--json")[1]) for options in STREAMED)
    assert streamed == resident
    assert streamed["kl_mean"] > 0


STREAMED = (("--stream",), ())


def compress_rtn(model: str, out: str) -> None:
    """Rounds a model to nearest by the command line."""
    arguments = ["compress", "quantize", model, "--method", "rtn", "--group-size", "32", "--out", out]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code


def test_the_plan_of_a_stream_and_its_run_count_the_same_tokens(run, packed: Path, tmp_path: Path):
    status, out, _ = run("--ppl", "packed", *SHORT, "--stream", "--dry-run", "--json")
    assert status == 0
    assert json.loads(out)["tokens"] == 2 * 128
    assert json.loads(out)["read_bytes"] == pytest.approx(2 * (packed / "model.safetensors").stat().st_size, rel=0.01)
    assert "one layer in memory" in run("--ppl", "packed", *SHORT, "--stream", "--dry-run")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_an_interrupted_stream_says_how_to_continue(run, packed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StreamedScorer, "states", lambda *_: interrupt())
    status, _, error = run("--ppl", "packed", *SHORT, "--stream")
    assert status == 130
    assert "in packed.eval.partial: run the same command" in " ".join(error.split())


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_local_text_is_measured(run, tmp_path: Path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    status, out, _ = run("--ppl", "--data", "text.txt", *SHORT, "--json")
    assert status == 0
    assert json.loads(out)["data"] == "text.txt"


def test_windows_longer_than_the_context_are_cut_aloud(run, packed: Path):
    config = json.loads((packed / "config.json").read_text()) | {"max_position_embeddings": 32}
    (packed / "config.json").write_text(json.dumps(config))
    status, out, err = run(str(packed), "--ppl", *SHORT, "--baseline", str(packed), "--json")
    assert status == 0
    [warning] = [line for line in json.loads(out)["warnings"] if "--max-seq-length 64" in line]
    assert " 32 tokens" in warning
    assert warning.split()[0] in err


def test_warnings_are_printed_beside_the_figures(run, packed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "overlap_warning", lambda *_: ("the figures flatter it",))
    status, out, error = run("--ppl", *SHORT, "--json")
    assert status == 0
    assert "warning: the figures flatter it" in error
    assert json.loads(out)["warnings"] == ["the figures flatter it"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--ppl"),
        (("--ppl", "nowhere"), r"nowhere does not exist"),
        (("--ppl", "--data", "./missing.txt"), r"\./missing\.txt"),
        (("--ppl", "--data", "empty.txt"), r"empty\.txt"),
        (("--ppl", "--data", "short.txt"), r"short\.txt gives"),
        (("--ppl", "--backend", "vllm"), "--backend"),
        (("--ppl", "--dtype", "int3"), "'int3'"),
        (("--ppl", "--max-seq-length", "1"), r"predict nothing\."),
        (("--ppl", "--dry-run"), "Add --stream"),
        (("--ppl", "--stream", "--backend", "transformers"), r"whole models only\."),
        (("--ppl", "--baseline", "nowhere"), r"model folder nowhere does not exist\."),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_one(run, tmp_path: Path, arguments, message: str):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "short.txt").write_text("three short words")
    status, out, error = run(*arguments)
    lines = [line for line in error.splitlines() if not line.startswith("No model named")]
    assert status == 1
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0])


@pytest.mark.full
def test_the_cost_of_states_is_recorded_for_serving(run, tiny_model, tmp_path: Path):
    model = shutil.copytree(tiny_model("qwen3_5_text"), tmp_path / "hybrid")
    options = ("--ppl", *SHORT, "--dtype", "float32", "--state-dtype", "bfloat16")
    status, out, _ = run(str(model), *options, "--record", "--json")
    assert status == 0
    (record,) = measured_states(read_config(model))
    assert record.dtype == json.loads(out)["state_dtype"] == "bfloat16"
    assert 1e-9 < record.kl_mean == json.loads(out)["kl_mean"]
    assert require_measured([record], "bfloat16") == record
    assert verify_structure(model).ok
    assert run(str(model), *options, "--backend", "transformers")[0] == 1
    assert run(str(demo_model_path()), *options)[0] == 1
    assert run(str(model), "--ppl", *SHORT, "--record")[0] == 1
