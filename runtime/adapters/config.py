"""`adapter_config.json` of PEFT: ranks, scales, and what is refused. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.common.errors import CheckpointError
from runtime.core.adapter import CONFIG, read_config

REFUSED = {
    "use_dora": "DoRA scales each row by the norm of the adapted weight, which a packed weight does not have",
    "modules_to_save": "whole modules take the place of the model's",
    "lora_bias": "it adds biases",
    "trainable_token_indices": "it replaces rows of the embedding",
    "layer_replication": "it repeats layers of the model",
    "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "BD-LoRA has block-diagonal factors",
    "alora_invocation_tokens": "activated LoRA starts in the middle of a prompt",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the weights of the model",
    "monteclora_config": "MonteCLoRA draws samples",
    "velora_config": "VeLoRA changes the factors",
}
"""Fields that make an adapter more than a product of two factors, and how."""

PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the model as they are; others subtract something first."""

REMEDY = "Merge it with PEFT (merge_and_unload), and compress the result"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Ranks and scales of an adapter.

    Attributes:
        rank_pattern, alpha_pattern: values of some modules, by a regular expression for the end of their names.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Reads the configuration of a folder.

        Raises:
            CheckpointError: there is none, or one of another kind of adapter.
        """
        path, found = folder / CONFIG, read_config(folder)
        if found.get("peft_type") != "LORA":
            raise CheckpointError(f"{path} describes an adapter of type {found.get('peft_type')!r}, not LORA", REMEDY)
        check_plain(path, found)
        return cls._parse(path, found)

    @classmethod
    def _parse(cls, path: Path, found: dict[str, Any]) -> LoraConfig:
        patterns = found.get("rank_pattern") or {}, found.get("alpha_pattern") or {}
        config = cls(found.get("r", 0), found.get("lora_alpha", 0), bool(found.get("use_rslora")), *patterns)
        for name, value, kinds in (
            ("r", config.rank, (int,)),
            ("lora_alpha", config.alpha, (int, float)),
            *(("rank_pattern", rank, (int,)) for rank in _values(config.rank_pattern)),
            *(("alpha_pattern", alpha, (int, float)) for alpha in _values(config.alpha_pattern)),
        ):
            if type(value) not in kinds or value <= 0:
                raise CheckpointError(f"{path}: {name}={found.get(name)!r} is not above 0", "Save the adapter again")
        return config

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        rank: int = matching(self.rank_pattern, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """Returns the factor on the product of a module's factors."""
        rank = self.rank_of(module)
        alpha: float = matching(self.alpha_pattern, module, self.alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)


def _values(pattern: Any) -> Iterable[Any]:
    """Returns the values of a pattern; something else than numbers for a broken one."""
    if not isinstance(pattern, dict):
        return [pattern]
    try:
        for key in pattern:
            re.compile(key)
    except re.error:
        return [pattern]
    return pattern.values()


def check_plain(path: Path, found: Mapping[str, Any]) -> None:
    """Raises CheckpointError for an adapter that is more than a product of two factors."""
    for name, reason in REFUSED.items():
        if found.get(name):
            raise CheckpointError(f"{path} sets {name}, which is not served: {reason}", REMEDY)
    if found.get("bias", "none") != "none":
        raise CheckpointError(f"{path} sets bias={found['bias']!r}, which is not served: it changes biases", REMEDY)
    if (beginning := found.get("init_lora_weights", True)) not in PLAIN_BEGINNINGS:
        problem = f"{path} sets init_lora_weights={beginning!r}, which is not served: it changes the model's weights"
        raise CheckpointError(problem, "Save it with path_initial_model_for_weight_conversion, or merge it")


def matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first expression that matches the end of a module's name, as PEFT finds it."""
    found = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)
