"""Kimi delta attention of transformers by the names of files, which hold its parts one by one."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from compress.models.mixers.kimi_delta import KimiDelta
from compress.models.spec import ModelSpec

GATE = "forget_gate"


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


def name_delta_parts(model: nn.Module, spec: ModelSpec) -> tuple[str, ...]:
    """Gives the parts of Kimi delta attention of a model on the meta device the names of files.

    Returns:
        Names that linears had before and have no more.
    """
    blocks = [(spec.block_name(index), block.mixer) for index, block in enumerate(spec.blocks)]
    found = [(f"{name}.{mixer.name}", mixer) for name, mixer in blocks if isinstance(mixer, KimiDelta)]
    return tuple(f"{name}.{part}" for name, mixer in found for part in _name_parts(model.get_submodule(name), mixer))


def _name_parts(attention: Any, mixer: KimiDelta) -> list[str]:
    gate, weights = getattr(attention, GATE), attention.conv1d.weight.split(mixer.size)
    moved = {**gate._modules, **gate._parameters}
    parts = {name.split(".")[1]: Part(weight) for name, weight in zip(mixer.convs, weights, strict=True)}
    for name, part in (moved | parts).items():
        setattr(attention, name, part)
    delattr(attention, GATE)
    # It reads nothing but what the attention has now, and a head dimension that both have.
    attention.__dict__[GATE] = MethodType(type(gate).forward, attention)
    attention.conv1d = JoinedConv(tuple(parts.values()))
    return [f"{GATE}.{name}" for name in gate._modules]
