"""Text models inside of multimodal checkpoints: their part of a nested config.json, and the names of their tensors; and
models whose files have other names than transformers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from compress.models.config import Config, block, flag, positive
from compress.models.registry import FAMILIES, WRAPPERS

OUTER = "wrapped_in"
"""Key under which the config of a text model keeps the whole config.json that it is from."""
ADDED = ("quantization_config", "compression_config")
"""Keys of the whole that compression adds."""
SHARED = ("dtype", "torch_dtype", "eos_token_id", *ADDED)
"""Keys of the whole that hold for the text model."""
TIED = "tie_word_embeddings"
NOT_OF_TEXT = ("vision_config", "architectures", "model_type", TIED)
"""Top-level keys that do not belong to the text model, in configs where both share a level."""


def text_part(config: Config) -> dict[str, Any]:
    """Returns the config of the text model in a multimodal `config`, else the config itself.

    As in transformers, the whole says whether the head is the embedding.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return dict(config)
    inner = block(config, "text_config")
    if wrapper.is_flat and not inner:
        inner = {key: value for key, value in config.items() if key not in NOT_OF_TEXT}
    model_type = inner.get("model_type", wrapper.text_type)
    return {
        **wrapper.defaults,
        **{key: _plain_rope(value) for key, value in inner.items() if key not in wrapper.unread},
        **({"head_dim": _share_of_a_head(inner)} if wrapper.divides_heads else {}),
        **{key: config[key] for key in SHARED if config.get(key) is not None},
        "model_type": wrapper.families.get(model_type, model_type),
        TIED: flag(config, TIED, wrapper.ties_head) or (wrapper.text_ties and flag(inner, TIED)),
        OUTER: dict(config),
    }


def _plain_rope(value: Any) -> Any:
    """Returns a rotary embedding whose sections all have the position of a token of text, as one without sections."""
    kinds = ("type", "rope_type")
    if not isinstance(value, Mapping) or "mrope" not in [value.get(kind) for kind in kinds]:
        return value
    return {**value, **{kind: "default" for kind in kinds if kind in value}}


def _share_of_a_head(config: Config) -> int:
    return positive(config, "hidden_size") // positive(config, "num_attention_heads")


def whole_config(config: Config) -> dict[str, Any]:
    """Returns the whole config.json of the config of a text model, with what was changed or added to that."""
    if OUTER not in config:
        return dict(config)
    outer, inner = ({key: value for key, value in part.items() if key not in ADDED} for part in _parts(config[OUTER]))
    changed = {key: config[key] for key in ADDED if key in config}
    before = text_part(config[OUTER])
    if changed == {key: before[key] for key in ADDED if key in before}:
        outer, inner = _parts(config[OUTER])
        changed = {}
    if config[TIED] != before[TIED]:
        changed[TIED] = inner[TIED] = config[TIED]
    return outer | changed | ({"text_config": inner} if "text_config" in outer else {})


def _parts(whole: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a whole config.json, and the part of its text model, which may say how its weights are packed."""
    return dict(whole), block(whole, "text_config")


class StoredNames(ABC):
    """Names of tensors and modules in files that differ from those by which they are known here. `others`: stored
    tensors of other parts; empty for a model with text only."""

    others: frozenset[str]

    @abstractmethod
    def own(self, stored: str) -> str:
        """Name here of a stored tensor or module."""

    @abstractmethod
    def stored(self, own: str) -> str:
        """Stored name of a tensor or module."""

    @abstractmethod
    def pattern(self, module: str, changed: Set[str] = frozenset()) -> str:
        """A name of a module in config.json that fits those of files and of engines, where they differ. `changed`:
        other parts that are not wholly dense."""

    def patterns(self, quantization: Mapping[str, Any], written: Container[str]) -> dict[str, Any]:
        """Returns a `quantization_config` of compressed-tensors that names modules of the text model by patterns.
        `written`: tensors of the checkpoint; a weight of another part that is not among them was packed."""
        found = dict(quantization)
        changed = {_part(name) for name in self.others if name.endswith(".weight") and name not in written}
        found["ignore"] = sorted({self.pattern(module, changed) for module in quantization.get("ignore", ())})
        found["config_groups"] = {
            name: {**group, "targets": [self._target(target, changed) for target in group["targets"]]}
            for name, group in quantization.get("config_groups", {}).items()
        }
        return found

    def _target(self, target: str, changed: Set[str]) -> str:
        return self.pattern(target, changed) if "." in target or target == "lm_head" else target


@dataclass(frozen=True, slots=True)
class TextNames(StoredNames):
    """Names of the tensors of a text model among those of other parts, which keep theirs. `model`, `head`: what the
    text model's `model` and `lm_head` are stored as."""

    model: str
    head: str
    others: frozenset[str] = frozenset()

    @classmethod
    def find(cls, stored: Iterable[str], layouts: Iterable[tuple[str, str]]) -> TextNames | None:
        """Finds out which of `layouts` names `stored` tensors; None where the text model has its own names."""
        names = list(stored)
        for model, head in layouts:
            if any(_is_inside(name, model) for name in names):
                others = (name for name in names if not _is_inside(name, model) and not _is_inside(name, head))
                return cls(model, head, frozenset(others if (model, head) in LAYOUTS else ()))
        return None

    def own(self, stored: str) -> str:
        """Name in the text model of a stored tensor or module."""
        for name, place in (("model", self.model), ("lm_head", self.head)):
            if _is_inside(stored, place):
                return name + stored.removeprefix(place)
        return stored

    def stored(self, own: str) -> str:
        """Stored name of a tensor or module of the text model."""
        if own in self.others or f"{own}.weight" in self.others:
            return own
        for name, place in (("model", self.model), ("lm_head", self.head)):
            if _is_inside(own, name):
                return place + own.removeprefix(name)
        return own

    def pattern(self, module: str, changed: Set[str] = frozenset()) -> str:
        """A pattern for a module by the names of files and of engines, which differ; for another part, of all of it."""
        if f"{module}.weight" in self.others and (part := _part(module)) not in changed:
            return rf"re:.*{re.escape(part)}\..*"
        if module.startswith("model."):
            is_part = (self.model, self.head) in LAYOUTS
            place = r".*language_model\.(model\.)?" if is_part else rf"(model|{self.model})\."
            place = rf"({place}|model\.)" if (self.model, self.head) == UNMOVED else place
            return rf"re:{place}{re.escape(module.removeprefix('model.'))}$"
        return rf"re:.*{re.escape(module)}$"


UNMOVED = ("model", "lm_head")
"""Stored names of a text model that shares a level with other parts, as in Qwen2.5-VL."""
LAYOUTS = (("language_model.model", "language_model.lm_head"), ("model.language_model", "lm_head"), UNMOVED)
"""Stored names of a text model and its head: those of transformers before and since version 4.52, and its own."""


def layouts_of(config: Config) -> tuple[tuple[str, str], ...]:
    """Stored names that the text model of a config and its head may have."""
    family = FAMILIES.get(str(config.get("model_type")))
    stored = family.stored_as if family else ""
    return LAYOUTS if OUTER in config else ((stored, "lm_head"),) if stored else ()


def _part(name: str) -> str:
    """Returns the part of the whole that a module or tensor is in."""
    return name.removeprefix("model.").partition(".")[0]


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
