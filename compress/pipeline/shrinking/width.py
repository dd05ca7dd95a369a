"""Choice of the heads, channels and experts that leave each block, in one pass over the blocks.

A block is observed with the inputs that the smaller blocks before it give. Heads are chosen first, then channels with
the inputs that the remaining heads give, then experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.checkpoint.modeling.experts import Experts, WeighedExperts, mixtures
from compress.checkpoint.safetensors import TensorFiles
from compress.common.workers import Workers
from compress.methods.base import Needs
from compress.methods.shared.column_removal import choose_by_norm, choose_fitted, columns_of, damped, relative_error
from compress.models.linear import Linear
from compress.models.mlp import Mixture
from compress.models.spec import ModelSpec
from compress.pipeline.block import BlockJob, LoadedBlock
from compress.pipeline.capture import Calibration, run_all
from compress.pipeline.observe import observe
from compress.pipeline.smaller_source import EXPERTS, KINDS, Units


@dataclass
class NarrowBlock:
    """Choice for a block.

    Attributes:
        tensors: `<kind>.units [k]`, int64, and `<kind>.weight [O, k * width]` where it was fitted.
        records: what left, for the report, by kind.
        hidden: `[N, L, H]`, input of the next block; `reference` is unused.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Narrowing:
    """The work on each block. `numbers`: units that stay, by kind; 0 for all."""

    files: TensorFiles
    spec: ModelSpec
    numbers: Mapping[str, int]
    fits: bool

    @torch.no_grad()
    def __call__(
        self,
        block: LoadedBlock,
        job: BlockJob,
        calibration: Calibration,
        workers: Workers,
        step: Callable[[str, float], None] = lambda _what, _share: None,
    ) -> NarrowBlock:
        """Chooses what stays in a block, and returns the outputs of what does. The choice of experts changes no
        outputs: those of all are passed on."""
        found = NarrowBlock()
        for kind in KINDS:
            units = Units.of(self.spec.blocks[job.index], kind)
            if units is None or not self.numbers[kind]:
                continue
            step(kind, 0.0)
            choose_units = self._experts if kind == EXPERTS else self._columns
            kept, facts = choose_units(block, job, calibration, workers, units)
            left = sorted(set(range(units.count)) - set(kept["units"].tolist()))
            found.tensors |= {f"{kind}.{name}": tensor for name, tensor in kept.items()}
            found.records[kind] = {"removed": left} | facts
        found.hidden = run_all(block, calibration.inputs, job.index, workers)
        return found

    def _columns(
        self, block: LoadedBlock, job: BlockJob, calibration: Calibration, workers: Workers, units: Units
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Chooses the units whose columns a linear keeps, and gives it what stays."""
        output = cast(Linear, units.output)
        name, width = output.name, output.in_features // units.count
        seen = observe(block, calibration.inputs, job.index, {name: Needs(inputs=True, hessian=True)}, workers)
        hessian = damped(seen.statistics[name].hessian)
        stored = self.files.tensor(f"{block.name}.{name}.weight")
        weight, number = stored.to(hessian.device), self.numbers[units.kind]
        if self.fits:
            chosen, values = choose_fitted(weight, hessian, width, number)
        else:
            chosen = choose_by_norm(weight, hessian, width, number)
            values = weight[:, columns_of(chosen, width)]
        columns, values = columns_of(chosen, width), values.to(stored.dtype)
        block.set_weight(name, torch.zeros_like(weight).index_copy_(1, columns, values))
        error = relative_error(weight, hessian, columns, values)
        kept = {"units": chosen.cpu()} | ({"weight": values.cpu()} if self.fits else {})
        return kept, {"relative_error": error}

    def _experts(
        self, block: LoadedBlock, job: BlockJob, calibration: Calibration, workers: Workers, units: Units
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Chooses experts by their mean saliency, in equal numbers from each group of a router with groups."""
        _, experts = next(mixtures(block.module))
        saliency = Saliency(experts, torch.zeros(len(experts), device=workers.device))
        handle = experts.register_forward_pre_hook(saliency.add)
        try:
            run_all(block, calibration.inputs, job.index, Workers([workers.device]))
        finally:
            handle.remove()
        groups, number = cast(Mixture, units.part).router.num_groups, self.numbers[EXPERTS]
        best = saliency.means.view(groups, -1).topk(number // groups).indices.cpu()
        chosen = (best + torch.arange(groups)[:, None] * (units.count // groups)).flatten().sort().values
        return {"units": chosen}, {"saliencies": saliency.means.tolist()}


@dataclass
class Saliency:
    """Saliencies of experts: the mean norm of what an expert adds, over the tokens sent to it (REAP, Lasby et al. 2025,
    https://arxiv.org/abs/2510.13999, section 4). `sums [E]`."""

    experts: Experts
    sums: Tensor

    def __post_init__(self) -> None:
        self.counts = torch.zeros_like(self.sums)

    @property
    def means(self) -> Tensor:
        return self.sums / self.counts.clamp(min=1)

    def add(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Adds the tokens of one forward pass."""
        hidden, chosen, weights = args
        for index in chosen.unique().tolist():
            rows, places = (chosen == index).nonzero(as_tuple=True)
            if isinstance(self.experts, WeighedExperts):
                added = self.experts[index](hidden[rows] * weights[rows, index, None])
            else:
                added = self.experts[index](hidden[rows]) * weights[rows, places, None]
            self.sums[index] += added.float().norm(dim=-1).sum()
            self.counts[index] += len(rows)
