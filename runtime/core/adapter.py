"""Interface of LoRA adapters for the engine. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from compress.common.errors import CheckpointError, ToolkitError, nearest
from compress.common.files import read_json

CONFIG = "adapter_config.json"


class Adapter(Protocol):
    """An adapter in host memory, which requests refer to."""

    @property
    def name(self) -> str:
        """Name by which requests ask for it."""

    @property
    def digest(self) -> str:
        """Hash of its files; keys and values are shared between requests of the same digest only."""


class AdapterStore(Protocol):
    """The adapters of an engine. Any thread may call it."""

    def load(self, name: str, path: Path) -> None:
        """Reads and checks the adapter of a folder, and serves it by a name from now on.

        Raises:
            ToolkitError: the folder holds none, it does not fit the model, or the name is taken; nothing is kept then.
        """

    def unload(self, name: str) -> None:
        """Forgets a name; requests in flight keep their adapter. Raises RequestError for an unknown one."""

    def find(self, name: str) -> Adapter | None:
        """Returns an adapter that is in host memory; None if it must be opened."""

    def open(self, name: str) -> Adapter:
        """Returns an adapter, read from its files if need be. Raises ToolkitError as `load`, or if it is unknown."""


def parse_modules(modules: Iterable[str]) -> dict[str, Path]:
    """Returns paths of adapters by name, from `name=path` or JSON objects with both. Raises ToolkitError for another
    form, or a name that is given twice."""
    found: dict[str, Path] = {}
    for each in modules:
        name, path, _ = _parse_module(each)
        if not name or not path:
            raise ToolkitError(f"--lora-modules {each!r} is not NAME=PATH", "Write --lora-modules sql=adapters/sql")
        if name in found:
            raise ToolkitError(f"--lora-modules names {name!r} twice", "Give each adapter a name of its own")
        found[name] = Path(path)
    return found


def share_modules(modules: Iterable[str], models: Collection[str]) -> dict[str, list[str]]:
    """Returns the elements of `modules` for each of several models. Raises ToolkitError as `find_base`."""
    shared: dict[str, list[str]] = {model: [] for model in models}
    for each in modules:
        name, path, base = _parse_module(each)
        shared[find_base(name, Path(path), base, models)].append(each)
    return shared


def find_base(name: str, path: Path, base: str, models: Collection[str]) -> str:
    """Returns the name of the model that an adapter is for: the only one, the one asked for, or the one that its
    configuration names.

    Args:
        base: name of the model that is asked for; "" for none.

    Raises:
        CheckpointError: the folder holds no adapter.
        ToolkitError: no model has that name, or the configuration names none of them.
    """
    if len(models) == 1:
        return next(iter(models))
    if base:
        if base not in models:
            problem = f"the adapter {name!r} is for the model {base!r}, which is not served"
            raise ToolkitError(problem, nearest(base, models, "Served"))
        return base
    trained = str(read_config(path).get("base_model_name_or_path") or "")
    found = [model for model in models if model in (trained, Path(trained).name)]
    if len(found) == 1:
        return found[0]
    problem = f"the base model {trained!r} of the adapter {name!r} does not say for which of {', '.join(models)} it is"
    example = json.dumps({"name": name, "path": str(path), "base_model_name": next(iter(models))})
    raise ToolkitError(problem, f"Give base_model_name, as in --lora-modules '{example}'")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads `adapter_config.json`. Raises CheckpointError if the folder holds none."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG}", "Name the folder that PEFT's save_pretrained wrote")
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def _parse_module(text: str) -> tuple[str, str, str]:
    """Returns name, path and base model."""
    if not text.startswith("{"):
        name, _, path = text.partition("=")
        return name, path, ""
    with suppress(ValueError):
        found = json.loads(text)
        return str(found.get("name", "")), str(found.get("path", "")), str(found.get("base_model_name") or "")
    return "", "", ""
