"""Plan of a search: candidates of every layer group, sizes, time and memory, before measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from compress.checkpoint.formats import format_for
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.readers import check_loads, measured_engines
from compress.common.errors import DataError, RecipeError, SchemeError
from compress.common.speed import product_speed
from compress.make_plan import assign, find_embed_and_head, packed_bytes
from compress.methods.low_rank import ALIGNMENT, largest_rank
from compress.pipeline.prepare import RunContext, RunRequest, prepare
from compress.plan import LayerPlan, shape_bytes
from compress.search.space import EMBEDDING, Candidate, Goal, LayerGroup, SearchRequest, layer_groups


def assignments_of(group: LayerGroup, candidate: Candidate, method: str) -> dict[str, LayerPlan]:
    """Returns the layer plan of each linear of a group by full name; empty if it stays dense. Raises SchemeError: the
    candidate does not fit: groups or pattern do not divide the columns, or factors would not be smaller."""
    if candidate.factorizing and not all(largest_rank(*shape, ALIGNMENT) for shape in group.shapes):
        raise SchemeError(f"factors of {group.name} would not be smaller", "Leave low rank out")
    if candidate.is_dense:
        return {}
    shapes = dict(zip(group.modules, group.shapes, strict=True))
    layer_plans, _ = assign(candidate.stages(method, group.modules), shapes, {})
    for module, each in layer_plans.items():
        if each.scheme is not None:
            COMPRESS_RUNTIME.check(each.scheme, shapes[module])
    return layer_plans


def candidates_for(
    group: LayerGroup, offered: Sequence[Candidate], search: SearchRequest, config: Mapping[str, Any]
) -> list[Candidate]:
    """Returns the candidates that fit a group and that the engine of the search loads in a model of `config`. Raises
    SchemeError, with the reason of the first one, if none does."""
    fitting, refusals = [], list[SchemeError]()
    for candidate in offered:
        try:
            layer_plans = assignments_of(group, candidate, search.method_of(group))
            schemes = {module: each.scheme for module, each in layer_plans.items() if each.scheme is not None}
            if search.engine and schemes:
                check_loads(search.engine, format_for(schemes).name, config, {*schemes.values()})
            fitting.append(candidate)
        except SchemeError as error:
            refusals.append(error)
    if not fitting:
        reason = refusals[0].problem if refusals else "embedding and head are only rounded to integers"
        raise SchemeError(f"no candidate fits {group.name}: {reason}", "Add w8 or w4 to --candidates")
    return fitting


# Bytes of a tensor's entry in the header of a weight file, without its name.
_ENTRY_BYTES = 128


def _entries(candidate: Candidate) -> int:
    """Counts tensors: values, or codes, scales, shapes and zero points; indices; twice for factors."""
    tensors = 1 if candidate.scheme is None else 3 if candidate.scheme.symmetric else 4
    return (tensors + bool(candidate.pattern)) * (2 if candidate.factorizing else 1)


def _shape_bytes(layer_plans: Mapping[str, LayerPlan]) -> int:
    """Returns the bytes of the shape tensors of packed weights."""
    return sum(shape_bytes(each.scheme) for each in layer_plans.values() if each.scheme)


_FLOAT32 = 4


@dataclass(frozen=True)
class Survey:
    """Search with all inputs resolved.

    Attributes:
        run: model, output folder and device; its recipe is not used.
        context: run of the same layers and texts with a probing recipe.
        calibration, measured: int64 `[N, L]`, tokens for rounding and for measuring divergence.
    """

    request: SearchRequest
    run: RunRequest
    context: RunContext
    candidates: dict[LayerGroup, list[Candidate]]
    calibration: Tensor
    measured: Tensor

    @cached_property
    def fixed_bytes(self) -> int:
        """Upper bound on the bytes of the weight files outside the searched groups: other tensors, headers, and shape
        tensors of packed weights."""
        rows = self.context.plan.rows
        searched = {f"{module}.weight" for group in self.candidates for module in group.modules}
        total = sum(row.bytes_after for row in rows if row.tensor not in searched)
        total += sum(_ENTRY_BYTES + len(row.tensor) for row in rows if row.bytes_after)
        for group, offered in self.candidates.items():
            more = max(map(_entries, offered)) - 1
            total += sum(more * (_ENTRY_BYTES + len(module)) for module in group.modules)
            total += max(_shape_bytes(self.layer_plans(group, candidate)) for candidate in offered)
        return total

    @property
    def measurements(self) -> int:
        return sum(map(len, self.candidates.values()))

    def layer_plans(self, group: LayerGroup, candidate: Candidate) -> dict[str, LayerPlan]:
        """Returns the layer plans of a group; empty if it stays dense."""
        return assignments_of(group, candidate, self.request.method_of(group))

    def cost(self, group: LayerGroup, candidate: Candidate) -> int:
        """Returns the bytes of a group's weights: values, indices, factors, scales and zero points."""
        plan, layer_plans = self.context.plan, self.layer_plans(group, candidate)
        if candidate.is_dense:
            dense = {f"{module}.weight" for module in group.modules}
            return sum(row.bytes_before for row in plan.rows if row.tensor in dense)
        shapes = zip(group.modules, group.shapes, strict=True)
        packed = sum(packed_bytes(layer_plans[module], shape, plan.scale_dtype) for module, shape in shapes)
        return packed - _shape_bytes(layer_plans)

    @property
    def smallest(self) -> int:
        """Bytes of all groups with their smallest candidates."""
        return self._total(min)

    @property
    def largest(self) -> int:
        return self._total(max)

    def _total(self, pick: Callable[[Iterable[int]], int]) -> int:
        return sum(pick(self.cost(group, each) for each in offered) for group, offered in self.candidates.items())

    def bits_per_weight(self, cost: int) -> float:
        """Converts the bytes of all groups to bits per weight."""
        return 8 * cost / sum(group.weights for group in self.candidates)

    def budget(self, goal: Goal) -> int:
        """Returns the byte budget of all groups. Raises RecipeError, with the least size, if it cannot be reached."""
        if goal.size is not None:
            budget = goal.size - self.fixed_bytes
        elif goal.bits_per_weight is not None:
            weights = sum(group.weights for group in self.candidates)
            budget = math.floor(goal.bits_per_weight * weights / 8)
        else:
            raise ValueError("a goal of quality has no budget")
        if budget < self.smallest:
            raise RecipeError(
                f"{goal} cannot be reached: the smallest candidates take {self.bits_per_weight(self.smallest):.3f} "
                f"bits per weight, {(self.smallest + self.fixed_bytes) / 1e6:,.2f} MB in all",
                "Allow this size, or add a smaller candidate to --candidates, e.g. w2g128",
            )
        return budget

    @property
    def operations(self) -> float:
        """Floating point operations of all measurements: blocks from the changed one, and the head."""
        blocks = [sum(each.numel() for each in block.parameters()) for block in self.context.skeleton.blocks]
        config = self.context.skeleton.model.config
        head: int = config.vocab_size * config.hidden_size
        passes = sum(
            len(offered) * (sum(blocks[max(group.block, 0) :]) + head) for group, offered in self.candidates.items()
        )
        calibrating = 2 * sum(blocks) * self.calibration.numel()
        return 2.0 * (passes * self.measured.numel() + calibrating)

    def seconds(self) -> float:
        """Returns a lower bound on the time, from the measured speed of matrix products."""
        return self.operations / product_speed(self.context.device, self.context.dtype)

    @property
    def peak_memory(self) -> int:
        """Peak bytes: the model, its probabilities for the measured text, and one block's statistics."""
        skeleton, item = self.context.skeleton, self.context.dtype.itemsize
        blocks = sum(each.numel() for block in skeleton.blocks for each in block.parameters())
        everything = sum(math.prod(row.shape) for row in self.context.plan.rows if row.bytes_after)
        reference: int = 2 * _FLOAT32 * self.measured.numel() * skeleton.model.config.vocab_size
        return self.context.peak_memory + blocks * item + (everything - blocks) * _FLOAT32 + reference

    def require_memory(self) -> None:
        """Raises CheckpointError if the model does not fit in memory."""
        from compress.common.device import require_memory

        remedy = "Use --dtype bfloat16 or fewer --measured sequences, or a machine with more memory"
        require_memory("measuring holds the whole model", self.peak_memory, self.context.device, remedy)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of `--dry-run --json`."""
        return {
            "model": str(self.context.request.model),
            "out": str(self.context.request.out),
            "search": self.request.to_dict(),
            "units": [
                {
                    "modules": list(group.modules),
                    "bytes": {str(candidate): self.cost(group, candidate) for candidate in offered},
                }
                for group, offered in self.candidates.items()
            ],
            "measurements": self.measurements,
            "measured_tokens": self.measured.numel(),
            "operations": self.operations,
            "seconds": self.seconds(),
            "peak_memory_bytes": self.peak_memory,
            "fixed_bytes": self.fixed_bytes,
            "smallest_bytes": self.smallest + self.fixed_bytes,
            "largest_bytes": self.largest + self.fixed_bytes,
            "notes": list(self.context.notes),
        }


def survey(search: SearchRequest, run: RunRequest, dry_run: bool = False) -> Survey:
    """Opens and validates all inputs; reads no weights. Raises ToolkitError: as `compress.pipeline.prepare.prepare`; an
    unreachable size; or insufficient text. `run`: see `Survey`. With dtype `auto`, sensitivities are measured in
    float32, because those of wide integers are below the precision of 16-bit floats."""
    if search.engine not in (None, *measured_engines()):
        raise RecipeError.unknown("engine", search.engine, measured_engines(), "Measured")
    dtype = "float32" if run.dtype == "auto" else run.dtype
    context = prepare(replace(run, recipe=search.probe(), dtype=dtype), dry_run)
    skeleton = context.skeleton
    blocks = [skeleton.block_name(index) for index in range(skeleton.num_blocks)]
    searched = context.plan.layer_plans
    linears = {name: linear for name, linear in skeleton.all_linears().items() if name in searched}
    shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    groups = [*layer_groups(blocks, shapes, skeleton.architecture), *(_ends(context) if search.ends else ())]
    candidates = {
        group: candidates_for(group, _offered(group, context, search), search, context.config) for group in groups
    }
    found = Survey(search, run, context, candidates, *_split(context, search))
    if search.goal.kl is None:
        found.budget(search.goal)
    return found


def _split(context: RunContext, search: SearchRequest) -> tuple[Tensor, Tensor]:
    """Splits sequences for calibration and measurement; both shrink if the text is short."""
    if context.sequences is None:
        raise ValueError("the probe of a search is calibrated")
    tokens = context.sequences.tokens
    if len(tokens) < 2:
        raise DataError(
            f"{context.sequences.source} gives {len(tokens)} sequence, but a search needs sequences for calibration "
            "and for measurement",
            "Use more text, or a shorter --max-seq-length",
        )
    wanted = search.calibration.samples + search.measured
    measured = max(1, search.measured * len(tokens) // wanted)
    return tokens[:-measured], tokens[-measured:]


def _ends(context: RunContext) -> list[LayerGroup]:
    """Returns groups for the token embedding and an untied head. Raises RecipeError if neither can be quantized."""
    skeleton = context.skeleton
    ends = find_embed_and_head(skeleton, context.files)
    groups = [
        LayerGroup(EMBEDDING if name == skeleton.architecture.embedding else skeleton.num_blocks, (name,), (end.shape,))
        for name, end in ends.items()
        if end.shape is not None
    ]
    if not groups:
        raise RecipeError("neither embedding nor head of this model can be quantized", "Leave --include-embeddings out")
    return groups


def _offered(group: LayerGroup, context: RunContext, search: SearchRequest) -> list[Candidate]:
    """Returns the requested candidates; only rounding and dense for embedding and head."""
    inside = 0 <= group.block < context.skeleton.num_blocks
    return [candidate for candidate in search.candidates if inside or candidate.is_plain or candidate.is_dense]
