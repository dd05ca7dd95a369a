"""Every command takes the name of a model on the hub wherever it takes a folder, and real ones work on it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import httpx
import pytest
from huggingface_hub import ModelCard
from small_hub import Repository, SmallHub, commit_of, serving_hub

from compress.checkpoint.locate.hub import HubModel
from compress.common.cli import demo_model_path, draft_model_path

SHORT = ("--tokens", "128", "--max-seq-length", "64")
FEW = ("-p", "Once", "--max-tokens", "2")
COMMANDS = [
    "compress quantize org/demo --method rtn --dry-run",
    "compress prune org/demo --method magnitude --dry-run",
    "compress factorize org/demo --dry-run",
    "compress run int8-rtn org/demo --dry-run",
    "compress search org/demo --target-bpw 4 --dry-run",
    "compress eval --ppl org/packed --baseline org/demo --tokens 128 --max-seq-length 64",
    "compress verify org/packed",
    "compress doctor org/packed --against org/demo",
    "compress export org/packed --list",
    "compress report org/packed",
    "compress compare org/packed org/other",
    "compress fit org/demo --memory 1GiB --context 1k --draft org/draft",
    "runtime generate org/packed -p Once --max-tokens 2 --speculative-model org/draft",
    "runtime chat org/packed --max-tokens 2",
    "runtime memory org/packed",
    "runtime prepare org/packed",
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from compress.pipeline.prepare import RunRequest, prepare
    from compress.pipeline.run import run
    from compress.recipe import Recipe
    from compress.stages.quantize import QuantizeStage

    out = tmp_path_factory.mktemp("hub") / "packed"
    request = RunRequest(demo_model_path(), "demo", Recipe((QuantizeStage("rtn"),)), out, measure=True)
    return run(prepare(request), quiet=True).out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_name(
    command: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import compress.cli
    import runtime.cli

    folders = {"org/demo": demo_model_path(), "org/draft": draft_model_path(), "org/packed": packed}
    folders["org/other"] = shutil.copytree(packed, tmp_path / "other")
    asked = set[str]()

    def download(self: HubModel, **_: bool) -> Path:
        asked.add(self.repo)
        return folders[self.repo]

    monkeypatch.setattr(HubModel, "download", download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    program, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(sys, "stdin", StringIO("Hello\n"))
    with pytest.raises(SystemExit) as stop:
        (compress if program == "compress" else runtime).cli.main()
    assert not stop.value.code, capsys.readouterr().err
    assert asked == set(re.findall(r"org/\w+", command))


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    demo, draft = demo_model_path(), draft_model_path()
    with serving_hub({"org/demo": Repository({"main": demo}), "org/draft": Repository({"main": draft})}) as hub:
        yield hub


@pytest.mark.full
def test_a_model_of_the_hub_is_quantized_uploaded_measured_and_served(hub: SmallHub, tmp_path: Path) -> None:
    done = hub.run(tmp_path, "compress", "quantize", "org/demo", "--method", "rtn", "--bits", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].split()[:2] == ["hf", "upload"]
    report = json.loads((tmp_path / "packed/compression_report.json").read_text())
    assert report["source"] == f"org/demo@{commit_of('main')}"
    card = ModelCard((tmp_path / "packed/README.md").read_text())
    assert card.data.base_model == "org/demo"
    assert f"{report['quality']['kl_mean']:.5f}" in card.text
    assert f"{report['quality']['perplexity']:.3f}" in card.text

    hub.models["org/packed"] = Repository({"main": tmp_path / "packed", "v2": tmp_path / "packed"})
    measured = hub.run(tmp_path, "compress", "eval", "--ppl", "org/packed", "--json", *SHORT)
    assert json.loads(measured.stdout)["kl_mean"] > 0  # to the source, which is in the cache
    assert commit_of("main") in json.loads(measured.stdout)["baseline"]
    shutil.rmtree(tmp_path / "hf" / "hub" / "models--org--demo")
    measured = hub.run(tmp_path, "compress", "eval", "--ppl", "org/packed", "--json", *SHORT)
    assert json.loads(measured.stdout)["kl_mean"] is None  # its source is not downloaded unasked
    assert "org/demo" in measured.stderr

    command = [sys.executable, "-m", "runtime.cli", "serve", "org/packed@v2", "--port", "0"]
    command += ["--speculative-model", "org/draft"]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=hub.environment(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed = ""
        while "\ntry " not in printed:
            line = server.stdout.readline()
            assert line, printed
            printed += line
        url = re.search(r"serving .* at (https?://\S+)", printed)[1]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "org/packed"
        assert "org/draft@" in printed
        answer = httpx.post(f"{url}/v1/completions", json={"model": "org/packed", "prompt": "Once", "max_tokens": 2})
        assert answer.status_code == 200
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def headers_only(hub: SmallHub) -> bool:
    """Whether a part of the weights was asked for, and never the whole file."""
    ranges = [part for _, path, part in hub.requests if path.endswith(".safetensors") and "/resolve/" in path]
    return bool(ranges) and all(re.fullmatch(r"bytes=\d+-\d+", part) for part in ranges)


@pytest.mark.parametrize(
    "command",
    [
        "compress quantize NAME --method gptq --weights q4_k --dry-run --json",
        pytest.param("compress search NAME --target-bpw 4 --dry-run --json", marks=pytest.mark.full),
        pytest.param("compress run lowrank-int4 NAME --dry-run --json", marks=pytest.mark.full),
        "runtime memory NAME --memory 4GiB --json",
    ],
)
def test_plans_read_headers_in_place_of_weights(command: str, hub: SmallHub, tmp_path: Path) -> None:
    arguments = command.split()
    here, named = (
        hub.run(tmp_path, *(each.replace("NAME", name) for each in arguments)) for name in ("demo", "org/demo")
    )
    assert named.returncode == here.returncode == 0, named.stderr
    assert headers_only(hub)
    plan, expected = json.loads(named.stdout), json.loads(here.stdout)
    assert plan.keys() == expected.keys()
    told = {"model", "source", "path", "remedies", "quality_check", "seconds"}  # names, and a measured speed
    different = {key for key in plan if plan[key] != expected[key]} - told
    assert not different, {key: (plan[key], expected[key]) for key in different}
    (folder,) = (tmp_path / "cache/compress-runtime/headers").glob("*/snapshots/*")
    stored = folder / "model.safetensors"
    assert abs(stored.stat().st_size - (demo_model_path() / "model.safetensors").stat().st_size) < 4096
    assert stored.stat().st_blocks * 512 < 2**20


def test_values_are_downloaded_after_a_plan(hub: SmallHub, tmp_path: Path) -> None:
    plan = hub.run(tmp_path, "compress", "quantize", "org/demo", "--method", "rtn", "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert headers_only(hub)
    done = hub.run(tmp_path, "runtime", "generate", "org/demo", *FEW)
    assert done.returncode == 0, done.stderr
    assert not headers_only(hub)


def test_a_quantized_model_is_downloaded_for_a_plan(hub: SmallHub, packed: Path, tmp_path: Path) -> None:
    hub.models["org/packed"] = Repository({"main": packed})
    planned = hub.run(tmp_path, "runtime", "memory", "org/packed", "--memory", "4GiB")
    assert planned.returncode == 0, planned.stderr
    assert not headers_only(hub)


@pytest.mark.full
def test_a_gguf_file_of_the_hub_runs(hub: SmallHub, packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    made = hub.run(tmp_path, "compress", "export", str(packed), "--format", "gguf", "--out", str(folder / "m.gguf"))
    assert made.returncode == 0, made.stderr
    hub.models["org/files"] = Repository({"main": folder})
    done = hub.run(tmp_path, "runtime", "generate", "org/files:m.gguf", *FEW)
    assert done.returncode == 0, done.stderr
    planned = hub.run(tmp_path, "compress", "quantize", "org/files:m.gguf", "--method", "rtn", "--dry-run", "--json")
    assert json.loads(planned.stdout)["source"] == f"org/files@{commit_of('main')}:m.gguf"
