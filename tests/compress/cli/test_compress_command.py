"""The `compress` command as it is typed: help at once, plans, results, refusals in one line, Ctrl-C that resumes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from folders import private_copy
from help_pages import help_pages, seconds_of_help
from runs import num_forms

from compress.common.cli import tool_version
from compress.common.files import REPORT_FILE

ROOT = Path(__file__).parents[3]
COMMANDS = (
    "quantize",
    "prune",
    "factorize",
    "search",
    "eval",
    "compare-logits",
    "run",
    "verify",
    "reproduce",
    "doctor",
    "export",
    "report",
    "compare",
)
NOISE = 3.0  # how much slower than promised a busy machine may be
QUICK = ("--num-calibration-samples", "4", "--max-seq-length", "48", "--group-size", "64")


@dataclass(frozen=True)
class Answer:
    """Output and status of a command."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def compress(monkeypatch, capsys, tmp_path):
    """Runs `compress ARGUMENTS` in `tmp_path`, in this process, just as the console script does."""
    from compress.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str | int | Path, code: int = 0) -> Answer:
        monkeypatch.setattr(sys, "argv", ["compress", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        answer = Answer(stopped.value.code or 0, printed.out, printed.err)
        assert answer.code == code, answer.stderr
        return answer

    return call


def test_help_reads_well_and_loads_nothing_heavy() -> None:
    pages = help_pages("compress", ["", *COMMANDS])
    for command in COMMANDS:
        assert f"Usage: compress {command}" in pages


def test_help_returns_at_once() -> None:
    assert seconds_of_help("compress") < 0.5 * NOISE


def test_version_is_that_of_the_package(compress) -> None:
    assert compress("--version").stdout == f"compress-runtime {tool_version()}\n"


def test_option_names_are_the_agreed_ones(compress) -> None:
    text = compress("quantize", "--help").stdout
    agreed = "out method bits group-size symmetric asymmetric ignore calibration num-calibration-samples max-seq-length"
    for name in f"{agreed} device seed resume restart dry-run json dtype trust-remote-code".split():
        assert f"--{name}" in text
    assert "Default: 4; smoothquant and --fp8: 8." in " ".join(text.replace("│", " ").split())


def test_dry_run_shows_the_plan_and_writes_nothing(compress, tiny_model, tmp_path) -> None:
    shown = compress("quantize", tiny_model(), "--dry-run", *QUICK).stdout
    assert "model.layers.*.mlp.down_proj" in shown
    assert "awq w4a16 g64 sym" in shown
    assert "dense: token embedding" in shown
    assert "bits per weight: 4.250" in shown
    assert "peak memory: about" in shown
    assert "quality check: about" in shown
    assert "4 sequences of 48 tokens" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["demo", "demo-mixture"])
def test_a_bundled_model_by_name_with_the_default_method(compress, name: str) -> None:
    plan = json.loads(compress("quantize", name, "--dry-run", "--json", *QUICK, "--group-size", "32").stdout)
    assert plan["source"] == name


@pytest.mark.parametrize("command", ["quantize", "prune", "factorize", "run int4-rtn", "search --target-bpw 5"])
@pytest.mark.parametrize("obstacle", ["folder", "file", "link"])
def test_a_dry_run_takes_an_output_that_exists(compress, tiny_model, tmp_path, command: str, obstacle: str) -> None:
    out = tmp_path / "packed"
    if obstacle == "folder":
        out.mkdir()
        (out / REPORT_FILE).write_text("mine")
    elif obstacle == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    words = command.split()
    typed = [*words[:2], tiny_model()] if words[0] == "run" else [words[0], tiny_model(), *words[1:], *QUICK[:4]]
    plan = json.loads(compress(*typed, "--dry-run", "--json", "--restart").stdout)
    assert len([note for note in plan["notes"] if str(out.name) in note and "--out" in note]) == 1
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert "packed exists" in compress(*typed, code=1).stderr


def test_dry_run_as_json(compress, tiny_model, tmp_path) -> None:
    plan = json.loads(compress("quantize", tiny_model(), "--dry-run", "--json", *QUICK).stdout)
    assert plan["bits_per_weight"] == 4.25
    assert plan["calibration"]["tokens"] == 4 * 48
    # Windows of 256 tokens through all models, and the calibration sequences through the dense one.
    assert plan["quality_check"]["streamed"]["tokens"] == (1 + num_forms()) * 4096 + 4 * 48
    assert {layer["scheme"] for layer in plan["layers"]} == {"dense", "w4a16 g64 sym"}


def test_quantize_then_verify_then_export(compress, tiny_model, tmp_path) -> None:
    done = compress("quantize", tiny_model(), "--method", "gptq", *QUICK)
    assert "block 3/3" in done.stderr
    for words in ("times smaller", "read back bit for bit", "perplexity", "KL mean", "acceptance", "flipped"):
        assert words in done.stdout
    assert "compress eval --ppl packed/" in done.stdout
    assert "runtime serve packed/" in done.stdout
    verified = compress("verify", "packed").stdout
    assert "codes compared with" in verified
    listed = compress("export", "packed", "--list")
    assert "gptq: loaded by this runtime, vLLM; not known of transformers, SGLang" in listed.stdout
    compress("export", "packed", "--format", "gptq", "--out", "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text())["quantization_config"]["quant_method"] == "gptq"


def test_a_gate_decides_the_exit_status_and_keeps_the_output(compress, tiny_model, tmp_path) -> None:
    options = ("--method", "rtn", *QUICK[-2:])
    kept = compress("quantize", tiny_model(), *options, "--gate", "kl=9 acceptance=0.001", "--json")
    report = json.loads(kept.stdout)
    assert report["quality"]["acceptance"] > 0.001
    assert kept.stderr.count("gate: ") == 2
    recipe = tmp_path / "strict.yaml"
    recipe.write_text(
        "gate: {flips: 0, experts: 1, kl: 9}\nstages:\n- quantize: {method: rtn, bits: 3, group_size: 64}\n"
    )
    refused = compress("run", recipe, tiny_model(), "--out", "strict", "--gate", "kl=1e-9", code=1)
    last = refused.stderr.splitlines()[-1]
    assert all(f"{name} " in last for name in ("kl", "flips", "experts"))  # no text calibrated any expert
    assert json.loads((tmp_path / "strict" / REPORT_FILE).read_text())["quality"]["flips"] > 0
    assert "unknown" in compress("quantize", tiny_model(), "--gate", "kll=1", "--out", "other", code=1).stderr
    assert not (tmp_path / "other").exists()


def test_a_gate_measures_what_it_asks_for(compress, tmp_path) -> None:
    options = ("--method", "rtn", "--bits", 2, "--group-size", 64)
    gate = "ends=0.5 template=1 routers=0"
    done = compress("quantize", "demo", *options, "--gate", gate)
    assert "end of sequence: " in done.stdout
    assert done.stderr.count(": kept") == 3
    figures = json.loads((tmp_path / "packed" / REPORT_FILE).read_text())["figures"]
    assert [*figures] == ["ends", "template", "routers"]
    assert 0.5 <= figures["ends"]["value"] < 1
    assert not figures["routers"]["applies"]
    assert "| ends | " in (tmp_path / "packed/README.md").read_text()
    compress("report", "packed")
    assert figures["ends"]["text"] in (tmp_path / "report.html").read_text().replace("&gt;", ">")
    short = ("--tokens", 256, "--max-seq-length", 64)
    again = compress("compare-logits", "demo", "packed", *short, "--gate", "ends=1,kl=9", "--json", code=1)
    assert json.loads(again.stdout)["figures"] == {"ends": figures["ends"]}
    assert "does not keep its gate: ends is " in again.stderr
    server = compress("compare-logits", "demo", "http://127.0.0.1:9", "--gate", "ends=1", code=1)
    assert "is a server" in server.stderr


def test_without_a_tokenizer_the_advice_works(compress, tiny_model, tmp_path) -> None:
    source = private_copy(tiny_model(), tmp_path / "source")
    for file in source.glob("tokenizer*"):
        file.unlink()
    advice = compress("quantize", source, "--method", "rtn", "--group-size", 64).stdout.partition("Next")[2]
    commands = [shlex.split(line) for line in advice.splitlines() if line.strip().startswith(("compress", "runtime"))]
    assert commands
    for _, *arguments in commands:
        compress(*arguments)


def test_a_family_that_awq_cannot_smooth_gets_gptq(compress, tiny_model) -> None:
    options = ("--dry-run", "--json", "--num-calibration-samples", "4", "--max-seq-length", "48", "--group-size", "32")
    shown = compress("quantize", tiny_model("phi3", pad_token_id=0), *options)
    assert "--method" in shown.stderr
    plan = json.loads(shown.stdout)
    assert {layer["method"] for layer in plan["layers"] if layer["scheme"] != "dense"} == {"gptq"}
    chosen = json.loads(compress("quantize", tiny_model("phi3", pad_token_id=0), "--method", "awq", *options).stdout)
    assert any("awq" in note for note in chosen["notes"])


@pytest.mark.full
def test_quality_and_advice_of_a_family_that_only_transformers_computes(compress, tiny_model, tmp_path) -> None:
    done = compress("quantize", tiny_model("mpt"), "--method", "rtn", "--group-size", 32)
    quality = json.loads((tmp_path / "packed/compression_report.json").read_text())["quality"]
    assert quality["backend"] == "transformers"
    assert quality["kl_mean"] > 0
    advice = [
        line.split()
        for line in done.stdout.partition("Next")[2].splitlines()
        if line.strip()[:8] in ("compress", "runtime ")
    ]
    assert advice
    for _, *arguments in advice:
        compress(*arguments, "--tokens", 256)


@pytest.mark.full
def test_factorize_plans_packs_and_verifies(compress, tiny_model, tmp_path) -> None:
    arguments = (
        "factorize",
        tiny_model("llama"),
        "--keep",
        0.6,
        "--bits",
        8,
        "--num-calibration-samples",
        4,
        "--max-seq-length",
        48,
    )
    plan = compress(*arguments, "--dry-run").stdout
    assert "svd-llm 60% about rank" in plan
    assert "w8a16" in plan
    assert not (tmp_path / "packed").exists()
    compress(*arguments)
    assert "compress-runtime" in compress("verify", "packed").stdout
    compress("report", "packed")


def test_no_model_means_the_demo_model_and_says_so(compress, tmp_path) -> None:
    done = compress("quantize", "--method", "rtn", "--json")
    assert "demo model" in done.stderr
    report = json.loads(done.stdout)
    assert report["source"] == "demo"
    assert report["structure"]["ok"]
    assert json.loads((tmp_path / "packed/config.json").read_text())["compression_config"]["source"] == "demo"


@pytest.mark.full
def test_a_bundled_model_by_its_name(compress, tmp_path) -> None:
    report = json.loads(compress("quantize", "demo-mixture", "--method", "rtn", "--json").stdout)
    assert report["source"] == "demo-mixture"
    assert all(block["smoothing"] == [] for block in report["blocks"])
    kl = json.loads(compress("eval", "--ppl", "packed", "--tokens", 512, "--json").stdout)["kl_mean"]
    against = ("--baseline", "demo-mixture", "--tokens", 512, "--json")
    assert json.loads(compress("eval", "--ppl", "packed", *against).stdout)["kl_mean"] == kl > 0


@pytest.mark.full
def test_run_does_what_quantize_does(compress, tiny_model, tmp_path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("stages:\n  - quantize: {method: rtn, bits: 8, group_size: -1}\n")
    compress("run", recipe, tiny_model(), "--out", "by-recipe")
    compress("quantize", tiny_model(), "--method", "rtn", "--bits", 8, "--group-size", -1, "--out", "by-hand")
    first, second = (tmp_path / name / "model.safetensors" for name in ("by-recipe", "by-hand"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["quantize", "nowhere"], "model folder nowhere does not exist"),
        (["quantize", "--bits", "9"], r"bits=9.*2 to 8"),
        (["quantize", "--method", "gptk"], "'gptk'"),
        (["quantize", "--ignore", "lm_haed"], "lm_head"),
        (["quantize", "--calibration", "none.txt"], r"none\.txt"),
        (["quantize", "--num-calibration-samples", "0"], "samples=0"),
        (["quantize", "--method", "rtn", "--calibration", "pydoc"], "no stage of this run uses the calibration"),
        (["prune", "--group-size", "64"], r"--group-size 64.*--bits"),
        (["factorize", "--group-size", "64"], r"--group-size 64.*--bits"),
        (["prune", "--owl-lambda", "0.1"], r"owl_lambda=0\.1 .*--layerwise owl"),
        (["eval", "--ppl", "--linear-backend", "w4a9"], "'w4a9'"),
        (["eval", "--ppl", "--linear-backend", "w4a8"], "w4a8.*--activations 8bit"),
        (["quantize", "--seed", "-1"], r"seed=-1.*outside 0.*2\^63.*- 1"),
        (["quantize", "--method", "smoothquant", "--activation-bits", "16", "--dry-run"], "activation_bits: 8"),
        (["run", "int4-awk"], "'int4-awq'"),
        (["verify", "nowhere"], "nowhere does not exist"),
        (["export", "nowhere", "--format", "gptq", "--out", "x"], "nowhere does not exist"),
    ],
)
def test_refusals_are_one_line_with_a_remedy(compress, tmp_path, arguments, problem) -> None:
    lines = compress(*arguments, code=1).stderr.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert re.search(problem, lines[-1])
    assert list(tmp_path.iterdir()) == []


def test_loops_of_links_are_refused(compress, tmp_path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for command in (["quantize", "loop"], ["search", "loop", "--target-bpw", "4"], ["verify", "loop"]):
        assert compress(*command, code=1).stderr.startswith("error: ")
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    assert compress("eval", "--ppl", ".", code=1).stderr.startswith("error: ")


@pytest.mark.full
def test_ctrl_c_says_how_to_resume_and_the_next_run_does(compress, tiny_model, tmp_path) -> None:
    arguments = ["quantize", str(tiny_model(num_hidden_layers=8)), *QUICK]
    command = [sys.executable, "-m", "compress.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # A test run started in the background ignores SIGINT, and so would its children.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heeded
    )
    piece = tmp_path / "packed.partial/pieces/block-00000.safetensors"
    deadline = time.monotonic() + 100
    while not piece.exists() and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "--restart" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "packed").exists()
    resumed = compress(*arguments)
    assert re.search(r"block \d+ of \d+", resumed.stderr)
    assert (tmp_path / "packed/compression_report.json").exists()
