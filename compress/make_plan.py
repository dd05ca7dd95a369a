"""Conversion of recipe stages to a plan per linear. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from compress.checkpoint.config import is_embedding
from compress.checkpoint.dequantized import stored_scheme
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.modeling.conversion import is_made
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.scheme import GROUP_SIZES
from compress.checkpoint.weights import Int, LowRank
from compress.checkpoint.weights.base import about
from compress.common.errors import CheckpointError, RecipeError, SchemeError
from compress.methods import base
from compress.methods.low_rank import rank_step, uniform_rank
from compress.pipeline.skeleton import Skeleton
from compress.plan import UNCHANGED, End, LayerPlan, Plan, PlanRow, shape_bytes
from compress.plan_notes import (
    CARRIED,
    OTHER_PART,
    ROUTER,
    carried_notes,
    class_notes,
    larger_notes,
    loader_notes,
    scheme_notes,
    sibling_notes,
    usable_mappings,
)
from compress.recipe import Recipe
from compress.stages.base import Stage, TensorStage
from compress.targets import matches, select, without_indices


def _methods_for(matrix: str) -> tuple[str, ...]:
    return tuple(name for name, method in base.QUANTIZATION.items() if matrix in method.matrices)


def find_embed_and_head(skeleton: Skeleton, files: TensorFiles) -> dict[str, End]:
    """Return embedding and head by name; one with a name that readers do not know cannot be changed."""
    architecture = skeleton.architecture
    ends: dict[str, End] = {}
    for name, what, methods in (
        (architecture.embedding, "token embedding", _methods_for(base.EMBEDDING)),
        (architecture.head, "output head", _methods_for(base.HEAD)),
    ):
        if not name:
            continue
        if name == architecture.head and skeleton.ties_head:
            ends[name] = End("is the embedding (tied)", None, ())
        elif is_embedding(name) != (name == architecture.embedding):
            ends[name] = End(f"has a name that no reader would know for the {what}", None, ())
        else:
            rows, columns = files.shape(f"{name}.weight")
            ends[name] = End(what, (rows, columns), methods)
    return ends


Shapes = Mapping[str, tuple[int, int]]
"""`(out_features, in_features)` of every linear in the blocks, by full name."""


def assign(
    stages: Sequence[TensorStage], linears: Shapes, ends: Mapping[str, End], dense: Collection[str] = ()
) -> tuple[dict[str, LayerPlan], dict[str, str]]:
    """Plan every linear, with the reasons of those that stay as they are. A later stage wins. Raises RecipeError: a
    pattern that matches nothing, a target that the stage cannot change, or nothing left to quantize.

    Args:
        linears: those in the blocks, which a stage without targets takes.
        ends: embedding and head, which only stages that name them take.
        dense: modules that no stage takes, which `ignore` may name all the same.
    """
    layer_plans: dict[str, LayerPlan] = {}
    reasons: dict[str, str] = {}
    names = [*linears, *ends]
    for stage in stages:
        chosen = select(stage.targets, names, "targets") if stage.targets else set(linears)
        for name in sorted(chosen & ends.keys()):
            if ends[name].shape is None:
                remedy = "Quantize the embedding, which serves as both: --embedding-bits, or a stage that targets it"
                raise RecipeError(f"targets include {name}, which {ends[name].what}", remedy)
            stage.check_outside(name, ends[name])
        ignored = select(stage.ignore, [*names, *dense], "--ignore") & chosen
        for name in ignored:
            pattern = next(each for each in stage.ignore if matches(each, name))
            reasons[name] = f"left out by --ignore {pattern}"
        for name in [name for name in names if name in chosen]:
            shape = linears[name] if name in linears else ends[name].shape or (0, 0)
            changed = stage.apply(layer_plans.get(name, UNCHANGED), shape[1], name in ignored)
            layer_plans.pop(name, None)
            if changed != UNCHANGED:
                layer_plans[name] = changed
    _check_together(layer_plans)
    layer_plans = _with_ranks(layer_plans, linears, reasons)
    if stages and not layer_plans:
        raise RecipeError("no linear layer is left to quantize", "Loosen --ignore or the recipe's targets")
    return layer_plans, reasons


def _check_together(layer_plans: Mapping[str, LayerPlan]) -> None:
    """Raises RecipeError when pruned weights would lose their zeros or have outlier columns, or rounding is learned in
    several ways."""
    for name, each in layer_plans.items():
        if each.pruning and each.scheme and each.scheme.num_outliers:
            raise RecipeError(f"{name} is pruned and has outlier columns", "Give the stages other targets")
        forms = [form for form in (each.scheme, each.scheme and each.scheme.codes) if form]
        if each.pruning and not all(form.holds_zeros for form in forms):
            raise RecipeError(f"{each.scheme} has no exact zeros, and {name} is pruned", "Quantize it to integers")
        if each.pruning and each.method and not each.method.keeps_zeros:
            able = " or ".join(name for name, method in base.QUANTIZATION.items() if method.joins_pruning)
            raise RecipeError(f"{each.method.name} does not keep zeros, and {name} is pruned", f"Quantize it by {able}")
    tuned = {(each.method, each.options) for each in layer_plans.values() if each.is_tuned}
    if len(tuned) > 1:
        listed = ", ".join(sorted({method.name for method, _ in tuned if method}))
        problem = f"stages of {listed} differ in their options, and the layers of a block are learned together"
        raise RecipeError(problem, "Give them the same options")


def _with_ranks(layer_plans: Mapping[str, LayerPlan], linears: Shapes, reasons: dict[str, str]) -> dict[str, LayerPlan]:
    """Gives factorized linears the rank that keeps their share of weights; adds why some are not factorized. Raises
    RecipeError: a factorized linear is also pruned, or smoothed; SchemeError: groups too large for the rank."""
    ranked: dict[str, LayerPlan] = {}
    for name, layer_plan in layer_plans.items():
        changed = _with_rank(name, layer_plan, linears[name]) if layer_plan.factoring else layer_plan
        if layer_plan.factoring and not changed.factoring:
            rows, columns = linears[name]
            reasons[name] = f"kept whole: two factors of {rows} x {columns} would be no smaller"
        if changed != UNCHANGED:
            ranked[name] = changed
    return ranked


def _with_rank(name: str, layer_plan: LayerPlan, shape: tuple[int, int]) -> LayerPlan:
    scheme, factoring = layer_plan.quantized, layer_plan.factoring
    if factoring is None:
        return layer_plan
    if layer_plan.pruning:
        raise RecipeError(f"{name} is pruned and factorized", "Give the stages other targets: factors are not sparse")
    if layer_plan.method is not None and not layer_plan.method.rounds_factors:
        problem = f"{layer_plan.method.name} is not for factors, and {name} is factorized"
        able = " or ".join(name for name, method in base.QUANTIZATION.items() if method.rounds_factors)
        raise RecipeError(problem, f"Quantize factors by {able}")
    rank, free = (uniform_rank(*shape, factoring.keep_ratio, step) for step in (rank_step(scheme), rank_step(None)))
    if free and not 0 < rank <= free:
        raise SchemeError(
            f"ranks of {name} are multiples of {rank_step(scheme)} as {scheme}, more than the {free} that are kept",
            "Use --group-size -1 (per channel), or groups of 32",
        )
    if not rank:
        return replace(layer_plan, factoring=None)
    return replace(layer_plan, scheme=LowRank.of(scheme, rank), factoring=factoring)


def check_groups(layer_plans: Mapping[str, LayerPlan], linears: Shapes) -> None:
    """Raises SchemeError when a group size does not divide, naming every such layer and what would fit all."""
    bad: dict[tuple[str, int], list[str]] = {}
    for name, layer_plan in layer_plans.items():
        group_size, columns = _group_size(layer_plan), linears[name][1]
        if group_size is not None and columns % group_size:
            bad.setdefault((without_indices(name), columns), []).append(name)
    if not bad:
        return
    listed = "; ".join(f"{kind} ({len(names)} layers, {columns} inputs)" for (kind, columns), names in bad.items())
    size = next(_group_size(layer_plans[names[0]]) for names in bad.values())
    widths = [linears[name][1] for name in layer_plans]
    fitting = [each for each in GROUP_SIZES if not any(width % each for width in widths)]
    remedy = f"--group-size {fitting[-1]}" if fitting else "--group-size -1 (per channel)"
    if sum(map(len, bad.values())) < len(layer_plans):
        leaves = dict.fromkeys(kind.rpartition(".")[2] for kind, _ in bad)
        remedy += ", or leave them dense: " + " ".join(f"--ignore {leaf}" for leaf in leaves)
    raise SchemeError(f"group size {size} does not divide the inputs of {listed}", f"Use {remedy}")


def _group_size(layer_plan: LayerPlan) -> int | None:
    """Return the group size that a recipe chose; None for forms with a size of their own, which check it themselves."""
    scheme = layer_plan.scheme
    return scheme.group_size if scheme and isinstance(scheme.codes, Int) else None


def make_plan(skeleton: Skeleton, files: TensorFiles, recipe: Recipe, scale_dtype: str) -> Plan:
    """Resolves the recipe against a model; reads headers only. Raises RecipeError: a pattern that matches nothing, or
    nothing left to quantize; SchemeError: a group size that does not divide, naming every such layer; or what no file
    can hold; CheckpointError: weights the model needs are not in the checkpoint, or no floating point numbers of its
    shapes."""
    _check_present(skeleton, files)
    for stage in recipe.stages:
        recipe = _fit(recipe, stage, lambda each: _plan(skeleton, files, each, scale_dtype).bytes_after)
    return _plan(skeleton, files, recipe, scale_dtype)


def _fit(recipe: Recipe, stage: Stage, planned_bytes: Callable[[Recipe], int]) -> Recipe:
    """Returns the recipe with one of its stages fitted to the size of the model. Raises RecipeError."""

    def among(other: Stage) -> Recipe:
        return replace(recipe, stages=tuple(other if each is stage else each for each in recipe.stages))

    return among(stage.fitted(lambda other: planned_bytes(among(other))))


def _plan(skeleton: Skeleton, files: TensorFiles, recipe: Recipe, scale_dtype: str) -> Plan:
    linears = {name: (each.out_features, each.in_features) for name, each in skeleton.all_linears().items()}
    ends, routers = find_embed_and_head(skeleton, files), skeleton.routers
    layer_plans, reasons = assign(recipe.tensor_stages, linears, ends, routers)
    matrices = linears | {name: end.shape for name, end in ends.items() if end.shape}
    check_groups(layer_plans, matrices)
    _check_stored(layer_plans, matrices)
    carried = skeleton.carried(files.names())
    reasons |= {_module(name): OTHER_PART if name in files.other_parts else CARRIED for name in carried}
    reasons |= dict.fromkeys(routers, ROUTER)
    rows = _Rows(skeleton, files, linears, layer_plans, reasons, scale_dtype)
    smoothing_mappings, notes = usable_mappings(skeleton, layer_plans)
    notes += sibling_notes(skeleton, layer_plans) + class_notes(skeleton, layer_plans) + scheme_notes(layer_plans)
    notes += loader_notes(files, layer_plans)
    notes += carried_notes(files, carried, skeleton.num_blocks)
    planned = tuple(map(rows.row, files.names()))
    context_length = getattr(skeleton.model.config, "max_position_embeddings", None)
    notes += [note for stage in recipe.stages for note in stage.notes(planned, context_length)]
    notes = [*dict.fromkeys([*notes, *larger_notes(planned)])]
    return Plan(planned, tuple(notes), smoothing_mappings, scale_dtype)


@dataclass(frozen=True, slots=True)
class _Rows:
    """One row per stored tensor."""

    skeleton: Skeleton
    files: TensorFiles
    linears: Shapes
    layer_plans: Mapping[str, LayerPlan]
    reasons: Mapping[str, str]
    scale_dtype: str

    def row(self, name: str) -> PlanRow:
        shape, before = self.files.shape(name), self.files.tensor_nbytes(name)
        module = _module(name)
        layer_plan = self.layer_plans.get(module) if name.endswith(".weight") else None
        if layer_plan is not None and layer_plan.scheme is not None:
            after = packed_bytes(layer_plan, shape, self.scale_dtype)
            return PlanRow(name, shape, layer_plan, "", before, after)
        if layer_plan is not None:
            after = math.prod(shape) * self.files.dtype(name).itemsize
            return PlanRow(name, shape, layer_plan, "pruned without a pattern: zeros are stored", before, after)
        if module == self.skeleton.architecture.head and self.skeleton.ties_head:
            return PlanRow(name, shape, None, "tied to the token embedding: not stored twice", before, 0)
        kept = stored_scheme(self.files, name)
        after = before if kept else math.prod(shape) * self.files.dtype(name).itemsize
        return PlanRow(name, shape, None, self._reason(name, module, shape), before, after, kept)

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


def _module(tensor: str) -> str:
    """Return the name of a weight's module; that of another tensor as it is."""
    return tensor.removesuffix(".weight")


def scale_bits(dtype: str) -> int:
    """Return the bits of a number of the model's dtype, by name."""
    return {"float64": 64, "float32": 32}.get(dtype, 16)


def packed_bytes(layer_plan: LayerPlan, shape: tuple[int, ...], scale_dtype: str) -> int:
    """Return the stored bytes of a weight with a scheme. For ranks that are allocated later it is the weight's share of
    the budget, all of which is spent."""
    scheme, factoring = layer_plan.scheme, layer_plan.factoring
    if scheme is None:
        raise ValueError("a weight without a scheme is not packed")
    bits: float = scheme.stored_bits(shape[0], shape[1], scale_bits(scale_dtype))
    if factoring and factoring.is_shared and scheme.rank:
        bits *= factoring.keep_ratio * math.prod(shape) / (scheme.rank * sum(shape))
    return math.ceil(bits / 8) + shape_bytes(scheme)


def _check_stored(layer_plans: Mapping[str, LayerPlan], linears: Shapes) -> None:
    """Raises SchemeError for a scheme that could not be written in the end."""
    for name, layer_plan in layer_plans.items():
        if layer_plan.scheme is not None:
            with about(name):
                COMPRESS_RUNTIME.check(layer_plan.scheme, linears[name])


def _check_present(skeleton: Skeleton, files: TensorFiles) -> None:
    tied = f"{skeleton.architecture.head}.weight" if skeleton.ties_head else ""
    missing = [name for name, _ in skeleton.model.named_parameters() if name not in files and name != tied]
    stored = _stored_blocks(skeleton, files)
    if missing and 0 < stored < skeleton.num_blocks:
        raise CheckpointError(
            f"{len(missing)} tensors of the model are not in {files.path}, {missing[0]} first: config.json says "
            f"{skeleton.num_blocks} layers, the files hold {stored}",
            "Use the config.json that belongs to these weights, or download the missing files",
        )
    model_type = skeleton.model.config.model_type
    if made := next((name for name in missing if is_made(name, model_type)), ""):
        raise CheckpointError(
            f"model type {model_type!r} is not compressed: its files hold {made} in another form, which transformers "
            "converts when it loads a model and nothing here does",
            "Serve it uncompressed, with transformers",
        )
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the model are not in {files.path} under the name transformers gives them, "
            f"e.g. {missing[0]} (there is e.g. {files.names()[0]})",
            "Check config.json, or save the model again with save_pretrained of a recent transformers",
        )
    for name, parameter in skeleton.model.named_parameters():
        if name not in files:
            continue
        check_shape(files, name, tuple(parameter.shape))
        if not files.dtype(name).is_floating_point:
            kind = str(files.dtype(name)).removeprefix("torch.")
            raise CheckpointError(f"{name} of {files.path} holds {kind}, not weights", "Start from the dense model")


def _stored_blocks(skeleton: Skeleton, files: TensorFiles) -> int:
    """Return how many of the model's blocks have any tensor in the files."""
    prefix = f"{skeleton.architecture.blocks}."
    found = {name.removeprefix(prefix).partition(".")[0] for name in files.names() if name.startswith(prefix)}
    return sum(str(index) in found for index in range(skeleton.num_blocks))


def check_shape(files: TensorFiles, name: str, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError for a tensor that is of another shape than the model's."""
    if files.shape(name) != shape:
        raise CheckpointError(
            f"{name} has shape {list(files.shape(name))} in {files.path}, but config.json asks for {list(shape)}",
            "Use the config.json that belongs to these weights",
        )
