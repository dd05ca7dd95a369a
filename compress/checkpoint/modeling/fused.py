"""Mixtures that no family describes: the experts of one that transformers holds together, as it says itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from compress.checkpoint.config import dense_config
from compress.checkpoint.meta_model import build_described
from compress.checkpoint.modeling.conversion import WEIGHT, splits_of, transforms_of
from compress.checkpoint.modeling.experts import Experts
from compress.models.linear import Linear
from compress.models.mlp import MLP, Mixture
from compress.models.router import Router
from compress.models.stacks import Slice, Stack

PARTS: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Tensors of all experts, with the matrices of an expert in each."""
CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "num_experts_per_token")
"""Names that configs have for the number of experts of a token."""


@dataclass(frozen=True)
class FusedExperts:
    """Experts that transformers holds in tensors `[experts, ...]`.

    Attributes:
        name: of their module.
        module: follows `use_experts_implementation` of transformers.
        converted: names of an expert's tensors in files by the tensor that transformers makes of them; none where
            files hold that tensor.
    """

    name: str
    module: Any
    converted: Mapping[str, tuple[str, ...]]

    @cached_property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Names of the matrices of an expert by the tensor with those of all experts."""
        held = {name: parts for name, parts in PARTS.items() if hasattr(self.module, name)}
        return held | {name: self.converted[name] for name in held.keys() & self.converted.keys()}

    def slices(self) -> dict[str, Slice]:
        """Place of every tensor of an expert in what files hold of all, by absolute names."""
        found: dict[str, Slice] = {}
        for name, parts in self.tensors.items():
            ends = {"": WEIGHT} | ({"_bias": ".bias"} if self.module.has_bias else {})
            for stacked, end in {} if name in self.converted else ends.items():
                stack = Stack(f"{self.name}.{name}{stacked}", tuple(part + end for part in parts), *self._layout)
                for expert in range(len(getattr(self.module, name))):
                    for place, part in enumerate(stack.parts):
                        found[f"{self.name}.{expert}.{part}"] = Slice(stack, expert, place)
        return found

    @property
    def _layout(self) -> tuple[bool, bool]:
        """Whether slices are transposed, and whether rows of the parts take turns."""
        return self.module.is_transposed, not self.module.is_concatenated

    def separated(self, num_chosen: int) -> Experts:
        """Makes the experts one by one, on the meta device."""
        linears = [self._linears(*each) for each in self.tensors.items()]
        (*_, (down,)), count = linears, len(self.module.down_proj)
        inputs = tuple(linear for group in linears[:-1] for linear in group)
        mlp = MLP(inputs, down, gated=self.module.has_gate)
        router = Router(Linear("", count, inputs[0].in_features), min(num_chosen, count))
        gate = _Gate(self.module) if self.module.has_gate else None
        return Experts(Mixture(router, (mlp,) * count), getattr(self.module, "act_fn", nn.Identity()), gate)

    def _linears(self, name: str, parts: tuple[str, ...]) -> tuple[Linear, ...]:
        rows, columns = getattr(self.module, name).shape[1:]
        if self.module.is_transposed:
            rows, columns = columns, rows
        return tuple(Linear(part, rows // len(parts), columns, self.module.has_bias) for part in parts)


@dataclass(frozen=True, slots=True)
class _Gate:
    """Activation and gating of a module of transformers, from the outputs of gate and up."""

    module: Any

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        both = torch.cat((gate, up), -1) if self.module.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
        gated: Tensor = self.module._apply_gate(both)
        return gated


def fused_experts(model: Any) -> Iterator[FusedExperts]:
    """Yields the mixtures of a model whose experts can be taken apart."""
    found = {name: module for name, module in model.named_modules() if _is_known(module)}
    transforms = [each for each in transforms_of(model.config.model_type) if found and hasattr(each, "operations")]
    for name, module in found.items():
        converted = {}
        for each in transforms:
            target, parts = each.target_patterns[0], [source.rpartition("*.")[2] for source in each.source_patterns]
            for held in PARTS:
                if f"{name}.{held}".endswith(target) and type(each.operations[0]).__name__ == "MergeModulelist":
                    converted[held] = tuple(part.removesuffix(WEIGHT) for part in parts)
        yield FusedExperts(name, module, converted)


def _is_known(module: nn.Module) -> bool:
    held = {name for name, tensor in module.named_parameters(recurse=False) if tensor.dim() == 3}
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    if not held or not all(hasattr(module, mark) for mark in marks) or getattr(module, "has_post_expert_norm", False):
        return False
    return held == ({"gate_up_proj", "down_proj"} if module.has_gate else {"up_proj", "down_proj"})


def separate_experts(model: Any) -> None:
    """Replaces the experts of a model on the meta device by separate ones with the names of files."""
    num_chosen = max((_chosen(getattr(model.config, name, None)) for name in CHOSEN), default=0) or 1
    for each in list(fused_experts(model)):
        model.set_submodule(each.name, each.separated(num_chosen))


def _chosen(value: object) -> int:
    return max(map(_chosen, value), default=0) if isinstance(value, list) else value if isinstance(value, int) else 0


def fused_slices(config: Mapping[str, Any]) -> Mapping[str, Slice]:
    """Finds the place of every tensor of an expert that files hold together, by transformers' model of `config`.

    Raises:
        CheckpointError: config.json does not define a model.
    """
    return _slices_of(json.dumps(dense_config(config), sort_keys=True, default=str))


@lru_cache(maxsize=1)
def _slices_of(config: str) -> Mapping[str, Slice]:
    model = build_described(json.loads(config))
    if model is None:
        return {}
    found = {name: place for each in fused_experts(model) for name, place in each.slices().items()}
    return found | dict(_split_rows(model))


def _split_rows(model: Any) -> Iterator[tuple[str, Slice]]:
    """Yields the place of every tensor whose rows files hold after those of others."""
    sizes = {name: len(tensor) for name, tensor in model.named_parameters() if tensor.dim()}
    for split in splits_of(model.config.model_type):
        source, (first, *_) = split.source_patterns[0], split.target_patterns
        for name in [name for name in sizes if f".{first}." in name]:
            parts = tuple(name.replace(first, target) for target in split.target_patterns)
            stack = Stack(name.replace(first, source), parts, sizes=tuple(sizes[part] for part in parts))
            yield from ((part, Slice(stack, 0, place)) for place, part in enumerate(parts))
