"""What a search will measure, and what that takes: everything known before it begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats import compress_runtime
from compress.common.errors import CheckpointError, DataError, RecipeError, SchemeError
from compress.make_plan import assign, find_ends, packed_bytes
from compress.methods.low_rank import ALIGNMENT, largest_rank
from compress.pipeline.prepare import RunContext, RunRequest, prepare
from compress.plan import LayerPlan, Plan, shape_bytes
from compress.search.space import EMBEDDING, Form, Goal, SearchRequest, Unit, units_of


def assignments_of(unit: Unit, form: Form, method: str) -> dict[str, LayerPlan]:
    """What each linear of a unit gets, by full name; empty where it stays dense.

    Args:
        method: how integers are rounded.

    Raises:
        SchemeError: the form does not fit: groups or pattern do not divide, or factors would be no smaller.
    """
    if form.factorizing and not all(largest_rank(*shape, ALIGNMENT) for shape in unit.shapes):
        raise SchemeError(f"factors of {unit.name} would be no smaller", "Leave low rank out")
    if form.is_dense:
        return {}
    shapes = dict(zip(unit.modules, unit.shapes, strict=True))
    assignments, _ = assign(form.stages(method, unit.modules), shapes, {})
    for module, each in assignments.items():
        if each.scheme is not None:
            compress_runtime.check(each.scheme, shapes[module])
    return assignments


def menu_for(unit: Unit, menu: Sequence[Form], method: str) -> list[Form]:
    """The forms that fit a unit. Raises SchemeError when none does."""
    fitting = [form for form in menu if _fits(unit, form, method)]
    if not fitting:
        widths = ", ".join(str(columns) for _, columns in unit.shapes)
        raise SchemeError(
            f"nothing on the menu fits the {widths} inputs of {unit.name}", "Add w8 or w4 to --candidates"
        )
    return fitting


def _fits(unit: Unit, form: Form, method: str) -> bool:
    try:
        assignments_of(unit, form, method)
    except SchemeError:
        return False
    return True


# A tensor's entry in the header of a weight file beside its name.
_ENTRY_BYTES = 128


def unit_bytes(plan: Plan, unit: Unit, form: Form, method: str) -> int:
    """Of a unit's weights: values and their places, both factors, scales, zero points.

    Args:
        plan: of the same model, whatever its recipe.
        method: how integers are rounded.
    """
    if form.is_dense:
        dense = {f"{module}.weight" for module in unit.modules}
        return sum(row.bytes_before for row in plan.rows if row.tensor in dense)
    assignments = assignments_of(unit, form, method)
    shapes = zip(unit.modules, unit.shapes, strict=True)
    packed = sum(packed_bytes(assignments[module], shape, plan.scale_dtype) for module, shape in shapes)
    return packed - _shape_bytes(assignments)


def fixed_bytes(plan: Plan, menus: Mapping[Unit, Sequence[Form]], method_of: Callable[[Unit], str]) -> int:
    """At most how many all else takes: other tensors, headers, and the shapes beside packed weights."""
    searched = {f"{module}.weight" for unit in menus for module in unit.modules}
    others = sum(row.bytes_after for row in plan.rows if row.tensor not in searched)
    header = sum(_ENTRY_BYTES + len(row.tensor) for row in plan.rows if row.bytes_after)
    shapes = 0
    for unit, menu in menus.items():
        more = max(map(_entries, menu)) - 1
        header += sum(more * (_ENTRY_BYTES + len(module)) for module in unit.modules)
        shapes += max(_shape_bytes(assignments_of(unit, form, method_of(unit))) for form in menu)
    return others + header + shapes


def _entries(form: Form) -> int:
    """Tensors in the file: values, or codes, scales, shapes and zero points; places beside them; two factors of all."""
    tensors = 1 if form.scheme is None else 3 if form.scheme.symmetric else 4
    return (tensors + bool(form.pattern)) * (2 if form.factorizing else 1)


def _shape_bytes(assignments: Mapping[str, LayerPlan]) -> int:
    """Of the shapes beside packed weights, which are no weights."""
    return sum(shape_bytes(each.scheme) for each in assignments.values() if each.scheme)


_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Survey:
    """A search with everything resolved.

    Attributes:
        request: what is asked for.
        run: the model, the folder to write and how to compute; its recipe means nothing.
        prepared: a run of the same layers and texts, whose recipe is only a probe.
        menus: what each unit may become.
        calibration, measured: int64 `[N, L]`, what rounding and what divergence is measured on.
        fixed_bytes: of the weight files, whatever is chosen; rounded up.
    """

    request: SearchRequest
    run: RunRequest
    prepared: RunContext
    menus: dict[Unit, list[Form]]
    calibration: Tensor
    measured: Tensor
    fixed_bytes: int

    @property
    def measurements(self) -> int:
        return sum(map(len, self.menus.values()))

    def assignments(self, unit: Unit, form: Form) -> dict[str, LayerPlan]:
        """What a form does to each linear of a unit; empty where they stay dense."""
        return assignments_of(unit, form, self.request.method_of(unit))

    def cost(self, unit: Unit, form: Form) -> int:
        """Bytes of a unit's weights in the file."""
        return unit_bytes(self.prepared.plan, unit, form, self.request.method_of(unit))

    @property
    def smallest(self) -> int:
        """Bytes of all units where each is as small as it can be."""
        return sum(min(self.cost(unit, form) for form in menu) for unit, menu in self.menus.items())

    @property
    def largest(self) -> int:
        return sum(max(self.cost(unit, form) for form in menu) for unit, menu in self.menus.items())

    def bits_per_weight(self, cost: int) -> float:
        """Of units that take `cost` bytes in all."""
        return 8 * cost / sum(unit.weights for unit in self.menus)

    def budget(self, goal: Goal) -> int:
        """Bytes that the units may take. Raises RecipeError for a size that nothing can reach; says what can be."""
        if goal.size is not None:
            budget = goal.size - self.fixed_bytes
        elif goal.bits_per_weight is not None:
            weights = sum(unit.weights for unit in self.menus)
            budget = math.floor(goal.bits_per_weight * weights / 8)
        else:
            raise ValueError("a goal of quality has no budget")
        if budget < self.smallest:
            raise RecipeError(
                f"{goal} cannot be reached: the menu's smallest forms take {self.bits_per_weight(self.smallest):.3f} "
                f"bits per weight, {(self.smallest + self.fixed_bytes) / 1e6:,.2f} MB in all",
                "Allow that much, or add something smaller to --candidates, e.g. w2g128",
            )
        return budget

    @property
    def operations(self) -> float:
        """Floating point operations of all measurements: blocks from the changed one on, and the head."""
        blocks = [sum(each.numel() for each in block.parameters()) for block in self.prepared.skeleton.blocks]
        config = self.prepared.skeleton.model.config
        head = config.vocab_size * config.hidden_size
        passes = sum(len(menu) * (sum(blocks[max(unit.block, 0) :]) + head) for unit, menu in self.menus.items())
        calibrating = 2 * sum(blocks) * self.calibration.numel()
        return 2.0 * (passes * self.measured.numel() + calibrating)

    def seconds(self) -> float:
        """How long that takes at the speed at which the device multiplies now: an estimate from below."""
        return self.operations / _speed(self.prepared.device, self.prepared.dtype)

    @property
    def peak_memory(self) -> int:
        """Bytes at the worst moment: the model, what it said of the measured text, and one block's statistics."""
        skeleton, item = self.prepared.skeleton, self.prepared.dtype.itemsize
        blocks = sum(each.numel() for block in skeleton.blocks for each in block.parameters())
        everything = sum(math.prod(row.shape) for row in self.prepared.plan.rows if row.bytes_after)
        reference = 2 * _FLOAT32 * self.measured.numel() * skeleton.model.config.vocab_size
        return self.prepared.peak_memory + blocks * item + (everything - blocks) * _FLOAT32 + reference

    def require_memory(self) -> None:
        """Raises CheckpointError where the model does not fit: better than a search that the system kills."""
        from compress.common.device import available_bytes, format_bytes

        available = available_bytes(self.prepared.device)
        if self.peak_memory > available:
            raise CheckpointError(
                f"measuring holds the whole model, about {format_bytes(self.peak_memory)}, and "
                f"{format_bytes(available)} are free on {self.prepared.device}",
                "Use --dtype bfloat16 or fewer --measured sequences, or a machine with more memory",
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: what `--dry-run --json` prints."""
        return {
            "model": str(self.prepared.request.model),
            "out": str(self.prepared.request.out),
            "search": self.request.to_dict(),
            "units": [
                {"modules": list(unit.modules), "bytes": {str(form): self.cost(unit, form) for form in menu}}
                for unit, menu in self.menus.items()
            ],
            "measurements": self.measurements,
            "measured_tokens": self.measured.numel(),
            "operations": self.operations,
            "seconds": self.seconds(),
            "peak_memory_bytes": self.peak_memory,
            "fixed_bytes": self.fixed_bytes,
            "smallest_bytes": self.smallest + self.fixed_bytes,
            "largest_bytes": self.largest + self.fixed_bytes,
        }


def survey(search: SearchRequest, run: RunRequest, dry_run: bool = False) -> Survey:
    """Opens and checks everything; reads no weights.

    Args:
        run: see `Survey`. Where its dtype is `auto`, sensitivities are measured in float32: those of wide integers are
            smaller than what half precision rounds away.

    Raises:
        ToolkitError: as `compress.pipeline.prepare.prepare`; a size that cannot be reached; too little text.
    """
    dtype = "float32" if run.dtype == "auto" else run.dtype
    prepared = prepare(replace(run, recipe=search.probe(), dtype=dtype), dry_run)
    skeleton = prepared.skeleton
    blocks = [skeleton.block_name(index) for index in range(skeleton.num_blocks)]
    searched = prepared.plan.assignments
    shapes = {
        f"{name}.{leaf}": (linear.out_features, linear.in_features)
        for name, block in zip(blocks, skeleton.blocks, strict=True)
        for leaf, linear in skeleton.linears(block).items()
        if f"{name}.{leaf}" in searched
    }
    units = [*units_of(blocks, shapes, skeleton.architecture), *(_ends(prepared) if search.ends else ())]
    menus = {unit: menu_for(unit, _offered(unit, prepared, search), search.method_of(unit)) for unit in units}
    calibration, measured = _split(prepared, search)
    fixed = fixed_bytes(prepared.plan, menus, search.method_of)
    found = Survey(search, run, prepared, menus, calibration, measured, fixed)
    if search.goal.kl is None:
        found.budget(search.goal)
    return found


def _split(prepared: RunContext, search: SearchRequest) -> tuple[Tensor, Tensor]:
    """Sequences to calibrate on, and others to measure on. Where the text is short both get less."""
    if prepared.sequences is None:
        raise ValueError("the probe of a search is calibrated")
    tokens = prepared.sequences.tokens
    if len(tokens) < 2:
        raise DataError(
            f"{prepared.sequences.source} gives {len(tokens)} sequence, and a search needs some to calibrate on and "
            "some to measure on",
            "Give more text, or use a shorter --max-seq-length",
        )
    wanted = search.calibration.samples + search.measured
    measured = max(1, search.measured * len(tokens) // wanted)
    return tokens[:-measured], tokens[-measured:]


def _ends(prepared: RunContext) -> list[Unit]:
    """The token embedding and, where it has a matrix of its own, the head. Raises RecipeError where neither can be
    quantized."""
    skeleton = prepared.skeleton
    ends = find_ends(skeleton, prepared.files)
    units = [
        Unit(EMBEDDING if name == skeleton.architecture.embedding else skeleton.num_blocks, (name,), (end.shape,))
        for name, end in ends.items()
        if end.shape is not None
    ]
    if not units:
        raise RecipeError("neither embedding nor head of this model can be quantized", "Leave --include-embeddings out")
    return units


def _offered(unit: Unit, prepared: RunContext, search: SearchRequest) -> list[Form]:
    """Of embedding and head every row is rounded, or they stay dense."""
    inside = 0 <= unit.block < prepared.skeleton.num_blocks
    return [form for form in search.menu if inside or form.is_plain or form.is_dense]


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product."""
    size = 1024 if device.type == "cpu" else 4096
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    float((matrix @ matrix)[0, 0])
    started = time.monotonic()
    float((matrix @ matrix)[0, 0])
    return 2.0 * size**3 / (time.monotonic() - started)
