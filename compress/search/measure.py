"""Sensitivities: the divergence that each unit alone causes in each form while all else is dense.

Divergence is nearly quadratic in small changes of the weights, and the changes that rounding makes in different layers
are nearly uncorrelated, so what single layers cause adds up to nearly what they cause together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from calibration.statistics import InputStatistics
from compress.checkpoint.version import tool_version
from compress.pipeline.blocks import LoadedBlock, read_block
from compress.pipeline.capture import BlockInputs, capture_inputs, run_all
from compress.pipeline.observe import Need, observe
from compress.pipeline.progress import RunDisplay
from compress.search.changed import ChangedUnit
from compress.search.form import Form
from compress.search.resident import ResidentModel
from compress.search.sensitivities import Sensitivities
from compress.search.survey import Survey
from compress.search.units import EMBEDDING, Unit

Wanted = Mapping[Unit, Sequence[Form]]
Found = Callable[[Unit, Form, float], None]


def identity(survey: Survey) -> dict[str, Any]:
    """What sensitivities depend on."""
    prepared = survey.prepared
    files = [file.path for file in prepared.files.files]
    return {
        "source": prepared.request.source,
        "weights": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
        "texts": prepared.sequences.token_sha256 if prepared.sequences else None,
        "measured": len(survey.measured),
        "method": survey.request.method,
        "device": prepared.device.type,
        "dtype": str(prepared.dtype).removeprefix("torch."),
        "tool": tool_version(),
    }


@torch.no_grad()
def measure(survey: Survey, known: Sensitivities, display: RunDisplay) -> None:
    """Measures what is not known yet, unit by unit in the order of the model.

    Raises:
        CheckpointError: the model does not fit in memory, or a tensor of it is missing or misshapen.
        NumericsError: NaN or infinity on the way.
    """
    wanted = {unit: [each for each in menu if known.get(unit, each) is None] for unit, menu in survey.menus.items()}
    wanted = {unit: forms for unit, forms in wanted.items() if forms}
    if not wanted:
        return
    survey.require_memory()
    display.step("loading the model")
    meter = _Meter.open(survey)

    def found(unit: Unit, form: Form, divergence: float) -> None:
        known.add(unit, form, divergence)
        display.finish(f"{unit.name} {form}: KL {divergence:.6f}")

    for index in range(EMBEDDING, 1 + max(unit.block for unit in wanted)):
        inside = {unit: forms for unit, forms in wanted.items() if unit.block == index}
        if index not in range(len(meter.model.blocks)):
            for unit, forms in inside.items():
                meter.measure_end(unit, forms, found)
            continue
        if inside:
            display.step(f"statistics of block {index}")
            meter.measure(index, inside, found)
        meter.advance(index)


@dataclass
class _Meter:
    """The dense model with both texts on their way through it.

    Attributes:
        calibration: what rounding is calibrated on.
        model: holds what divergence is measured on.
    """

    survey: Survey
    calibration: BlockInputs
    model: ResidentModel

    @classmethod
    def open(cls, survey: Survey) -> _Meter:
        prepared = survey.prepared
        place = prepared.device, prepared.dtype
        # One sequence at a time, and what it takes stays in the processor's cache; a GPU wants more to do.
        small = 1 if prepared.device.type == "cpu" else prepared.micro_batch
        calibration, measured = (
            capture_inputs(prepared.skeleton, prepared.files, tokens, micro_batch, *place)
            for tokens, micro_batch in ((survey.calibration, prepared.micro_batch), (survey.measured, small))
        )
        model = ResidentModel(prepared.skeleton, prepared.files, measured, survey.measured, *place)
        return cls(survey, calibration, model)

    def measure(self, index: int, wanted: Wanted, found: Found) -> None:
        """All that is wanted of one block."""
        prepared = self.survey.prepared
        name = prepared.skeleton.block_name(index)
        inside = {module.removeprefix(f"{name}.") for unit in wanted for module in unit.modules}
        block = read_block(prepared.skeleton, prepared.files, index, inside, prepared.device)
        block.module = self.model.blocks[index]
        statistics = self._statistics(block, index) if self.survey.request.method != "rtn" else {}
        for unit, forms in wanted.items():
            leaves = {module: module.removeprefix(f"{name}.") for module in unit.modules}
            weights = {module: block.weights[leaf] for module, leaf in leaves.items()}
            # Linears of one unit share their input.
            changed = ChangedUnit(weights, self._scale_dtype, statistics.get(leaves[unit.name]))
            for form in forms:
                for module, assignment in self.survey.assignments(unit, form).items():
                    block.set_weight(leaves[module], changed.values(module, assignment))
                found(unit, form, 0.0 if form.is_dense else self.model.divergence(index))
            for module, leaf in leaves.items():
                block.set_weight(leaf, weights[module])

    def measure_end(self, unit: Unit, forms: Sequence[Form], found: Found) -> None:
        """All that is wanted of the embedding or of the head."""
        prepared, (module,) = self.survey.prepared, unit.modules
        parameter = self.model.weight(module)
        weight = prepared.files.tensor(f"{module}.weight").to(parameter.device, torch.float32)
        seen = None
        if self.survey.request.method_of(unit) != "rtn":
            seen = InputStatistics(weight.shape[1], module, device=prepared.device)
            self.model.observe_head(self.calibration.hidden.split(prepared.micro_batch), seen.update)
        changed = ChangedUnit({module: weight}, self._scale_dtype, seen)
        for form in forms:
            for assignment in self.survey.assignments(unit, form).values():
                parameter.data = changed.values(module, assignment)
            found(unit, form, 0.0 if form.is_dense else self.model.divergence(unit.block))
        parameter.data = weight

    @property
    def _scale_dtype(self) -> torch.dtype:
        return getattr(torch, self.survey.prepared.plan.scale_dtype)

    def _statistics(self, block: LoadedBlock, index: int) -> dict[str, InputStatistics]:
        needs = {leaf: Need(hessian=True) for leaf in block.weights}
        return observe(block, self.calibration, index, needs, self.survey.prepared.device).statistics

    def advance(self, index: int) -> None:
        """Moves both texts past a block."""
        name = self.survey.prepared.skeleton.block_name(index)
        device = self.survey.prepared.device
        self.calibration.hidden = run_all(self.model.blocks[index], name, self.calibration, index, device)
        self.model.advance(index)
