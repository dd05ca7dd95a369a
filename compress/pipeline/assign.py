"""From the stages of a recipe to what each linear gets. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from compress.assignment import Assignment, Factoring, Pruning
from compress.checkpoint.errors import RecipeError, SchemeError
from compress.checkpoint.scheme import FLOAT_BITS, GROUP_SIZES, Scheme
from compress.layerwise import OutlierShares
from compress.pipeline.outside import End
from compress.ranks import rank_step, uniform_rank
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import FACTOR_METHODS
from compress.stages.table import TensorStage
from compress.targets import matches, select, without_indices

Shapes = Mapping[str, tuple[int, int]]
"""`(out_features, in_features)` of every linear in the blocks, by full name."""


def assign(
    stages: Sequence[TensorStage], linears: Shapes, ends: Mapping[str, End]
) -> tuple[dict[str, Assignment], dict[str, str]]:
    """What each quantized linear gets, and why the ignored ones get nothing. A later stage wins.

    Args:
        linears: those in the blocks, which a stage without targets takes.
        ends: embedding and head, which only stages that name them take.

    Raises:
        RecipeError: a pattern that matches nothing, a target that the stage cannot change, or nothing left to quantize.
    """
    assignments: dict[str, Assignment] = {}
    reasons: dict[str, str] = {}
    names = [*linears, *ends]
    for stage in stages:
        chosen = select(stage.targets, names, "targets") if stage.targets else set(linears)
        for name in sorted(chosen & ends.keys()):
            ends[name].check(name, stage)
        ignored = select(stage.ignore, names, "--ignore") & chosen
        for name in ignored:
            pattern = next(each for each in stage.ignore if matches(each, name))
            reasons[name] = f"left out by --ignore {pattern}"
        for name in [name for name in names if name in chosen]:
            shape = linears[name] if name in linears else ends[name].shape or (0, 0)
            changed = _apply(stage, assignments.get(name, UNCHANGED), name in ignored, shape[1])
            assignments.pop(name, None)
            if changed != UNCHANGED:
                assignments[name] = changed
    _check_tuning(assignments)
    _check_outliers(assignments)
    assignments = _with_ranks(assignments, linears, reasons)
    if stages and not assignments:
        raise RecipeError("no linear layer is left to quantize", "Loosen --ignore or the recipe's targets")
    return assignments, reasons


UNCHANGED = Assignment(None, None)


def _apply(stage: TensorStage, before: Assignment, ignored: bool, in_features: int) -> Assignment:
    """What a linear gets after one more stage; a stage that ignores it takes its own part back."""
    pruning, factoring = before.pruning, before.factoring
    method, scheme, alpha, tuning = before.method, before.quantized, before.alpha, before.tuning
    if isinstance(stage, FactorizeStage):
        factoring = None if ignored else Factoring(stage.method, stage.keep, stage.allocation)
    elif isinstance(stage, PruneStage):
        pruning = None if ignored else _pruning(stage)
    elif ignored:
        method, scheme, alpha, tuning = None, None, None, None
    else:
        method, scheme, alpha, tuning = stage.method, stage.scheme_for(in_features), stage.alpha, stage.tuning
    return Assignment(method, _stored(scheme, pruning), alpha, pruning, factoring, tuning)


def _pruning(stage: PruneStage) -> Pruning:
    layerwise = OutlierShares(stage.outlier_factor, stage.spread) if stage.layerwise == "owl" else None
    return Pruning(stage.method, stage.pattern, stage.share, layerwise)


def _check_outliers(assignments: Mapping[str, Assignment]) -> None:
    """Raises RecipeError when pruned weights are to have outlier columns."""
    mixed = (name for name, each in assignments.items() if each.pruning and each.scheme and each.scheme.outliers)
    if name := next(mixed, None):
        raise RecipeError(f"{name} is pruned and has outlier columns", "Give the stages other targets")


def _check_tuning(assignments: Mapping[str, Assignment]) -> None:
    """Raises RecipeError when rounding is to be learned for pruned weights, or in several ways."""
    tuned = {name: each for name, each in assignments.items() if each.tuning}
    if pruned := next((name for name, each in tuned.items() if each.pruning), None):
        raise RecipeError(f"signround does not keep zeros, and {pruned} is pruned", "Quantize pruned layers by gptq")
    if len({each.tuning for each in tuned.values()}) > 1:
        problem = "stages of signround differ in steps, lr or batch, and the layers of a block are learned together"
        raise RecipeError(problem, "Give them the same")


def _with_ranks(
    assignments: Mapping[str, Assignment], linears: Shapes, reasons: dict[str, str]
) -> dict[str, Assignment]:
    """Gives factorized linears the rank that keeps their share of weights; adds why some are not factorized.

    Raises:
        RecipeError: a factorized linear is also pruned, or smoothed.
        SchemeError: groups too large for the rank.
    """
    ranked: dict[str, Assignment] = {}
    for name, assignment in assignments.items():
        changed = _with_rank(name, assignment, linears[name]) if assignment.factoring else assignment
        if assignment.factoring and not changed.factoring:
            rows, columns = linears[name]
            reasons[name] = f"kept whole: two factors of {rows} x {columns} would be no smaller"
        if changed != UNCHANGED:
            ranked[name] = changed
    return ranked


def _with_rank(name: str, assignment: Assignment, shape: tuple[int, int]) -> Assignment:
    scheme, factoring = assignment.quantized, assignment.factoring
    if factoring is None:
        return assignment
    if assignment.pruning:
        raise RecipeError(f"{name} is pruned and factorized", "Give the stages other targets: factors are not sparse")
    if assignment.method is not None and assignment.method not in FACTOR_METHODS:
        problem = f"{assignment.method} is not for factors, and {name} is factorized"
        raise RecipeError(problem, "Quantize factors by rtn or gptq")
    rank, free = (uniform_rank(*shape, factoring.keep, step) for step in (rank_step(scheme), rank_step(None)))
    if free and not 0 < rank <= free:
        raise SchemeError(
            f"ranks of {name} are multiples of {rank_step(scheme)} as {scheme}, more than the {free} that are kept",
            "Use --group-size -1 (per channel), or groups of 32",
        )
    if not rank:
        return replace(assignment, factoring=None)
    stored = Scheme(FLOAT_BITS, None, rank=rank) if scheme is None else replace(scheme, rank=rank)
    return replace(assignment, scheme=stored, factoring=factoring)


def _stored(scheme: Scheme | None, pruning: Pruning | None) -> Scheme | None:
    """How the weight is stored: the zeros of a pattern are left out, others are not."""
    pattern = pruning.pattern if pruning else None
    if scheme is None:
        return Scheme(FLOAT_BITS, None, sparsity=pattern) if pattern else None
    return replace(scheme, sparsity=pattern)


def check_groups(assignments: Mapping[str, Assignment], linears: Shapes) -> None:
    """Raises SchemeError when a group size does not divide, naming every such layer and what would fit all."""
    bad: dict[tuple[str, int], list[str]] = {}
    for name, assignment in assignments.items():
        group_size, columns = _group_size(assignment), linears[name][1]
        if group_size is not None and columns % group_size:
            bad.setdefault((without_indices(name), columns), []).append(name)
    if not bad:
        return
    listed = "; ".join(f"{kind} ({len(names)} layers, {columns} inputs)" for (kind, columns), names in bad.items())
    size = next(_group_size(assignments[names[0]]) for names in bad.values())
    widths = [linears[name][1] for name in assignments]
    fitting = [each for each in GROUP_SIZES if not any(width % each for width in widths)]
    remedy = f"--group-size {fitting[-1]}" if fitting else "--group-size -1 (per channel)"
    if sum(map(len, bad.values())) < len(assignments):
        leaves = dict.fromkeys(kind.rpartition(".")[2] for kind, _ in bad)
        remedy += ", or leave them dense: " + " ".join(f"--ignore {leaf}" for leaf in leaves)
    raise SchemeError(f"group size {size} does not divide the inputs of {listed}", f"Use {remedy}")


def check_patterns(assignments: Mapping[str, Assignment], linears: Shapes) -> None:
    """Raises SchemeError when a sparsity pattern does not divide a layer's inputs, naming the first such layer."""
    for name, assignment in assignments.items():
        pattern, columns = assignment.scheme.sparsity if assignment.scheme else None, linears[name][1]
        if pattern and columns % pattern.of:
            leaf = name.rpartition(".")[2]
            raise SchemeError(f"{pattern} does not divide the {columns} inputs of {name}", f"Use --ignore {leaf}")


def _group_size(assignment: Assignment) -> int | None:
    return assignment.scheme.group_size if assignment.scheme else None
