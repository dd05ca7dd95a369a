"""Hidden states on their way from one stage of a model to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.models.cuts import size
from runtime.backends.base import Ops
from runtime.parallel.group import Group
from runtime.parallel.stages import Stage


@dataclass(frozen=True, slots=True)
class Passage:
    """Implements `runtime.backends.model.StageEnd`, and replaces the embedding in all stages but the first one.

    Ranks of a stage hold the same hidden states, and each passes them to the one of its number in the next stage.

    Attributes:
        size: of a hidden state.
    """

    stage: Stage
    group: Group
    size: int
    dtype: torch.dtype
    nbytes: int = 0

    @property
    def num_stages(self) -> int:
        return self.stage.count

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Returns the hidden states `[T, H]` that the stage before has computed of int64 `token_ids [T]`, in long steps
        those of the rank's own tokens."""
        return self.receive(size(self.group.own_rows(len(token_ids))), self.size)

    def receive(self, *shape: int) -> Tensor:
        """Returns what the stage before passes on."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.group.device)
        return self.group.receive(tensor, self.group.index - self.group.rank.count)

    def pass_on(self, hidden: Tensor, inputs: Tensor) -> None:
        """Sends hidden states `[T, H]`, and inputs of layers if there are any, to the next stage if there is one."""
        if self.stage.is_last:
            return
        following = self.group.index + self.group.rank.count
        self.group.send(hidden, following)
        if inputs.numel():
            self.group.send(inputs, following)

    def collect(self, hidden: Tensor) -> Tensor:
        """Returns the hidden states `[T, H]` after the last stage to the first rank, in the memory of its own, and the
        rank's own to others."""
        group = self.group
        if self.stage.is_last and group.rank.is_first:
            group.send(hidden, 0)
        return group.receive(hidden, group.count - group.rank.count) if group.is_first else hidden


@dataclass(frozen=True, slots=True)
class PassedInputs:
    """Inputs of layers that the first stage has computed.

    Attributes:
        shape: layers, and size of the input of each.
    """

    end: Passage
    shape: tuple[int, int]
    nbytes: int = 0

    def __call__(self, token_ids: Tensor, hidden: Tensor, ops: Ops) -> Tensor:
        """Returns rows `[T, layers, size]` of int64 `token_ids [T]`, as many as there are hidden states."""
        return self.end.receive(len(hidden), *self.shape)


class NoRows:
    """Part of an output head that has no tokens."""

    nbytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Returns `[M, 0]` of `x [M, H]`."""
        return x[:, :0]
