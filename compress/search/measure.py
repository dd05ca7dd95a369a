"""Sensitivities: the divergence that each unit alone causes in each form while all else is dense.

Divergence is nearly quadratic in small changes of the weights, and the changes that rounding makes in different layers
are nearly uncorrelated, so what single layers cause adds up to nearly what they cause together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from calibration.statistics import InputStatistics
from compress.checkpoint.safetensors import TensorFiles
from compress.common.cli import tool_version
from compress.common.errors import NumericsError
from compress.methods.base import Needs
from compress.methods.shared.hessian import HessianCache
from compress.pipeline.block import LoadedBlock, fill, read_block, read_tensor
from compress.pipeline.capture import BlockInputs, StandIn, capture_inputs, observe, run_all, run_block
from compress.pipeline.compress_layer import LayerCompressor, Ranked, decompose_block, values_of
from compress.pipeline.resume import RunDisplay
from compress.pipeline.skeleton import Skeleton
from compress.plan import LayerPlan
from compress.search.sensitivities import Sensitivities
from compress.search.space import EMBEDDING, Form, Unit
from compress.search.survey import Survey


class _Given(StandIn):
    """Returns what it was given beforehand, and keeps what it was passed: the embedding, where it stands first."""

    output: Tensor | None = None
    passed: Tensor

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor | None:
        self.passed = args[0] if args else kwargs["hidden_states"]
        return self.passed if self.output is None else self.output


class ResidentModel:
    """A model whose blocks run on from stored hidden states, while its own forward does what comes after the blocks.

    Args:
        skeleton: gets real weights; its blocks are taken out and run here.
        measured: the text that divergence is measured on, as it enters the first block.
        tokens: int64 `[N, T]`, the same text.
        device, dtype: where and in which dtype everything computes.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        files: TensorFiles,
        measured: BlockInputs,
        tokens: Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.blocks = list(skeleton.blocks)
        self._skeleton, self._device, self._dtype = skeleton, device, dtype
        self._inputs, self._tokens = measured, tokens.to(device)
        for index, block in enumerate(self.blocks):
            fill(block, skeleton.block_name(index), files, device, dtype)
        _fill_rest(skeleton, files, device)
        given = _take_blocks_out(skeleton)
        self._first, self._last = given[0], given[-1]
        self._reference = [_Reference.of(logits) for logits in self._logits(0)]

    @torch.no_grad()
    def divergence(self, block: int) -> float:
        """Mean KL(dense || now) over all positions, in nats, as the blocks from `block` on are now.

        Those before it must be as they were when `advance` passed them. `EMBEDDING` stands for what comes before all
        blocks, their number for what comes after.

        Raises:
            NumericsError: the output is not finite.
        """
        batches = zip(self._logits(block), self._reference, strict=True)
        total = sum(reference.divergence(logits) for logits, reference in batches)
        if not math.isfinite(total):
            problem = f"the model's output is not finite with a quantized layer in block {block}"
            raise NumericsError(problem, "Use --dtype float32")
        return max(total / self._tokens.numel(), 0.0)

    @torch.no_grad()
    def advance(self, block: int) -> None:
        """Moves the text past `block`: from here on blocks up to it do not run again."""
        name = self._skeleton.block_name(block)
        self._inputs.hidden = run_all(self.blocks[block], name, self._inputs, block, self._device)

    def weight(self, module: str) -> nn.Parameter:
        """The weight of a module outside of the blocks, in float32."""
        return self._skeleton.model.get_submodule(module).get_parameter("weight")

    @torch.no_grad()
    def observe_head(self, hidden: Iterable[Tensor], see: Callable[[Tensor], None]) -> None:
        """Shows what the head multiplies, `[B, T, H]`, for outputs of the last block."""
        head = self._skeleton.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _module, args: see(args[0]))
        try:
            for batch in hidden:
                self._after_blocks(batch.to(self._device), self._tokens[:1].expand(len(batch), -1))
        finally:
            handle.remove()

    @torch.no_grad()
    def _logits(self, first: int) -> Iterator[Tensor]:
        """Logits `[B, T, V]` in float32, micro-batch by micro-batch."""
        states = self._inputs.hidden.split(self._inputs.micro_batch)
        batches = zip(states, self._inputs.calls, self._tokens.split(self._inputs.micro_batch), strict=True)
        begin = max(first, 0)
        for hidden, calls, tokens in batches:
            hidden = self._embedded(tokens) if first == EMBEDDING else hidden.to(self._device)
            for module, call in zip(self.blocks[begin:], calls[begin:], strict=True):
                hidden = run_block(module, hidden, call)
            yield self._after_blocks(hidden, tokens)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """What enters the first block, `[B, T, H]`, as the embedding is now."""
        self._last.output = None
        self._skeleton.model(input_ids=tokens, use_cache=False)
        return self._first.passed.to(self._dtype)

    def _after_blocks(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[B, T, V]` of outputs of the last block."""
        self._last.output = hidden.float()
        return self._skeleton.model(input_ids=tokens, use_cache=False).logits.float()


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the dense model said of some positions: probabilities `[B, T, V]`, and the sum of their logarithms' means.

    Kept as probabilities, a divergence is one product and one logarithm of a sum.
    """

    probabilities: Tensor
    negative_entropy: float

    @classmethod
    def of(cls, logits: Tensor) -> _Reference:
        probabilities = torch.softmax(logits, -1)
        return cls(probabilities, -cls(probabilities, 0.0).divergence(logits))

    def divergence(self, logits: Tensor) -> float:
        """KL to a model with these logits `[B, T, V]`, in nats, summed over positions."""
        cross = logits.logsumexp(-1) - torch.linalg.vecdot(self.probabilities, logits)
        return self.negative_entropy + float(cross.sum(dtype=torch.float64))


def _fill_rest(skeleton: Skeleton, files: TensorFiles, device: torch.device) -> None:
    """Real weights for everything outside of the blocks, in float32: the last layers decide what is measured."""
    model = skeleton.model
    for name, parameter in list(model.named_parameters()):
        if name in files and parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            value = read_tensor(files, name, tuple(parameter.shape)).to(device, torch.float32)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    for module in model.modules():
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, leaf, buffer.to(device))
    if skeleton.ties_head:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _take_blocks_out(skeleton: Skeleton) -> list[_Given]:
    """Puts stand-ins where the blocks were. The output of the last one goes on to the final norm."""
    given = [_Given(block) for block in skeleton.blocks]
    for index, each in enumerate(given):
        skeleton.blocks[index] = each
    return given


@dataclass
class ChangedUnit:
    """Weights of linears that share their input. What several forms need is computed once: the Hessian's factor, and
    the singular values that all ranks of a method are cut from.

    Attributes:
        weights: float32 `[O, I]` by full name.
        model_dtype: dtype in which scales and unquantized values are stored.
        statistics: of the input; None when nothing is known.
    """

    weights: Mapping[str, Tensor]
    model_dtype: torch.dtype
    statistics: InputStatistics | None
    _ranked: dict[tuple[str, str], Ranked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inputs = HessianCache(self.statistics)

    def values(self, module: str, assignment: LayerPlan) -> Tensor:
        """The weight `[O, I]` as the finished checkpoint would multiply by it, float32.

        Raises:
            SchemeError, NumericsError: from the methods.
        """
        weight, ranked = self.weights[module], self._rank(module, assignment)
        work = LayerCompressor(module, weight, assignment, self.model_dtype, self._inputs, ranked)
        return values_of(work.apply()[0])

    def _rank(self, module: str, assignment: LayerPlan) -> Ranked | None:
        if assignment.factoring is None or assignment.scheme is None:
            return None
        key = module, assignment.factoring.method
        if key not in self._ranked:
            seen = {} if self.statistics is None else {module: self.statistics}
            self._ranked[key] = decompose_block(self.weights, {module: assignment}, seen)[module]
        return replace(self._ranked[key], rank=assignment.scheme.rank)


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
        needs = {leaf: Needs(hessian=True) for leaf in block.weights}
        return observe(block, self.calibration, index, needs, self.survey.prepared.device).statistics

    def advance(self, index: int) -> None:
        """Moves both texts past a block."""
        name = self.survey.prepared.skeleton.block_name(index)
        device = self.survey.prepared.device
        self.calibration.hidden = run_all(self.model.blocks[index], name, self.calibration, index, device)
        self.model.advance(index)
