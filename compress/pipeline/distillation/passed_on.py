"""Outputs of blocks other than hidden states (shared keys and values, chosen tokens), and their gradients."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.pipeline.capture import Call, store_of


@dataclass
class PassedOn:
    """Record of one pass of a micro-batch through all blocks.

    Attributes:
        store: in which the blocks pass outputs to later ones.
        before: its content before each block, and after the last.
        gradients: of the outputs that later blocks read, by key and place.
    """

    store: UserDict[Any, tuple[Tensor, ...]]
    before: list[dict[Any, tuple[Tensor, ...]]] = field(default_factory=list)
    gradients: dict[tuple[Any, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: list[Call]) -> PassedOn:
        """Starts a pass, without what an earlier one left."""
        store = store_of(calls)
        store = UserDict() if store is None else store
        store.clear()
        return cls(store)

    def backward(self, block: Callable[[Tensor], Tensor], hidden: Tensor, gradient: Tensor) -> Tensor:
        """Differentiates the last block that has not been, and returns the gradient of its input.

        Args:
            hidden: `[B, L, H]`, input of the block.
            gradient: of its output.
        """
        hidden = _leaf(hidden)
        self.before.pop()
        self.store.data = {key: tuple(map(_leaf, parts)) for key, parts in self.before[-1].items()}
        read = _by_place(self.store)
        output = block(hidden)
        made = {name: each for name, each in _by_place(self.store).items() if each is not read.get(name)}
        used = made.keys() & self.gradients.keys()
        torch.autograd.backward(
            [output, *(made[name] for name in used)], [gradient, *(self.gradients.pop(name) for name in used)]
        )
        for name, leaf in read.items():
            if leaf.grad is not None:
                later = self.gradients.get(name)
                self.gradients[name] = leaf.grad if later is None else later + leaf.grad
        return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad


def _by_place(store: Mapping[Any, tuple[Tensor, ...]]) -> dict[tuple[Any, int], Tensor]:
    return {(key, place): each for key, parts in store.items() for place, each in enumerate(parts)}


def _leaf(tensor: Tensor) -> Tensor:
    """Returns the start of a graph; numbers of tokens have no gradient."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
