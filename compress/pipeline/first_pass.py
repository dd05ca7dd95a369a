"""First pass over the model, which replaces planned averages with final values per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.checkpoint.weights import NM, LowRank, Scheme
from compress.common.workers import Workers
from compress.make_plan import packed_bytes, scale_bits
from compress.methods.base import Needs
from compress.methods.low_rank import RankedLinear, rank_step, share_out_over_blocks
from compress.methods.owl import BlockShare, block_patterns, block_shares
from compress.pipeline.block import BlockJob, LoadedBlock, read_block
from compress.pipeline.calibration import CalibratedRunner
from compress.pipeline.capture import Calibration, run_all
from compress.pipeline.compress_layer import energies
from compress.pipeline.memory import return_freed_memory
from compress.pipeline.observe import Observed, observe
from compress.pipeline.prepare import RunContext
from compress.pipeline.resume import Progress, RunDisplay
from compress.plan import Factoring, LayerPlan, Plan, PlanRow, Pruning


@dataclass
class BlockSurvey:
    """Observations of one block.

    Attributes:
        energies: energy of each rank of a linear, by full name, float64 `[min(O, I)]`; see `low_rank_work.energies`.
        outliers: share of outliers among the scores of linears, by the text of each kind of pruning.
        reference: unused, because the blocks are dense.
    """

    outliers: dict[str, float] = field(default_factory=dict)
    energies: dict[str, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    reference: Tensor | None = None


def survey(context: RunContext, progress: Progress, quiet: bool) -> None:
    """Observes every block that no earlier run has observed. `progress` is that of the first pass. Raises
    NumericsError: weights or inputs contain NaN or infinity; ToolkitError: memory ran out with a single sequence."""
    total = context.skeleton.num_blocks
    done = progress.num_finished(total)
    if done == total:
        return
    with RunDisplay(total, done, quiet, unit="first pass, block") as display:
        runner = CalibratedRunner(context, survey_block, progress, done, display) if context.sequences else None
        for index in range(done, total):
            found = runner.run(index) if runner else _survey_plainly(context, index)
            facts = {"outliers": found.outliers, "micro_batch": runner.micro_batch if runner else 0}
            hidden, passed_on = None if index + 1 == total else found.hidden, runner.passed_on if runner else {}
            progress.save_block(index, found.energies, facts, hidden, passed_on=passed_on)
            display.finish(_line(found))
            return_freed_memory()


@torch.no_grad()
def survey_block(
    block: LoadedBlock,
    job: BlockJob,
    calibration: Calibration,
    workers: Workers,
    step: Callable[[str, float], None] = lambda _what, _share: None,
) -> BlockSurvey:
    """Observes the inputs of a dense block, and returns its outputs."""
    chosen = {name: each for name, each in job.layer_plans.items() if each.needs_first_pass}
    found = BlockSurvey()
    if chosen:
        needs = {name: Needs(hessian=each.shares_ranks and each.needs.hessian) for name, each in chosen.items()}
        observed = observe(
            block, calibration.inputs, job.index, needs, workers, lambda share: step("statistics", share / 2)
        )
        found.outliers = _outliers(block, chosen, observed.statistics)
        found.energies = _energies(block, chosen, observed, workers)
    found.hidden = run_all(
        block, calibration.inputs, job.index, workers, lambda share: step("next inputs", 0.5 + share / 2)
    )
    return found


@torch.no_grad()
def _survey_plainly(context: RunContext, index: int) -> BlockSurvey:
    """Observes a block without calibration."""
    job = BlockJob.of(context, index)
    chosen = {name: each for name, each in job.layer_plans.items() if each.needs_first_pass}
    block = read_block(context.skeleton, context.files, index, set(chosen), context.device)
    return BlockSurvey(energies=_energies(block, chosen, Observed({}, ()), context.workers))


def _energies(
    block: LoadedBlock, chosen: Mapping[str, LayerPlan], observed: Observed, workers: Workers
) -> dict[str, Tensor]:
    shared = {name: each for name, each in chosen.items() if each.shares_ranks}
    known = observed.shared(block.copies(workers), workers)
    found = energies(block.weights, shared, observed.tasks, known, workers)
    return {f"{block.name}.{name}": each for name, each in found.items()}


def _outliers(
    block: LoadedBlock, chosen: Mapping[str, LayerPlan], statistics: Mapping[str, InputStatistics]
) -> dict[str, float]:
    """Returns the share of outliers for each kind of pruning, without linears that no token reaches."""
    members: dict[Pruning, list[str]] = {}
    for name, layer_plan in chosen.items():
        if layer_plan.layerwise_pruning and name in statistics:
            members.setdefault(layer_plan.layerwise_pruning, []).append(name)
    return {
        str(pruning): pruning.layerwise.block_ratio([(block.weights[n], statistics[n].mean_square) for n in names])
        for pruning, names in members.items()
        if pruning.layerwise
    }


def _line(found: BlockSurvey) -> str:
    parts = [f"outliers {ratio:.3%}" for ratio in found.outliers.values()]
    if found.energies:
        parts.append(f"spectra of {len(found.energies)} layers")
    return ", ".join(parts) or "nothing to observe"


def finalize_plan(context: RunContext, progress: Progress, quiet: bool) -> tuple[Plan, list[BlockShare]]:
    """Runs the first pass and finalizes the plan. Raises ToolkitError: the first pass fails. Returns final plan, and
    the sparsity of each block if it differs between blocks."""
    survey(context, progress.survey, quiet)
    facts = [progress.survey.facts(index) for index in range(context.skeleton.num_blocks)]
    changed: dict[str, LayerPlan] = {}
    shares: list[BlockShare] = []
    for pruning, members in _grouped(context.plan, lambda each: each.layerwise_pruning).items():
        found = _share_out(context, pruning, members, [each["outliers"].get(str(pruning), 0.0) for each in facts])
        shares += found
        changed |= _with_shares(members, found)
    files = [progress.survey.piece(index) for index in range(context.skeleton.num_blocks)]
    energies = [{name: file.tensor(name).tolist() for name in file.entries} for file in files]
    for factoring, members in _grouped(
        context.plan, lambda each: each.factoring if each.shares_ranks else None
    ).items():
        changed |= _with_ranks(context.plan, energies, factoring, members)
    rows = tuple(_row(context.plan, row, changed) for row in context.plan.rows)
    return replace(context.plan, rows=rows), shares


Part = TypeVar("Part")


def _grouped(plan: Plan, part: Callable[[LayerPlan], Part | None]) -> dict[Part, dict[str, LayerPlan]]:
    """Returns linears by a part of their plans, without those that have none."""
    members: dict[Part, dict[str, LayerPlan]] = {}
    for name, layer_plan in plan.layer_plans.items():
        if (found := part(layer_plan)) is not None:
            members.setdefault(found, {})[name] = layer_plan
    return members


def _share_out(
    context: RunContext, pruning: Pruning, members: Mapping[str, LayerPlan], ratios: Sequence[float]
) -> list[BlockShare]:
    """Returns the sparsity of every block with such linears."""
    rows = {row.tensor.removesuffix(".weight"): row.parameters for row in context.plan.rows}
    names = [context.skeleton.block_name(index) for index in range(context.skeleton.num_blocks)]
    weights = [sum(rows[name] for name in members if name.startswith(f"{block}.")) for block in names]
    present = [index for index, count in enumerate(weights) if count]
    chosen = [ratios[index] for index in present]
    owl_lambda = pruning.layerwise.owl_lambda if pruning.layerwise else 0.0
    shares = block_shares(chosen, [weights[index] for index in present], pruning.sparsity, owl_lambda)
    patterns = block_patterns(shares, pruning.pattern) if pruning.pattern else [None] * len(present)
    return [
        BlockShare(names[index], ratio, share, pattern)
        for index, ratio, share, pattern in zip(present, chosen, shares, patterns, strict=True)
    ]


def _with_shares(members: Mapping[str, LayerPlan], shares: Sequence[BlockShare]) -> dict[str, LayerPlan]:
    changed = {}
    for found in shares:
        for name in [name for name in members if name.startswith(f"{found.block}.")]:
            layer_plan = members[name]
            pruning = Pruning(layer_plan.pruning.method, found.pattern, found.share) if layer_plan.pruning else None
            codes = layer_plan.scheme.codes if layer_plan.scheme else None
            scheme = NM.of(codes, found.pattern) if layer_plan.scheme and found.pattern else codes
            changed[name] = replace(layer_plan, pruning=pruning, scheme=scheme)
    return changed


def _with_ranks(
    plan: Plan,
    energies: Sequence[Mapping[str, list[float]]],
    factoring: Factoring,
    members: Mapping[str, LayerPlan],
) -> dict[str, LayerPlan]:
    """Sets final ranks; a linear that is better kept dense loses its rank, with the reason in its record."""
    shapes = {row.tensor.removesuffix(".weight"): row.shape for row in plan.rows}
    steps = {name: rank_step(each.scheme.codes) for name, each in members.items() if each.scheme}

    def ranked(name: str, values: list[float]) -> RankedLinear:
        rows, columns = shapes[name]
        return RankedLinear(rows, columns, steps[name], values)

    blocks = [{name: ranked(name, values) for name, values in found.items() if name in steps} for found in energies]
    settled = replace(factoring, allocation="uniform")
    return {
        name: replace(members[name], scheme=_ranked_scheme(members[name], rank), factoring=settled)
        for name, rank in share_out_over_blocks(blocks, factoring.keep_ratio).items()
    }


def _ranked_scheme(layer_plan: LayerPlan, rank: int | None) -> Scheme | None:
    codes = layer_plan.scheme.codes if layer_plan.scheme else None
    return codes if layer_plan.scheme is None or rank is None else LowRank.of(codes, rank)


def _row(plan: Plan, row: PlanRow, changed: Mapping[str, LayerPlan]) -> PlanRow:
    layer_plan = changed.get(row.tensor.removesuffix(".weight"))
    if layer_plan is None or row.layer_plan is None:
        return row
    dense = row.parameters * scale_bits(plan.scale_dtype) // 8
    after = packed_bytes(layer_plan, row.shape, plan.scale_dtype) if layer_plan.scheme else dense
    return replace(row, layer_plan=layer_plan, bytes_after=after)
