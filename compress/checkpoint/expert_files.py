"""Tensors of experts by names of their own, whether a file stores them so or all experts as one tensor; and queries,
keys and values that a file stores as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.safetensors import LazyTensor, TensorFiles
from compress.common.errors import CheckpointError
from compress.models.registry import find_family
from compress.models.stacks import Slice, Stack

EXPERTS = ".experts."
"""Part of the names that transformers has for what it holds of all experts."""


def slices_of(config: Mapping[str, Any]) -> Mapping[str, Slice]:
    """Returns the place of every tensor that files hold in a stack, by family, or else by transformers' own model.

    Raises:
        CheckpointError: config.json does not define a model.
    """
    describe = find_family(config.get("model_type"))
    if describe is not None:
        return describe(config).slices()
    from compress.checkpoint.modeling.fused import fused_slices

    return fused_slices(config)


def split_experts(files: TensorFiles, config: Mapping[str, Any]) -> TensorFiles:
    """Names the tensors in stacks where `files` hold those of the model of `config`.

    Raises:
        CheckpointError: a stack that does not hold as many experts as config.json says.
    """
    if find_family(config.get("model_type")) is not None:
        is_stacked = any(len(files.shape(name)) > 2 for name in files.names())
    else:
        from compress.checkpoint.modeling.conversion import joins

        stacked = (name for name in files.names() if EXPERTS in name and len(files.shape(name)) > 2)
        is_stacked = any(stacked) or joins(files.names(), config.get("model_type"))
    return split_stacks(files, slices_of(config)) if is_stacked else files


def split_stacks(files: TensorFiles, slices: Mapping[str, Slice]) -> TensorFiles:
    """Names the tensors in the stacks of `slices` where `files` hold those.

    Raises:
        CheckpointError: a stack that does not hold as many experts or rows as there are slices of it.
    """
    places = {name: _as_stored(place, files) for name, place in slices.items() if place.stack.name in files}
    for stack, count in {place.stack: place.expert + 1 for place in places.values()}.items():
        if files.shape(stack.name)[0] != (sum(stack.sizes) or count):
            means = f"{sum(stack.sizes)} rows" if stack.sizes else f"{count} experts"
            raise CheckpointError(
                f"{stack.name} has shape {files.shape(stack.name)}, config.json says {means}",
                "Check that config.json and the weights belong to the same model",
            )
    stacks = {place.stack.name for place in places.values()}
    others = {name: tensor for name, tensor in files.tensors.items() if name not in stacks}
    parts = {name: _sliced(files[place.stack.name], place) for name, place in places.items()}
    return replace(files, tensors={**others, **parts})


def _sliced(stacked: LazyTensor, place: Slice) -> LazyTensor:
    """Returns the slice of an expert as `[out_features, ...]`, copied where it is transposed."""
    shape = place.shape(stacked.shape)

    def read() -> Tensor:
        stored = stacked.read()
        part = stored if place.stack.sizes else stored[place.expert]
        part = part.T if place.stack.transposed else part
        return part[place.rows(len(part))].contiguous()

    return LazyTensor(stacked.dtype, shape, math.prod(shape) * stacked.dtype.itemsize, read)


def _as_stored(place: Slice, files: TensorFiles) -> Slice:
    if not place.stack.columns or files.shape(place.stack.name)[-1] != place.stack.columns:
        return place
    return replace(place, stack=replace(place.stack, transposed=False))


def stacked_names(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns those of `names` that a model of `config` stores together, by the name of their stack."""
    places = slices_of(config)
    found: dict[str, list[str]] = {}
    for name in names:
        if name in places:
            found.setdefault(places[name].stack.name, []).append(name)
    return found


def join_experts(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], is_packed: bool = False
) -> dict[str, Tensor]:
    """Stacks the tensors of experts as a model of `config` stores them, the inverse of `split_experts`.

    Args:
        is_packed: whether the checkpoint has packed weights, see `Stack.splits_packed`.
    """
    places = slices_of(config)
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
    if stack.sizes:
        return rows[0]
    return torch.stack([part.T.contiguous() if stack.transposed else part for part in rows])
