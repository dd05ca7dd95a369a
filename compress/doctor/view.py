"""Parts of a checkpoint that checks read, each opened once; an unreadable part is recorded as an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.config import CONFIG_FILE, is_embedding
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import Shapes
from compress.checkpoint.weights.base import PANEL_ELEMENTS, Weight
from compress.common.errors import ToolkitError
from compress.common.files import read_json
from compress.models.registry import find_family
from compress.models.spec import ModelSpec
from compress.targets import without_indices
from runtime.core.model_config import parse_config
from runtime.text.tokenizer import Tokenizer

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class StoredTensor:
    """Weight of a quantized module, or any other tensor.

    Attributes:
        is_packed: whether it is a module.
        order: of the weight's columns, where they are not in the order of the inputs (`PackedCheckpoint.column_order`).
    """

    name: str
    content: Weight | Tensor
    is_packed: bool
    order: Tensor | None = None

    @property
    def kind(self) -> str:
        """Name with layer indices replaced, shared by the same tensor of all layers."""
        return without_indices(self.name.removesuffix(".weight"))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.content.shape)

    @cached_property
    def values(self) -> Tensor:
        """Values; those of a quantized weight are float32 `[O, I]`."""
        if not isinstance(self.content, Weight):
            return self.content
        values = self.content.dequantize()
        return values if self.order is None else values[:, self.order.argsort()]

    def panels(self) -> Iterator[Tensor]:
        """Yields a matrix in chunks of rows, float32 `[rows, I]`."""
        rows = max(1, PANEL_ELEMENTS // max(1, self.values.shape[-1]))
        yield from (panel.float() for panel in self.values.split(rows))


class View:
    """A checkpoint under examination.

    Args:
        source: folder of the dense model to compare weights with.

    Attributes:
        packed: modules and tensors; None where they cannot be opened.
        refusal: error that prevented opening them.
    """

    def __init__(self, path: Path, source: Path | None = None) -> None:
        self.path = path
        self.source = PackedCheckpoint.open(source) if source else None
        self.packed: PackedCheckpoint | None = None
        self.refusal: ToolkitError | None = None
        try:
            self.packed = PackedCheckpoint.open(path)
        except ToolkitError as error:
            self.refusal = error

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        """Complete config.json; empty if it cannot be read."""
        return _read_object(self.path / CONFIG_FILE)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Content of generation_config.json; empty if it is missing or cannot be read."""
        return _read_object(self.path / GENERATION_FILE)

    @cached_property
    def spec(self) -> ModelSpec | None:
        """Description of the model; None for an unknown family, or a config.json that defines no model."""
        describe = find_family(self.packed.config.get("model_type")) if self.packed else None
        try:
            return describe(self.packed.config) if self.packed and describe else None
        except ToolkitError:
            return None

    @cached_property
    def model_refusal(self) -> ToolkitError | None:
        """Refusal of the runtime to serve the model in config.json; None without one, or for an unknown family."""
        if self.packed is None or find_family(self.packed.config.get("model_type")) is None:
            return None
        try:
            parse_config(self.packed.config, self.generation_config)
        except ToolkitError as error:
            return error
        return None

    @cached_property
    def implied(self) -> Shapes:
        """Shapes of the parameters that config.json implies; empty without a description of the model."""
        return self.spec.parameters() if self.spec else {}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer; None if it is missing or cannot be read, see `tokenizer_refusal`."""
        try:
            return Tokenizer.open(self.path)
        except ToolkitError as error:
            self.tokenizer_refusal = error
            return None

    tokenizer_refusal: ToolkitError | None = None

    @cached_property
    def embedding_rows(self) -> int | None:
        """Rows of the token embedding; None if no tensor is recognized as one."""
        packed = self.packed
        if packed is None:
            return None
        names = [name for name in packed.dense_names() if is_embedding(name.removesuffix(".weight"))]
        tables = [(name, packed.files.shape(name)) for name in names if "position" not in name and "wpe" not in name]
        rows = {shape[0] for name, shape in tables if len(shape) == 2 and name not in packed.files.other_parts}
        modules = [module for module in packed.modules if is_embedding(module)]
        rows |= {packed.shape(module)[0] for module in modules}
        return rows.pop() if len(rows) == 1 else None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ToolkitError):
        return {}
    return found if isinstance(found, dict) else {}


def eos_ids(*configs: dict[str, Any]) -> list[int]:
    """Returns the end-of-sequence ids of the first config that has any, as an integer or a list."""
    for config in configs:
        found = config.get("eos_token_id")
        ids = [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, int)]
        if ids:
            return ids
    return []


def brief(value: object, limit: int = 60) -> str:
    """Returns a value as JSON of at most `limit` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: list[str], limit: int = 3) -> str:
    """Returns the first names, and the number of the remaining ones."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
