"""Mixers of transformers by the names of files, which hold one by one what its modules join."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.spec import ModelSpec


class Part(nn.Module):
    """The weight of a convolution of queries, keys or values."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class JoinedConv(nn.Module):
    """The weight of one convolution over queries, keys and values, whose parts belong to another module."""

    bias = None

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.parts = parts

    @property
    def weight(self) -> Tensor:
        """The weights of all parts, `[channels, 1, kernel]`."""
        return torch.cat([part.weight for part in self.parts])


def name_mixer_parts(model: nn.Module, spec: ModelSpec) -> tuple[str, ...]:
    """Gives the parts of mixers that transformers joins, in a model on the meta device, the names of files.

    Returns:
        Former names of linears that have other names now.
    """
    renamed: list[str] = []
    for index, block in enumerate(spec.blocks):
        for mixer in block.mixers:
            name = f"{spec.block_name(index)}.{mixer.name}"
            if mixer.joined_convs:
                _separate_convs(model.get_submodule(name), mixer.joined_convs)
            if mixer.inlined:
                renamed += (f"{name}.{part}" for part in _inline(model.get_submodule(name), mixer.inlined))
    return tuple(renamed)


def _separate_convs(module: Any, names: tuple[str, ...]) -> None:
    weights = module.conv1d.weight.chunk(len(names))
    parts = {name.split(".")[1]: Part(weight) for name, weight in zip(names, weights, strict=True)}
    for name, part in parts.items():
        setattr(module, name, part)
    module.conv1d = JoinedConv(tuple(parts.values()))


def _inline(module: Any, name: str) -> list[str]:
    """Moves what an inner module holds into `module`; returns the former names of its linears."""
    inner = getattr(module, name)
    for part, held in (inner._modules | inner._parameters).items():
        setattr(module, part, held)
    delattr(module, name)
    # It reads only what the mixer has now, and sizes that both have.
    module.__dict__[name] = MethodType(type(inner).forward, module)
    return [f"{name}.{part}" for part in inner._modules]
