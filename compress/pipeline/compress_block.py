"""Processing of one block: observe, smooth, quantize, measure, and compute the inputs of the next block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from calibration.statistics import InputDifference
from compress.checkpoint.weights.coded import INT, INTEGERS, CodedWeight
from compress.common.workers import Worker, Workers
from compress.methods.base import Needs, QuantizationMethod, TunedBlock
from compress.methods.shared.hessian import HessianCache
from compress.methods.shared.smoothing import SmoothingResult
from compress.models.architecture import SmoothingMapping
from compress.pipeline.block import BlockJob, BlockOutcome, LinearRecord, LoadedBlock, SmoothingRecord
from compress.pipeline.capture import BlockInputs, Calibration, Call, run_all
from compress.pipeline.compress_layer import (
    LayerCompressor,
    Ranked,
    Stored,
    choose_columns,
    decompose_block,
    outlier_columns,
    values_of,
)
from compress.pipeline.observe import Group, Observed, follow_dense, observe
from compress.pipeline.smoothing import (
    ModuleTrace,
    activations_quantized,
    fold_scale,
    head_layout,
    search_scale,
    trace_modules,
    trace_samples,
)
from compress.plan import LayerPlan

Batch = tuple[Tensor, Call, Tensor]
"""Hidden states `[B, L, H]`, the other arguments of the block, and the target output `[B, L, H]`."""


@dataclass
class BlockError:
    """Reconstruction error of one block; implements `compress.methods.base.BlockObjective`.

    Attributes:
        block: block in which everything except the learned weights has its final stored values.
        target: `[N, L, H]` on the host, the output of the dense block on the dense model's inputs.
    """

    block: LoadedBlock
    index: int
    calibration: Calibration
    target: Tensor
    device: torch.device
    seed: int = 0

    def tune(
        self,
        method: QuantizationMethod,
        starts: Mapping[str, tuple[Tensor, CodedWeight]],
        options: Any,
        tick: Callable[[float], None] = lambda _: None,
    ) -> TunedBlock:
        """Learns the weights of the block with a method; see `QuantizationMethod.tune_block`."""
        # Fast GPU kernels accumulate the gradients of attention in any order.
        repeatable = sdpa_kernel(SDPBackend.MATH) if self.device.type == "cuda" else nullcontext()
        with torch.enable_grad(), repeatable:
            return method.tune_block(self, starts, options, tick)

    def batches(self) -> Iterator[Batch]:
        """Yields micro-batches indefinitely, reshuffled after each epoch."""
        # Every block has its own order, which resumed runs reproduce.
        generator = torch.Generator().manual_seed((self.seed + self.index) % 2**63)
        inputs = self.calibration.tuning
        if inputs is None:
            raise ValueError("a block must be tuned, but its inputs were not captured")
        hidden, targets = inputs.hidden.split(inputs.micro_batch), self.target.split(inputs.micro_batch)
        while True:
            for number in torch.randperm(len(hidden), generator=generator).tolist():
                call, target = inputs.calls[number][self.index], targets[number].to(self.device)
                yield hidden[number].to(self.device), call, target

    def size(self, batch: Batch) -> int:
        """Returns the number of sequences per micro-batch."""
        return len(batch[0])

    def error(self, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the sum of squared output errors divided by the mean square of the target."""
        hidden, call, target = batch
        parameters = {f"{name}.weight": weight.to(hidden.dtype) for name, weight in weights.items()}
        output = call.run(lambda *args, **kwargs: functional_call(self.block.module, parameters, args, kwargs), hidden)
        return (output.float() - target.float()).square().sum() / target.float().square().mean()

    @torch.no_grad()
    def judge(self, weights: Mapping[str, Tensor]) -> float:
        """Returns the mean error over the search sequences."""
        search, targets = self.calibration.search, self.target[self.calibration.search_rows]
        parts = zip(search.batches(self.index, self.device), targets.split(search.micro_batch), strict=True)
        total = sum(float(self.error(weights, (*inputs, target.to(self.device)))) for inputs, target in parts)
        return total / targets.numel()


Step = Callable[[str, float], None]
# Start and end of each stage of a block, for the progress bar; actual times differ by method and device.
_PARTS = {
    "statistics": (0.0, 0.3),
    "dense outputs": (0.3, 0.35),
    "smoothing": (0.35, 0.6),
    "rounding": (0.6, 0.8),
    "next inputs": (0.8, 1.0),
}
_PARTS_WHEN_TUNED = {
    "statistics": (0.0, 0.02),
    "dense outputs": (0.02, 0.03),
    "smoothing": (0.03, 0.05),
    "rounding": (0.05, 0.06),
    "tuning": (0.06, 0.98),
    "next inputs": (0.98, 1.0),
}


@torch.no_grad()
def quantize_block(
    block: LoadedBlock,
    job: BlockJob,
    calibration: Calibration,
    workers: Workers,
    step: Step = lambda _what, _share: None,
) -> BlockOutcome:
    """Quantizes a block by its inputs; afterwards the block and its outputs are those of the served model. Raises
    NumericsError: inputs or outputs contain NaN or infinity. `step`: callback with the current stage and the completed
    share of the block."""
    device = workers.device
    part = partial(_part, step, _PARTS_WHEN_TUNED if job.tuned else _PARTS)
    observed = observe(block, calibration.inputs, job.index, _needs(job), workers, part("statistics"))
    in_experts = {name for groups in observed.experts for group in groups for name in group}
    parents = sorted({mapping.parent for mapping in job.smoothing_mappings} - in_experts)
    traces, expected = trace_modules(block, calibration.search, job.index, parents, device)
    differences, reference = _follow_dense(block, job, calibration, observed, workers, part("dense outputs"))
    outcome = BlockOutcome(reference=reference, coverage=observed.coverage)
    folded = _smooth(block, job, observed, traces, outcome, workers, part("smoothing"))
    traces.clear()
    part("rounding")(0)
    begun = _round(block, job, observed, differences, folded, outcome, workers)
    if begun and job.tuned and outcome.reference is not None:
        error = BlockError(block, job.index, calibration, outcome.reference, device, job.seed)
        with activations_quantized(block, job.with_quantized_inputs):
            _tune(job.tuned, error, begun, outcome, part("tuning"))
    kept = outlier_columns(outcome.weights, block.name)
    with activations_quantized(block, job.with_quantized_inputs, outliers=kept):
        outcome.relative_error = _output_error(block, job, calibration.search, expected, device)
        tick = part("next inputs")
        outcome.hidden = run_all(block, calibration.inputs, job.index, workers, tick)
    outcome.dense = {f"{block.name}.{name}": tensor.cpu() for name, tensor in block.dense.items()}
    return outcome


def _part(step: Step, parts: Mapping[str, tuple[float, float]], what: str) -> Callable[[float], None]:
    """Returns progress within one stage, as a share of the whole block."""
    begin, end = parts[what]
    return lambda share: step(what, begin + share * (end - begin))


def _needs(job: BlockJob) -> dict[str, Needs]:
    return {name: plan.needs for name, plan in job.layer_plans.items()}


def _follow_dense(
    block: LoadedBlock,
    job: BlockJob,
    calibration: Calibration,
    observed: Observed,
    workers: Workers,
    tick: Callable[[float], None],
) -> tuple[dict[str, InputDifference], Tensor | None]:
    """Returns the input differences to the dense model, by the first of the linears that share an input, and the output
    `[N, L, H]` of the dense block on the dense model's inputs; empty and None if no method needs them."""
    if calibration.reference is None:
        return {}, None
    asking = {name for name, each in job.layer_plans.items() if each.needs.dense_inputs}
    leaders = [group[0] for group in observed.groups if asking.intersection(group)]
    if leaders:
        return follow_dense(block, calibration.inputs, calibration.reference, job.index, leaders, workers, tick)
    inputs = replace(calibration.inputs, hidden=calibration.reference)
    return {}, run_all(block, inputs, job.index, workers, tick)


def _smooth(
    block: LoadedBlock,
    job: BlockJob,
    observed: Observed,
    traces: dict[str, ModuleTrace],
    outcome: BlockOutcome,
    workers: Workers,
    tick: Callable[[float], None],
) -> dict[str, Tensor]:
    """Searches all smoothing mappings, then folds them. Returns the scale folded into each target's columns."""
    mappings = job.smoothing_mappings
    layouts = {mapping: head_layout(block, mapping, job.head_dim) for mapping in mappings}
    copies = block.copies(workers) if mappings else []
    known = observed.shared(copies, workers) if mappings else []

    def search(worker: Worker, mapping: SmoothingMapping) -> SmoothingResult:
        copied, statistics, parent = copies[worker.number], known[worker.number], mapping.parent
        traced = traces.get(parent)
        trace = traced.on(worker.device) if traced else trace_samples(copied, parent, statistics[parent])
        seen = statistics[mapping.observed or mapping.balance_layers[0]]
        result = search_scale(copied, mapping, trace, seen, job.layer_plans, layouts[mapping])
        return replace(result, scale=result.scale.to(workers.device))

    found: dict[SmoothingMapping, SmoothingResult] = {}
    for mapping, result in zip(mappings, workers.map(search, mappings), strict=True):
        found[mapping] = result
        tick(len(found) / len(mappings))
    folded: dict[str, Tensor] = {}
    for mapping, result in found.items():
        targets = tuple(f"{block.name}.{name}" for name in mapping.balance_layers)
        record = SmoothingRecord(
            f"{block.name}.{mapping.smooth_layer}", targets, result.ratio, result.loss_before, result.loss_after
        )
        outcome.smoothing.append(record)
        if result.applies:
            folded |= dict.fromkeys(mapping.balance_layers, fold_scale(block, mapping, result.scale, layouts[mapping]))
    return folded


def _round(
    block: LoadedBlock,
    job: BlockJob,
    observed: Observed,
    differences: Mapping[str, InputDifference],
    folded: dict[str, Tensor],
    outcome: BlockOutcome,
    workers: Workers,
) -> dict[str, tuple[LayerCompressor, CodedWeight]]:
    """Compresses each linear, siblings together, and writes the results into the block.

    Returns the compressors of linears with learned rounding, and their starting weights.
    """
    begun: dict[str, tuple[LayerCompressor, CodedWeight]] = {}
    known = observed.shared(block.copies(workers), workers)
    ranked = decompose_block(block.weights, job.layer_plans, observed.tasks, known, workers)
    unreached: list[tuple[Group, ...]] = [((name,),) for name in job.layer_plans if name not in observed.statistics]

    def compress(worker: Worker, groups: tuple[Group, ...]) -> list[Compressed]:
        statistics, done = known[worker.number], list[Compressed]()
        for group in groups:
            # Smoothing divides an input once, for all linears that read it.
            inputs = HessianCache(statistics.get(group[0]), folded.get(group[0]), differences.get(group[0]))
            done += _compress_group(block, job, group, inputs.to(worker.device), ranked)
        return done

    def size(groups: tuple[Group, ...]) -> int:
        return sum(block.weights[name].numel() * block.weights[name].shape[1] for group in groups for name in group)

    for name, work, stored, record in chain.from_iterable(workers.map(compress, [*observed.tasks, *unreached], size)):
        if work is not None and isinstance(stored, CodedWeight):
            begun[name] = work.to(workers.device), stored.to(workers.device)
        else:
            outcome.keep(stored, record)
    return begun


Compressed = tuple[str, LayerCompressor | None, Stored, LinearRecord]
"""Name inside the block, compressor if rounding is learned next, stored form and record of a linear."""


def _compress_group(
    block: LoadedBlock, job: BlockJob, group: Group, inputs: HessianCache, ranked: dict[str, Ranked]
) -> Iterator[Compressed]:
    """Compresses linears that share an input, on the device of their statistics, and writes them into the block."""
    device = block.linear(group[0]).weight.device if inputs.statistics is None else inputs.statistics.device
    weights = {name: block.weights.pop(name).to(device) for name in group}
    outliers = choose_columns(weights, job.layer_plans, inputs.statistics, inputs.scale)
    for name in group:
        plan, decomposed = job.layer_plans[name], ranked.pop(name, None)
        work = LayerCompressor.of(
            f"{block.name}.{name}",
            weights.pop(name),
            plan,
            job.scale_dtype,
            inputs,
            decomposed and decomposed.to(device),
            outliers.get(name),
        )
        stored, record = work.apply()
        block.set_weight(name, values_of(stored))
        is_coded = isinstance(stored, CodedWeight) and stored.scheme.numbers in (INT, INTEGERS)
        is_learned = plan.is_tuned and inputs.statistics is not None and is_coded
        yield (name, work, stored, record) if is_learned else (name, None, stored.to("cpu"), record)


def _tune(
    tuned: LayerPlan,
    error: BlockError,
    begun: Mapping[str, tuple[LayerCompressor, CodedWeight]],
    outcome: BlockOutcome,
    tick: Callable[[float], None],
) -> None:
    """Learns the rounding of layers from these starting weights, and writes the results into the block."""
    method = cast(QuantizationMethod, tuned.method)
    starts = {name: (work.weight, start) for name, (work, start) in begun.items()}
    learned = error.tune(method, starts, tuned.options, tick)
    outcome.tuning = learned.record
    for name, (work, _) in begun.items():
        if learned.recovery:
            work.note_recovery(learned.recovery)
        stored, record = work.finish(learned.weights[name])
        error.block.set_weight(name, values_of(stored))
        outcome.keep(stored, record)


def _output_error(
    block: LoadedBlock, job: BlockJob, search: BlockInputs, expected: list[Tensor], device: torch.device
) -> float:
    _, outputs = trace_modules(block, search, job.index, (), device)
    error, added = 0.0, 0.0
    for (hidden, _), output, reference in zip(search.batches(job.index, device), outputs, expected, strict=True):
        error += float((output.float() - reference.float()).square().sum())
        added += float((reference.float() - hidden.float()).square().sum())
    return error / added if added else 0.0
