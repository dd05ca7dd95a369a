"""Mistakes that users make first, in every command that takes a model: one line with the remedy; nothing is left."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runtime_command import run_here

from compress.cli import main as compress
from compress.common.cli import demo_model_path
from compress.common.files import LFS_MARK, MAX_FILE_BYTES
from runtime.backends.registry import is_fast
from runtime.cli import main as runtime

POINTER = (
    LFS_MARK + b".github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
)
COMMANDS: dict[str, tuple[Callable[[], None], str]] = {
    "quantize": (compress, "quantize MODEL --method rtn --out out"),
    "prune": (compress, "prune MODEL --out out"),
    "run": (compress, "run int4-gptq MODEL --out out"),
    "search": (compress, "search MODEL --target-bpw 4 --out out"),
    "eval": (compress, "eval MODEL --ppl --tokens 256 --max-seq-length 128"),
    "verify": (compress, "verify MODEL"),
    "doctor": (compress, "doctor MODEL --json"),
    "export": (compress, "export MODEL --format dense --out out"),
    "fit": (compress, "fit MODEL --memory 1GiB --context 1k"),
    "serve": (runtime, "serve MODEL --port 0"),
    "generate": (runtime, "generate MODEL --prompt x"),
    "chat": (runtime, "chat MODEL"),
    "batch": (runtime, "batch requests.jsonl answers.jsonl --model MODEL"),
    "memory": (runtime, "memory MODEL"),
    "prepare": (runtime, "prepare MODEL"),
}
READS_CONFIG_ONLY = {"fit"}
READS_NO_TOKENIZER = {"fit", "verify", "export", "memory", "prepare", "search", "prune"}
"""The last two read theirs later than the weights; the others do not read it."""


def in_place_of(name: str, content: bytes) -> Callable[[Path], str]:
    """Returns a mistake: the demo model, with a file of another content."""

    def make(folder: Path) -> str:
        model = shutil.copytree(demo_model_path(), folder / "model")
        (model / name).write_bytes(content)
        return "model"

    return make


def renamed(name: str, other: str) -> Callable[[Path], str]:
    """Returns a mistake: the demo model, with a file of another name."""

    def make(folder: Path) -> str:
        model = shutil.copytree(demo_model_path(), folder / "model")
        (model / name).rename(model / other)
        return "model"

    return make


def only_adapter(folder: Path) -> str:
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "r": 8}')
    (folder / "lora" / "adapter_model.safetensors").write_bytes(POINTER)
    return "lora"


def only_pickles(folder: Path) -> str:
    model = shutil.copytree(demo_model_path(), folder / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return "model"


def model_file(folder: Path) -> str:
    shutil.copytree(demo_model_path(), folder / "model")
    return "model/model.safetensors"


def other_case(folder: Path) -> str:
    shutil.copytree(demo_model_path(), folder / "Model-1B")
    return "model-1b"


def pipe_as(name: str) -> Callable[[Path], str]:
    """Returns a mistake: the demo model, with a pipe that no process writes to in the place of a file."""

    def make(folder: Path) -> str:
        model = shutil.copytree(demo_model_path(), folder / "model")
        (model / name).unlink()
        os.mkfifo(model / name)
        return "model"

    return make


def device_as_config(folder: Path) -> str:
    model = shutil.copytree(demo_model_path(), folder / "model")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("/dev/zero")
    return "model"


def explosive_tokenizer(folder: Path) -> str:
    model = shutil.copytree(demo_model_path(), folder / "model")
    content = json.loads((model / "tokenizer.json").read_bytes())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [step] * 40}
    (model / "tokenizer.json").write_text(json.dumps(content))
    return "model"


def several_snapshots(folder: Path) -> str:
    for commit in ("c0ffee", "decade"):
        shutil.copytree(demo_model_path(), folder / "models--org--name" / "snapshots" / commit)
    return "models--org--name"


MISTAKES: dict[str, tuple[Callable[[Path], str], str, set[str]]] = {
    "pointer of weights": (in_place_of("model.safetensors", POINTER), "git lfs pull", READS_CONFIG_ONLY),
    "pointer of config": (in_place_of("config.json", POINTER), "git lfs pull", set()),
    "pointer of tokenizer": (in_place_of("tokenizer.json", POINTER), "git lfs pull", READS_NO_TOKENIZER),
    "adapter": (only_adapter, r"org/base.*merge_and_unload", set()),
    "pickles": (only_pickles, r"pytorch_model\.bin.*save_pretrained", READS_CONFIG_ONLY),
    "file": (model_file, r"Name its folder, \S*model", set()),
    "case of folder": (other_case, "Model-1B", set()),
    "case of config": (renamed("config.json", "Config.json"), r"Rename Config\.json", set()),
    "case of weights": (renamed("model.safetensors", "MODEL.SAFETENSORS"), "Rename MODEL", READS_CONFIG_ONLY),
    "nowhere": (lambda folder: "nowhere", "nowhere", set()),
    "pipe": (pipe_as("config.json"), r"config\.json", set()),
    "pipe of tokenizer": (pipe_as("tokenizer_config.json"), r"tokenizer_config\.json", READS_NO_TOKENIZER),
    "pipe of template": (pipe_as("chat_template.jinja"), r"chat_template\.jinja", READS_NO_TOKENIZER),
    "device": (device_as_config, r"config\.json", set()),
    "explosive tokenizer": (explosive_tokenizer, "1000", READS_NO_TOKENIZER),
    "snapshots": (several_snapshots, "snapshots/c0ffee", set()),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_command_names_the_remedy_of_a_mistake(mistake: str, tmp_path: Path) -> None:
    make, remedy, without = MISTAKES[mistake]
    model = make(tmp_path)
    (tmp_path / "requests.jsonl").write_text(
        json.dumps(
            {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "x"}}
        )
    )
    before = sorted(tmp_path.rglob("*"))
    for name in COMMANDS.keys() - without:
        main, line = COMMANDS[name]
        answer = run_here(main, *line.replace("MODEL", model).split(), cwd=tmp_path)
        assert answer.returncode == 1, name
        assert "Traceback" not in answer.stderr, name
        *_, last = answer.stderr.splitlines()
        assert last.startswith("error: "), name
        said = answer.stdout if name == "doctor" and answer.stdout else last
        assert re.search(remedy, said, re.DOTALL), (name, said)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_folder_of_the_hubs_cache_is_followed_to_its_snapshot(tmp_path: Path) -> None:
    cached = several_snapshots(tmp_path)
    (tmp_path / cached / "refs").mkdir()
    (tmp_path / cached / "refs" / "main").write_text("decade")
    (tmp_path / cached / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    for name in ("verify", "doctor", "memory", "generate", "fit"):
        main, line = COMMANDS[name]
        answer = run_here(main, *line.replace("MODEL", cached).split(), cwd=tmp_path)
        assert answer.returncode == 0, (name, answer.stderr)


def test_byte_order_marks_are_read(tmp_path: Path) -> None:
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    for file in model.glob("*.json"):
        file.write_bytes(BOM_UTF8 + file.read_bytes())
    assert run_here(compress, "quantize", "model", "--dry-run", cwd=tmp_path).returncode == 0
    for name in ("eval", "verify", "doctor", "generate", "fit"):
        main, line = COMMANDS[name]
        answer = run_here(main, *line.replace("MODEL", "model").split(), cwd=tmp_path)
        assert answer.returncode == 0, (name, answer.stderr)


SMALL_FILES = {
    "calibration": (compress, "quantize demo --calibration FILE --dry-run"),
    "evaluation": (compress, "eval demo --ppl --data FILE"),
    "recipe": (compress, "run FILE demo --dry-run"),
    "options": (runtime, "serve demo --config FILE"),
    "keys": (runtime, "serve demo --port 0 --api-keys FILE"),
    "schema": (runtime, "generate demo --prompt x --json-schema FILE"),
    "requests": (runtime, "batch FILE answers.jsonl --model demo"),
}
OF_ANY_SIZE = {"calibration", "evaluation", "requests"}


@pytest.mark.parametrize("place", SMALL_FILES)
def test_devices_and_pipes_in_the_place_of_files_neither_block_nor_fill_the_memory(place: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", MAX_FILE_BYTES + 1)
    main, line = SMALL_FILES[place]
    for name in ("pipe", "zero", *(() if place in OF_ANY_SIZE else ("large",))):
        answer = run_here(main, *line.replace("FILE", name).split(), cwd=tmp_path)
        assert answer.returncode == 1, (name, answer.stderr)
        assert answer.stderr.splitlines()[-1].startswith("error: "), (name, answer.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "pipe", "zero"]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
GENERATE = [sys.executable, "-m", "runtime.cli", "generate", "demo"]


@pytest.mark.parametrize(("limits", "status"), [("ulimit -v 250000", 1), ("ulimit -v 1000000", 1), ("ulimit -n 16", 0)])
def test_little_room(limits: str, status: int, tmp_path: Path) -> None:
    line = f"{limits}; {shlex.join(GENERATE)} --prompt x --max-tokens 2"
    answer = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == status, answer.stderr
    (line,) = (line for line in answer.stderr.splitlines() if not line.startswith("model: "))
    assert line.startswith("error: ") == (status == 1)


def test_text_that_a_terminal_lacks_is_escaped() -> None:
    code = "import typer; from compress.common.cli import run_cli; app = typer.Typer(); "
    code += "app.command()(lambda: print(chr(0x4eac))); run_cli(app)"
    plain = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    answer = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout.strip()) == (0, ascii(chr(0x4EAC))[1:-1]), answer.stderr


def test_output_to_a_closed_pipe_ends_without_a_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "compress.cli", "fit", "demo", "--memory", "1GiB", "--context", "1k"]
    answer = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True, timeout=120)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (1, "")


def test_a_prompt_that_is_no_text() -> None:
    strict = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:strict"}
    answer = subprocess.run(GENERATE, input=b"caf\xe9", env=strict, capture_output=True, timeout=120)
    assert answer.returncode == 1
    assert answer.stderr.startswith(b"error: standard input")


@pytest.mark.skipif(not is_fast(torch.bfloat16), reason="this processor's kernels pack no 16-bit weights")
def test_bundled_models_are_prepared_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    answer = run_here(runtime, "prepare", "demo", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert list((tmp_path / "cache").rglob("*.safetensors"))
    assert not (demo_model_path() / "prepared").exists()


def test_bits_of_a_head_that_is_the_embedding_name_the_option_for_both(tmp_path: Path) -> None:
    answer = run_here(compress, "quantize", "demo", "--head-bits", "4", "--dry-run", cwd=tmp_path)
    assert (answer.returncode, "--embedding-bits" in answer.stderr) == (1, True)


@pytest.mark.parametrize("target", ["nowhere/x.yaml", "file/x.yaml", "."])
def test_a_search_tries_its_files_before_it_measures(target: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = run_here(compress, "search", "demo", "--target-bpw", "5", "--recipe", target, cwd=tmp_path)
    assert answer.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
