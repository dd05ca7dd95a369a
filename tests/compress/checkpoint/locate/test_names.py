"""Which words are names of the hub, and which files of a repository are read."""

from pathlib import Path

import pytest

from compress.checkpoint.locate import find_model, find_source, shown_name, source_name
from compress.checkpoint.locate.file_names import part_names, side_names, weight_names
from compress.checkpoint.locate.hub import HubModel
from compress.common.cli import BUNDLED, bundled_path
from compress.common.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/name", HubModel("org/name")),
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("org/name:m-Q4_0.gguf", HubModel("org/name", None, "m-Q4_0.gguf")),
        ("org/name@v1:sub/m.gguf", HubModel("org/name", "v1", "sub/m.gguf")),
    ],
)
def test_names_of_the_hub(text: str, model: HubModel) -> None:
    assert HubModel.parse(text) == model
    assert str(model) == text


@pytest.mark.parametrize(
    "text",
    [
        "gpt2",
        "demo",
        "packed",
        "/org/name",
        "../name",
        "./name",
        "a/b/c",
        "org/name.gguf",
        "org/name:x.bin",
        "o/n@",
        "",
    ],
)
def test_words_that_are_no_names_of_the_hub(text: str) -> None:
    assert HubModel.parse(text) is None
    if text in BUNDLED:
        assert find_model(text) == bundled_path(text)
    else:
        with pytest.raises(CheckpointError):
            find_model(text or "x")


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert find_model("org/name") == Path("org/name")


def test_recorded_names(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert source_name(snapshot) == shown_name(snapshot) == f"org/name@{COMMIT}"
    assert source_name(snapshot / "a.gguf") == f"org/name@{COMMIT}:a.gguf"
    assert source_name(tmp_path) == str(tmp_path)
    assert source_name(bundled_path("demo")) == "demo"
    assert find_source("demo") == bundled_path("demo")
    assert not find_source(f"org/name@{COMMIT}").exists()


def test_files_that_are_read() -> None:
    read = ["config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "README.md"]
    read += ["LICENSE", "additional_chat_templates/tool_use.jinja"]
    unread = ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.safetensors", "original/params.json"]
    unread += ["model.onnx", "picture.png", ".gitattributes", "onnx/config.json", "model.gguf"]
    assert side_names([*read, *unread, "modeling_x.py"], code=False) == read
    assert side_names([*read, *unread, "modeling_x.py"], code=True) == [*read, "modeling_x.py"]


def test_weights_that_are_read() -> None:
    shards, index = ["model-1.safetensors", "model-2.safetensors"], "model.safetensors.index.json"
    text = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    assert weight_names([*shards, "consolidated.safetensors", index], text) == [index, *shards]
    assert weight_names(["model.safetensors", *shards, index], text) == ["model.safetensors"]
    assert weight_names(["other.safetensors", "sub/model.safetensors"], "") == ["other.safetensors"]


def test_parts_of_a_split_file() -> None:
    assert part_names("m-00002-of-00003.gguf") == [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert part_names("m-00001-of-00001.gguf") is None
    assert part_names("m.gguf") is None
