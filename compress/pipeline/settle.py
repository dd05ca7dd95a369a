"""The plan made final: what a first pass over the model decides is put in the place of the means that were planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compress.assignment import Assignment, Factoring, Pruning
from compress.checkpoint.scheme import Scheme
from compress.layerwise import BlockShare, block_patterns, block_shares
from compress.pipeline.planning import packed_bytes
from compress.pipeline.prepare import Prepared
from compress.pipeline.resume import Progress
from compress.pipeline.survey import survey
from compress.plan import Plan, PlanRow
from compress.ranks import RankedLinear, rank_step, share_out_over_blocks


@dataclass(frozen=True, slots=True)
class Settled:
    """A run with nothing left open.

    Attributes:
        prepared: with the final plan.
        shares: how much of each block is pruned, where that differs from block to block.
    """

    prepared: Prepared
    shares: tuple[BlockShare, ...] = ()


def settle(prepared: Prepared, progress: Progress, quiet: bool) -> Settled:
    """Runs the first pass, if the recipe needs one, and decides.

    Raises:
        ToolkitError: from the first pass.
    """
    if not any(each.needs_first_pass for each in prepared.plan.assignments.values()):
        return Settled(prepared)
    survey(prepared, progress.survey, quiet)
    facts = [progress.survey.facts(index) for index in range(prepared.skeleton.num_blocks)]
    changed: dict[str, Assignment] = {}
    shares: list[BlockShare] = []
    for pruning, members in _layerwise(prepared.plan).items():
        found = _share_out(prepared, pruning, members, [each["outliers"].get(str(pruning), 0.0) for each in facts])
        shares += found
        changed |= _with_shares(members, found)
    energies = _energies(progress.survey, prepared.skeleton.num_blocks)
    for factoring, members in _ranked(prepared.plan).items():
        changed |= _with_ranks(prepared.plan, energies, factoring, members)
    return Settled(replace(prepared, plan=_replaced(prepared.plan, changed)), tuple(shares))


def _layerwise(plan: Plan) -> dict[Pruning, dict[str, Assignment]]:
    """Linears whose share depends on their block, those of one stage together."""
    members: dict[Pruning, dict[str, Assignment]] = {}
    for name, assignment in plan.assignments.items():
        if assignment.pruning and assignment.pruning.layerwise:
            members.setdefault(assignment.pruning, {})[name] = assignment
    return members


def _share_out(
    prepared: Prepared, pruning: Pruning, members: Mapping[str, Assignment], ratios: Sequence[float]
) -> list[BlockShare]:
    """The share of every block that has such linears."""
    rows = {row.tensor.removesuffix(".weight"): row.parameters for row in prepared.plan.rows}
    names = [prepared.skeleton.block_name(index) for index in range(prepared.skeleton.num_blocks)]
    weights = [sum(rows[name] for name in members if name.startswith(f"{block}.")) for block in names]
    present = [index for index, count in enumerate(weights) if count]
    chosen = [ratios[index] for index in present]
    spread = pruning.layerwise.spread if pruning.layerwise else 0.0
    shares = block_shares(chosen, [weights[index] for index in present], pruning.share, spread)
    patterns = block_patterns(shares, pruning.pattern) if pruning.pattern else [None] * len(present)
    return [
        BlockShare(names[index], ratio, share, pattern)
        for index, ratio, share, pattern in zip(present, chosen, shares, patterns, strict=True)
    ]


def _with_shares(members: Mapping[str, Assignment], shares: Sequence[BlockShare]) -> dict[str, Assignment]:
    changed = {}
    for found in shares:
        for name in [name for name in members if name.startswith(f"{found.block}.")]:
            assignment = members[name]
            pruning = Pruning(assignment.pruning.method, found.pattern, found.share) if assignment.pruning else None
            scheme = replace(assignment.scheme, sparsity=found.pattern) if assignment.scheme else None
            changed[name] = replace(assignment, pruning=pruning, scheme=scheme)
    return changed


def _ranked(plan: Plan) -> dict[Factoring, dict[str, Assignment]]:
    """Linears whose ranks are shared out over the model, those of one stage together."""
    members: dict[Factoring, dict[str, Assignment]] = {}
    for name, assignment in plan.assignments.items():
        if assignment.factoring and assignment.shares_ranks:
            members.setdefault(assignment.factoring, {})[name] = assignment
    return members


def _energies(survey: Progress, num_blocks: int) -> list[dict[str, list[float]]]:
    """What each rank of a linear would keep, block by block, by full name."""
    files = (survey.piece(index) for index in range(num_blocks))
    return [{name: file.tensor(name).tolist() for name in file.entries} for file in files]


def _with_ranks(
    plan: Plan,
    energies: Sequence[Mapping[str, list[float]]],
    factoring: Factoring,
    members: Mapping[str, Assignment],
) -> dict[str, Assignment]:
    """Final ranks; a linear that had better stay whole loses its rank, and its record says why."""
    shapes = {row.tensor.removesuffix(".weight"): row.shape for row in plan.rows}
    steps = {name: rank_step(each.scheme.factor) for name, each in members.items() if each.scheme}

    def ranked(name: str, values: list[float]) -> RankedLinear:
        rows, columns = shapes[name]
        return RankedLinear(rows, columns, steps[name], values)

    blocks = [{name: ranked(name, values) for name, values in found.items() if name in steps} for found in energies]
    settled = replace(factoring, allocation="uniform")
    return {
        name: replace(members[name], scheme=_ranked_scheme(members[name], rank), factoring=settled)
        for name, rank in share_out_over_blocks(blocks, factoring.keep).items()
    }


def _ranked_scheme(assignment: Assignment, rank: int | None) -> Scheme | None:
    if assignment.scheme is None or rank is None:
        return assignment.scheme.factor if assignment.scheme else None
    return replace(assignment.scheme, rank=rank)


def _replaced(plan: Plan, changed: Mapping[str, Assignment]) -> Plan:
    """The plan with other assignments."""
    return replace(plan, rows=tuple(_row(plan, row, changed) for row in plan.rows))


def _row(plan: Plan, row: PlanRow, changed: Mapping[str, Assignment]) -> PlanRow:
    assignment = changed.get(row.tensor.removesuffix(".weight"))
    if assignment is None or row.assignment is None:
        return row
    after = packed_bytes(assignment, row.shape, plan.scale_dtype) if assignment.scheme else row.bytes_before
    return replace(row, assignment=assignment, bytes_after=after)
