"""Makes the plan: from a recipe, a model's structure and the headers of its weights to one row per tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping

from compress.assign import assign, check_groups
from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.scheme import Scheme
from compress.checkpoint.source import TensorFiles
from compress.edges import scheme_notes, sibling_notes, usable_edges
from compress.plan import Assignment, Plan, PlanRow
from compress.recipe import Recipe
from compress.skeleton import Skeleton

_SHAPE_TENSOR_BYTES = 16


def make_plan(skeleton: Skeleton, files: TensorFiles, recipe: Recipe, scale_dtype: str) -> Plan:
    """Resolves the recipe against a model; reads headers only.

    Raises:
        RecipeError: a pattern that matches nothing, or nothing left to quantize.
        SchemeError: a group size that does not divide, naming every such layer.
        CheckpointError: weights the model needs are not in the checkpoint.
    """
    linears = _linear_shapes(skeleton)
    _check_present(skeleton, files)
    assignments, reasons = assign(recipe.stages, linears, _other_modules(skeleton))
    check_groups(assignments, linears)
    rows = tuple(_row(name, files, assignments, reasons, skeleton, scale_dtype) for name in files.names())
    edges, notes = usable_edges(skeleton, assignments)
    notes += sibling_notes(skeleton, assignments) + scheme_notes(assignments)
    return Plan(rows, tuple(notes), edges, scale_dtype)


def _linear_shapes(skeleton: Skeleton) -> dict[str, tuple[int, int]]:
    return {
        f"{skeleton.block_name(index)}.{name}": (linear.out_features, linear.in_features)
        for index, block in enumerate(skeleton.blocks)
        for name, linear in skeleton.linears(block).items()
    }


def _other_modules(skeleton: Skeleton) -> list[str]:
    """Modules outside of the blocks that a user may name in --ignore although they stay dense anyway."""
    return [name for name in (skeleton.architecture.head, skeleton.architecture.embedding) if name]


def _check_present(skeleton: Skeleton, files: TensorFiles) -> None:
    wanted = [name for name, _ in skeleton.model.named_parameters() if name.startswith(skeleton.architecture.blocks)]
    missing = [name for name in wanted if name not in files]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the transformer blocks are not in {files.path} under the name transformers "
            f"gives them, e.g. {missing[0]} (the folder has e.g. {files.names()[0]})",
            "Save the model again with save_pretrained of a recent transformers",
        )


def _row(
    name: str,
    files: TensorFiles,
    assignments: Mapping[str, Assignment],
    reasons: Mapping[str, str],
    skeleton: Skeleton,
    scale_dtype: str,
) -> PlanRow:
    module = name.removesuffix(".weight")
    before = files.tensor_nbytes(name)
    shape = files.shape(name)
    assignment = assignments.get(module) if name.endswith(".weight") else None
    if assignment is None:
        return PlanRow(name, shape, None, _dense_reason(name, module, shape, reasons, skeleton), before, before)
    return PlanRow(name, shape, assignment, "", before, _packed_bytes(assignment.scheme, shape, scale_dtype))


def _packed_bytes(scheme: Scheme, shape: tuple[int, ...], scale_dtype: str) -> int:
    rows, columns = shape
    return math.ceil(scheme.stored_bits(rows, columns, _bits(scale_dtype)) / 8) + _SHAPE_TENSOR_BYTES


def _bits(dtype: str) -> int:
    return {"float64": 64, "float32": 32}.get(dtype, 16)


def _dense_reason(
    name: str, module: str, shape: tuple[int, ...], reasons: Mapping[str, str], skeleton: Skeleton
) -> str:
    architecture = skeleton.architecture
    if module in reasons:
        return reasons[module]
    if module == architecture.embedding:
        return "token embedding"
    if architecture.head and module == architecture.head:
        return "output head"
    if len(shape) <= 1:
        return "norm, bias or other vector"
    if name.startswith(f"{architecture.blocks}."):
        linear = module in {f"{architecture.blocks}.{each}" for each in _block_linears(skeleton, module)}
        return "no stage targets it" if linear else "not a linear layer"
    return "outside of the transformer blocks"


def _block_linears(skeleton: Skeleton, module: str) -> list[str]:
    index = module.removeprefix(f"{skeleton.architecture.blocks}.").partition(".")[0]
    if not index.isdigit() or int(index) >= skeleton.num_blocks:
        return []
    return [f"{index}.{name}" for name in skeleton.linears(skeleton.blocks[int(index)])]
