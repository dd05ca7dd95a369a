"""Tensors of experts by names of their own, whether a file stores them so or all experts as one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import CheckpointError
from compress.models.registry import find_family
from compress.models.stacks import Slice, Stack


@dataclass
class ExpertFiles(TensorFiles):
    """Tensor files that show a stack of experts as the tensors of each of them.

    Attributes:
        slices: place of each of these tensors by name; their stacks have no name of their own.
    """

    slices: Mapping[str, Slice] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Tensor names, sorted."""
        stacks = {each.stack.name for each in self.slices.values()}
        return sorted({*super().names()} - stacks | self.slices.keys())

    def __contains__(self, name: object) -> bool:
        return name in self.slices or super().__contains__(name)

    def __len__(self) -> int:
        return len(self.names())

    def shape(self, name: str) -> tuple[int, ...]:
        place = self.slices.get(name)
        return super().shape(name) if place is None else place.shape(super().shape(place.stack.name))

    def dtype(self, name: str) -> Any:
        return super().dtype(self._stored(name))

    def tensor_nbytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, or the slice of an expert as `[out_features, ...]`, copied where it is transposed."""
        place, stored = self.slices.get(name), super().tensor(self._stored(name))
        if place is None:
            return stored
        part = stored[place.expert].T if place.stack.transposed else stored[place.expert]
        return part[place.rows(len(part))].contiguous()

    def place(self, name: str) -> tuple[Path, int] | None:
        return None if name in self.slices else super().place(name)

    def _stored(self, name: str) -> str:
        return self.slices[name].stack.name if name in self.slices else name


def split_experts(files: TensorFiles, config: Mapping[str, Any]) -> TensorFiles:
    """Names the tensors of each expert where `files` hold stacks that the family in `config` describes.

    Raises:
        CheckpointError: a stack that does not hold as many experts as config.json says.
    """
    describe = find_family(config.get("model_type"))
    if describe is None or not any(len(files.shape(name)) > 2 for name in files.names()):
        return files
    return split_stacks(files, describe(config).slices())


def split_stacks(files: TensorFiles, slices: Mapping[str, Slice]) -> TensorFiles:
    """Names the tensors of each expert where `files` hold the stacks of `slices`.

    Raises:
        CheckpointError: a stack that does not hold as many experts as there are slices of it.
    """
    places = {name: place for name, place in slices.items() if place.stack.name in files}
    for stack, count in {place.stack.name: place.expert + 1 for place in places.values()}.items():
        if files.shape(stack)[0] != count:
            raise CheckpointError(
                f"{stack} has shape {files.shape(stack)}, config.json says {count} experts",
                "Check that config.json and the weights belong to the same model",
            )
    known = files.slices if isinstance(files, ExpertFiles) else {}
    return ExpertFiles(**{**vars(files), "slices": {**known, **places}}) if places else files


def stacked_names(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns those of `names` that the family in `config` stores together, by the name of their stack."""
    describe = find_family(config.get("model_type"))
    places = {} if describe is None else describe(config).slices()
    found: dict[str, list[str]] = {}
    for name in names:
        if name in places:
            found.setdefault(places[name].stack.name, []).append(name)
    return found


def join_experts(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], is_packed: bool = False
) -> dict[str, Tensor]:
    """Stacks the tensors of experts as the family in `config` stores them, the inverse of `split_experts`.

    Args:
        is_packed: whether the checkpoint has packed weights, see `Stack.splits_packed`.
    """
    describe = find_family(config.get("model_type"))
    places = {} if describe is None else describe(config).slices()
    places = {name: place for name, place in places.items() if not (is_packed and place.stack.splits_packed)}
    stacks: dict[Stack, dict[int, list[Tensor]]] = {}
    for name in sorted(places.keys() & tensors.keys(), key=lambda name: (places[name].expert, places[name].part)):
        stacks.setdefault(places[name].stack, {}).setdefault(places[name].expert, []).append(tensors[name])
    joined = {stack.name: _joined(stack, list(experts.values())) for stack, experts in stacks.items()}
    return {name: tensor for name, tensor in tensors.items() if name not in places} | joined


def _joined(stack: Stack, experts: Sequence[Sequence[Tensor]]) -> Tensor:
    rows = [
        torch.stack(list(parts), 1).flatten(0, 1) if stack.interleaved else torch.cat(list(parts)) for parts in experts
    ]
    return torch.stack([part.T.contiguous() if stack.transposed else part for part in rows])
