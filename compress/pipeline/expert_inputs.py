"""Calibration inputs of a mixture of experts, and the statistics of one expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from calibration.statistics import InputStatistics
from compress.checkpoint.modeling.experts import Experts, WeighedExperts, mixtures

TOKENS_PER_CHANNEL = 2
"""Twice the number for a full-rank Hessian of an expert. Fewer tokens are worse with short calibration texts, all
tokens for every expert are worse with long ones (docs/measurements/quality.md)."""


@dataclass(frozen=True, slots=True)
class ExpertCoverage:
    """Numbers of calibration tokens of the experts of one mixture.

    Attributes:
        tokens: tokens that the router sent to each expert.
        added: additional tokens of the mixture in the statistics of each expert.
        least: minimum tokens of an expert's statistics, if the calibration has that many.
    """

    module: str
    tokens: tuple[int, ...]
    added: tuple[int, ...]
    least: int

    @property
    def num_rare(self) -> int:
        """Number of experts with fewer routed tokens than their statistics need."""
        return sum(count < self.least for count in self.tokens)


@dataclass
class MixtureInputs:
    """Tokens that entered a mixture, on the host, and the experts that the router chose.

    An expert's statistics are computed from them on request, so only one expert's statistics are in memory. Rarely
    chosen experts also use other tokens: the Hessian of fewer tokens than channels is singular, and rounding with it
    ignores all unseen directions.

    Attributes:
        name: name of the experts inside the block.
        tokens_per_channel: see `TOKENS_PER_CHANNEL`.
        hidden: `[T_i, H]` per micro-batch.
        chosen: `[T_i, k]` per micro-batch, chosen experts.
        weights: `[T_i, E]` per micro-batch, router weights of experts that read weighted tokens; else empty.
    """

    name: str
    experts: Experts
    tokens_per_channel: int = TOKENS_PER_CHANNEL
    hidden: list[Tensor] = field(default_factory=list)
    chosen: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def record(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keeps the arguments of a forward pass."""
        self.hidden.append(args[0].cpu())
        self.chosen.append(args[1].cpu())
        if isinstance(self.experts, WeighedExperts):
            self.weights.append(args[2].cpu())

    def add(self, later: MixtureInputs) -> None:
        """Adds the tokens of later micro-batches."""
        self.hidden += later.hidden
        self.chosen += later.chosen
        self.weights += later.weights

    @property
    def least(self) -> int:
        """Minimum tokens of an expert: `tokens_per_channel` per input channel of its first linears."""
        return self.tokens_per_channel * self.experts.expert(0).in_features

    def tokens(self, index: int) -> Tensor:
        """Returns a mask `[T]` of the tokens in an expert's statistics."""
        mask = (torch.cat(self.chosen) == index).any(-1)
        others = (~mask).nonzero().flatten()
        wanted = min(max(self.least - int(mask.sum()), 0), len(others))
        mask[others[torch.linspace(0, len(others) - 1, wanted).round().long()]] = True  # evenly spaced
        return mask

    def rows(self, index: int, device: torch.device) -> Iterator[Tensor]:
        """Yields the inputs `[n, H]` in an expert's statistics."""
        masks = self.tokens(index).split([len(each) for each in self.hidden])
        for batch, mask in enumerate(masks):
            if mask.any():
                rows = self.hidden[batch][mask]
                yield (rows * self.weights[batch][mask, index, None] if self.weights else rows).to(device)

    def coverage(self, block: str) -> ExpertCoverage:
        chosen = torch.cat(self.chosen)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        added = (min(max(self.least - count, 0), len(chosen) - count) for count in counts)
        return ExpertCoverage(f"{block}.{self.name}", tuple(counts), tuple(added), self.least)


MakeStatistics = Callable[[tuple[str, ...], torch.device], InputStatistics]


@dataclass(eq=False)
class ExpertStatistics(Mapping[str, InputStatistics]):
    """Input statistics of linears by name; those of experts are computed on request.

    Attributes:
        groups: linears of an expert that share an input, by mixture and expert: input projections, then output
            projection.
        make: function that creates empty statistics for such linears on a device.
    """

    plain: dict[str, InputStatistics]
    inputs: dict[str, MixtureInputs]
    groups: dict[tuple[str, int], tuple[tuple[str, ...], ...]]
    make: MakeStatistics
    device: torch.device
    last: dict[str, InputStatistics] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._owner = {name: key for key, groups in self.groups.items() for group in groups for name in group}

    def __len__(self) -> int:
        return len(self.plain) + len(self._owner)

    def __iter__(self) -> Iterator[str]:
        yield from self.plain
        yield from self._owner

    def __contains__(self, name: object) -> bool:
        return name in self.plain or name in self._owner

    def __getitem__(self, name: str) -> InputStatistics:
        """Returns the statistics of a linear or, for the name of a mixture's experts, of all tokens that enter the
        mixture."""
        if name in self.plain:
            return self.plain[name]
        if name not in self.last:
            self.last = {name: self._observe_all(name)} if name in self.inputs else self._observe(*self._owner[name])
        return self.last[name]

    def on(self, block: nn.Module, device: torch.device) -> ExpertStatistics:
        """Returns statistics that are computed with the experts of a copy of the block, on its device."""
        experts = dict(mixtures(block))
        there = {name: replace(each, experts=experts[name]) for name, each in self.inputs.items()}
        return replace(self, inputs=there, device=device, last={})

    def activity(self, name: str) -> float:
        """Returns the share of all tokens that the router sends to a linear; 1 outside of experts."""
        if name not in self._owner:
            return 1.0
        mixture, index = self._owner[name]
        return float((torch.cat(self.inputs[mixture].chosen) == index).any(-1).float().mean())

    def _observe_all(self, mixture: str) -> InputStatistics:
        found = self.make(self.groups[mixture, 0][0], self.device)
        for rows in self.inputs[mixture].hidden:
            found.update(rows.to(self.device))
        return found

    @torch.no_grad()
    def _observe(self, mixture: str, index: int) -> dict[str, InputStatistics]:
        inputs = self.inputs[mixture]
        expert = inputs.experts.expert(index)
        found = {group: self.make(group, self.device) for group in self.groups[mixture, index]}
        for rows in inputs.rows(index, self.device):
            for group, statistics in found.items():
                is_output = group[0].endswith(f".{expert.output}")
                statistics.update(expert.inner(rows) if is_output else rows)
        return {name: statistics for group, statistics in found.items() for name in group}
