"""Makes the plan: from a recipe, a model's structure and the headers of its weights to one row per tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from compress.assignment import Assignment
from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.formats import native
from compress.checkpoint.source import TensorFiles
from compress.kv_choice import kv_notes
from compress.pipeline.assign import Shapes, assign, check_groups, check_patterns
from compress.pipeline.cost_notes import cost_notes
from compress.pipeline.edges import scheme_notes, sibling_notes, usable_edges
from compress.pipeline.outside import find_ends
from compress.pipeline.rotated_files import RotatedFiles
from compress.pipeline.skeleton import Skeleton
from compress.plan import Plan, PlanRow, shape_bytes
from compress.recipe import Recipe
from compress.sized import with_keep


def make_plan(skeleton: Skeleton, files: TensorFiles, recipe: Recipe, scale_dtype: str) -> Plan:
    """Resolves the recipe against a model; reads headers only.

    Args:
        scale_dtype: dtype in which scales are stored, by name.

    Raises:
        RecipeError: a pattern that matches nothing, or nothing left to quantize.
        SchemeError: a group size that does not divide, naming every such layer; or what no file can hold.
        CheckpointError: weights the model needs are not in the checkpoint, or no floating point numbers of its shapes.
    """
    _check_present(skeleton, files)
    sized = with_keep(recipe, lambda each: _plan(skeleton, files, each, scale_dtype).bytes_after)
    return _plan(skeleton, files, sized, scale_dtype)


def _plan(skeleton: Skeleton, files: TensorFiles, recipe: Recipe, scale_dtype: str) -> Plan:
    linears, ends = _linear_shapes(skeleton), find_ends(skeleton, files)
    assignments, reasons = assign(recipe.tensor_stages, linears, ends)
    matrices = linears | {name: end.shape for name, end in ends.items() if end.shape}
    check_groups(assignments, matrices)
    check_patterns(assignments, matrices)
    _check_stored(assignments, matrices)
    rows = _Rows(skeleton, files, linears, assignments, reasons, scale_dtype)
    edges, notes = usable_edges(skeleton, assignments)
    notes += sibling_notes(skeleton, assignments) + scheme_notes(assignments)
    notes += kv_notes(recipe, getattr(skeleton.model.config, "max_position_embeddings", None))
    planned = tuple(map(rows.row, files.names()))
    plan = Plan(planned, (*notes, *cost_notes(recipe, planned)), edges, scale_dtype)
    return files.marked(plan) if isinstance(files, RotatedFiles) else plan


@dataclass(frozen=True, slots=True)
class _Rows:
    """One row per stored tensor."""

    skeleton: Skeleton
    files: TensorFiles
    linears: Shapes
    assignments: Mapping[str, Assignment]
    reasons: Mapping[str, str]
    scale_dtype: str

    def row(self, name: str) -> PlanRow:
        shape, before = self.files.shape(name), self.files.tensor_nbytes(name)
        module = name.removesuffix(".weight")
        assignment = self.assignments.get(module) if name.endswith(".weight") else None
        if assignment is not None and assignment.scheme is not None:
            after = packed_bytes(assignment, shape, self.scale_dtype)
            return PlanRow(name, shape, assignment, "", before, after)
        if assignment is not None:
            return PlanRow(name, shape, assignment, "pruned without a pattern: zeros are stored", before, before)
        if module == self.skeleton.architecture.head and self.skeleton.ties_head:
            return PlanRow(name, shape, None, "tied to the token embedding: not stored twice", before, 0)
        return PlanRow(name, shape, None, self._reason(name, module, shape), before, before)

    def _reason(self, name: str, module: str, shape: tuple[int, ...]) -> str:
        architecture = self.skeleton.architecture
        if module in self.reasons:
            return self.reasons[module]
        if module == architecture.embedding:
            return "token embedding, also the output head" if self.skeleton.ties_head else "token embedding"
        if module == architecture.head:
            return "output head"
        if len(shape) <= 1:
            return "norm, bias or other vector"
        if module in self.linears:
            return "no stage targets it"
        inside = name.startswith(f"{architecture.blocks}.")
        return "not a linear layer" if inside else "outside of the transformer blocks"


def packed_bytes(assignment: Assignment, shape: tuple[int, ...], scale_dtype: str) -> int:
    """Of a weight with a scheme. Exact, but for ranks that are shared out later: all of the budget is spent, of which
    this is the weight's share."""
    scheme, factoring = assignment.scheme, assignment.factoring
    if scheme is None:
        raise ValueError("a weight without a scheme is not packed")
    scale_bits = {"float64": 64, "float32": 32}.get(scale_dtype, 16)
    bits: float = scheme.stored_bits(shape[0], shape[1], scale_bits)
    if factoring and factoring.is_shared and scheme.rank:
        bits *= factoring.keep * math.prod(shape) / (scheme.rank * sum(shape))
    return math.ceil(bits / 8) + shape_bytes(scheme)


def _linear_shapes(skeleton: Skeleton) -> dict[str, tuple[int, int]]:
    return {
        f"{skeleton.block_name(index)}.{name}": (linear.out_features, linear.in_features)
        for index, block in enumerate(skeleton.blocks)
        for name, linear in skeleton.linears(block).items()
    }


def _check_stored(assignments: Mapping[str, Assignment], linears: Shapes) -> None:
    """Raises SchemeError for a scheme that could not be written in the end."""
    for name, assignment in assignments.items():
        if assignment.scheme is not None:
            native.check(assignment.scheme, linears[name])


def _check_present(skeleton: Skeleton, files: TensorFiles) -> None:
    tied = f"{skeleton.architecture.head}.weight" if skeleton.ties_head else ""
    missing = [name for name, _ in skeleton.model.named_parameters() if name not in files and name != tied]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the model are not in {files.path} under the name transformers gives them, "
            f"e.g. {missing[0]} (there is e.g. {files.names()[0]})",
            "Check config.json, or save the model again with save_pretrained of a recent transformers",
        )
    for name, parameter in skeleton.model.named_parameters():
        if name in files:
            _check_weight(files, name, tuple(parameter.shape))


def _check_weight(files: TensorFiles, name: str, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError for a tensor that is of another shape than the model's, or of integers."""
    if files.shape(name) != shape:
        raise CheckpointError(
            f"{name} has shape {list(files.shape(name))} in {files.path}, but config.json asks for {list(shape)}",
            "Use the config.json that belongs to these weights",
        )
    if not files.dtype(name).is_floating_point:
        kind = str(files.dtype(name)).removeprefix("torch.")
        raise CheckpointError(f"{name} of {files.path} holds {kind}, not weights", "Start from the dense model")
