"""Adapters of several models: for which of them each is."""

import json
from pathlib import Path

import pytest

from compress.common.errors import CheckpointError, ToolkitError
from runtime.core.adapter import CONFIG, find_base, share_modules

MODELS = ("org/small", "large")


def save(folder: Path, base: object) -> Path:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


@pytest.mark.parametrize(
    ("trained", "model"), [("large", "large"), ("/models/large", "large"), ("org/small", "org/small")]
)
def test_the_configuration_of_an_adapter_names_its_model(tmp_path: Path, trained: str, model: str) -> None:
    assert find_base("sql", save(tmp_path / "sql", trained), "", MODELS) == model


def test_a_name_that_is_asked_for_comes_first(tmp_path: Path) -> None:
    folder = save(tmp_path / "sql", "large")
    assert find_base("sql", folder, "org/small", MODELS) == "org/small"
    with pytest.raises(ToolkitError, match=r"'small', which is not served.*Did you mean 'org/small'"):
        find_base("sql", folder, "small", MODELS)


def test_an_adapter_of_one_model_need_not_name_it(tmp_path: Path) -> None:
    assert find_base("sql", tmp_path / "missing", "", ["demo"]) == "demo"


@pytest.mark.parametrize("trained", ["medium", None, 3])
def test_an_adapter_of_no_served_model_is_refused_with_an_example(tmp_path: Path, trained: object) -> None:
    with pytest.raises(ToolkitError, match=r'which of org/small, large.*"base_model_name": "org/small"'):
        find_base("sql", save(tmp_path / "sql", trained), "", MODELS)
    with pytest.raises(CheckpointError, match=CONFIG):
        find_base("sql", tmp_path / "missing", "", MODELS)


def test_modules_are_shared_among_models(tmp_path: Path) -> None:
    modules = [f"a={save(tmp_path / 'a', 'large')}", '{"name": "b", "path": "b", "base_model_name": "org/small"}']
    assert share_modules(modules, MODELS) == {"org/small": modules[1:], "large": modules[:1]}
    assert share_modules([], MODELS) == {"org/small": [], "large": []}
