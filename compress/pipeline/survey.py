"""A first pass over the dense model, for what has to be known of all blocks before the first is changed.

One block is in memory at a time, as in the run itself; what it shows is saved with the progress, so that a killed run
continues here too and decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.assignment import Assignment, Pruning
from compress.layerwise import OutlierShares
from compress.methods.outliers import outlier_ratio
from compress.methods.pruning import scores
from compress.pipeline.block_job import BlockJob, Calibration
from compress.pipeline.blocks import LoadedBlock, read_block
from compress.pipeline.calibrated import CalibratedRunner, block_job
from compress.pipeline.capture import run_all
from compress.pipeline.low_rank_work import energies
from compress.pipeline.memory import return_freed_memory
from compress.pipeline.observe import Need, observe
from compress.pipeline.prepare import Prepared
from compress.pipeline.progress import RunDisplay
from compress.pipeline.resume import Progress


@dataclass
class BlockSurvey:
    """What one block shows.

    Attributes:
        energies: what each rank of a linear would keep, by full name, float64 `[min(O, I)]`: `low_rank_work.energies`.
        outliers: share of outliers among the scores of the linears of each kind of pruning, by its text.
        hidden: `[N, L, H]`, input of the next block.
        reference: not asked for: the blocks are dense.
    """

    outliers: dict[str, float] = field(default_factory=dict)
    energies: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    reference: Tensor | None = None

    def facts(self) -> dict[str, Any]:
        """The JSON-able part."""
        return {"outliers": self.outliers}


def survey(prepared: Prepared, progress: Progress, quiet: bool) -> None:
    """Looks at every block that no earlier run looked at. `progress` is the first pass's.

    Raises:
        NumericsError: NaN or infinity in weights or inputs.
        ToolkitError: memory ran out with a single sequence.
    """
    total = prepared.skeleton.num_blocks
    done = progress.num_finished(total)
    if done == total:
        return
    with RunDisplay(total, done, quiet, unit="first pass, block") as display:
        runner = CalibratedRunner(prepared, survey_block, progress, done, display) if prepared.sequences else None
        for index in range(done, total):
            found = runner.run(index) if runner else _survey_plainly(prepared, index)
            facts = found.facts() | {"micro_batch": runner.micro_batch if runner else 0}
            progress.save_block(index, found.energies, facts, None if index + 1 == total else found.hidden)
            display.finish(_line(found))
            return_freed_memory()


@torch.no_grad()
def survey_block(
    block: LoadedBlock,
    job: BlockJob,
    calibration: Calibration,
    device: torch.device,
    step: Callable[[str, float], None] = lambda _what, _share: None,
) -> BlockSurvey:
    """Observes a dense block's inputs, and hands on its outputs."""
    chosen = {name: each for name, each in job.assignments.items() if each.needs_first_pass}
    found = BlockSurvey()
    if chosen:
        needs = {name: Need(each.shares_ranks and each.needs_hessian) for name, each in chosen.items()}
        observed = observe(
            block, calibration.inputs, job.index, needs, device, lambda share: step("statistics", share / 2)
        )
        found.outliers = _outliers(block, chosen, observed.statistics)
        found.energies = _energies(block, chosen, observed.statistics)
    found.hidden = run_all(
        block.module,
        block.name,
        calibration.inputs,
        job.index,
        device,
        lambda share: step("next inputs", 0.5 + share / 2),
    )
    return found


@torch.no_grad()
def _survey_plainly(prepared: Prepared, index: int) -> BlockSurvey:
    """What weights alone say."""
    job = block_job(prepared, index)
    chosen = {name: each for name, each in job.assignments.items() if each.needs_first_pass}
    block = read_block(prepared.skeleton, prepared.files, index, set(chosen), prepared.device)
    return BlockSurvey(energies=_energies(block, chosen, {}))


def _energies(
    block: LoadedBlock, chosen: Mapping[str, Assignment], statistics: Mapping[str, InputStatistics]
) -> dict[str, Tensor]:
    shared = {name: each for name, each in chosen.items() if each.shares_ranks}
    return {f"{block.name}.{name}": each.cpu() for name, each in energies(block.weights, shared, statistics).items()}


def _outliers(
    block: LoadedBlock, chosen: Mapping[str, Assignment], statistics: Mapping[str, InputStatistics]
) -> dict[str, float]:
    """The share of outliers, for each kind of pruning; linears that nothing reaches do not count."""
    members: dict[Pruning, list[str]] = {}
    for name, assignment in chosen.items():
        if assignment.pruning and assignment.pruning.layerwise and name in statistics:
            members.setdefault(assignment.pruning, []).append(name)
    return {str(pruning): _ratio(block, names, statistics, pruning.layerwise) for pruning, names in members.items()}


def _ratio(
    block: LoadedBlock, names: list[str], statistics: Mapping[str, InputStatistics], shares: OutlierShares | None
) -> float:
    if shares is None:
        return 0.0
    found = [scores("wanda", block.weights[name], statistics[name].mean_square) for name in names]
    return outlier_ratio(found, shares.factor)


def _line(found: BlockSurvey) -> str:
    parts = [f"outliers {ratio:.3%}" for ratio in found.outliers.values()]
    if found.energies:
        parts.append(f"spectra of {len(found.energies)} layers")
    return ", ".join(parts) or "nothing to look at"
