"""What the recipe does to one block: observe, smooth, quantize, measure, and hand on the block's new outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.architectures.architecture import SmoothingEdge
from compress.checkpoint.integer import IntegerWeight
from compress.checkpoint.scales import GroupScales
from compress.methods.awq import quantize_awq, search_clip
from compress.methods.gptq import GptqOptions, factorize, quantize_gptq
from compress.methods.rtn import quantize_rtn
from compress.methods.smoothing import SmoothingResult
from compress.pipeline.block_job import BlockJob, BlockOutcome, Calibration, EdgeRecord, LinearRecord
from compress.pipeline.blocks import LoadedBlock
from compress.pipeline.capture import BlockInputs, run_all
from compress.pipeline.observe import Need, Observed, observe
from compress.pipeline.smoothing import (
    ModuleTrace,
    activations_quantized,
    fold_edge,
    head_layout,
    search_edge,
    trace_modules,
)

Step = Callable[[str, float], None]
CLIP_ROWS = 512
# Where each part of the work on a block begins and ends; what they really take differs by method and device.
_PARTS = {"statistics": (0.0, 0.3), "smoothing": (0.3, 0.6), "rounding": (0.6, 0.8), "next inputs": (0.8, 1.0)}
# Errors of queries and keys pass through a softmax, where the least error of the projection is not the best choice.
_UNCLIPPED = ("q_proj", "k_proj", "query", "key", "qkv")


@torch.no_grad()
def quantize_block_plainly(block: LoadedBlock, job: BlockJob) -> BlockOutcome:
    """Rounds a block's linears to nearest, from tensor to tensor: no forward pass.

    Raises:
        SchemeError, NumericsError: from the method, naming the linear.
    """
    outcome = BlockOutcome(dense={f"{block.name}.{name}": tensor for name, tensor in block.dense.items()})
    for name, assignment in job.assignments.items():
        weight = block.weights.pop(name)
        quantized = _on_host(quantize_rtn(weight, assignment.scheme, None, job.scale_dtype))
        record = LinearRecord(f"{block.name}.{name}", "rtn", _relative_error(weight.cpu(), quantized, None))
        outcome.weights[record.module] = quantized
        outcome.linears.append(record)
    return outcome


@torch.no_grad()
def quantize_block(
    block: LoadedBlock,
    job: BlockJob,
    calibration: Calibration,
    device: torch.device,
    step: Step = lambda _what, _share: None,
) -> BlockOutcome:
    """Quantizes a block by its inputs; the block then holds what will be served, and so do its outputs.

    Args:
        step: told what is being done and the share of the block that is done.

    Raises:
        NumericsError: NaN or infinity in inputs or outputs.
    """
    observed = observe(block, calibration.inputs, job.index, _needs(job), device, _part(step, "statistics"))
    parents = sorted({edge.parent for edge in job.edges})
    traces, expected = trace_modules(block, calibration.search, job.index, parents, device)
    outcome = BlockOutcome()
    folded = _smooth(block, job, observed, traces, outcome, _part(step, "smoothing"))
    traces.clear()
    _part(step, "rounding")(0)
    _round(block, job, observed, folded, outcome)
    with activations_quantized(block, [name for name, each in job.assignments.items() if each.scheme.activation_bits]):
        outcome.relative_error = _output_error(block, job, calibration.search, expected, device)
        tick = _part(step, "next inputs")
        outcome.hidden = run_all(block.module, block.name, calibration.inputs, job.index, device, tick)
    outcome.dense = {f"{block.name}.{name}": tensor.cpu() for name, tensor in block.dense.items()}
    return outcome


def _part(step: Step, what: str) -> Callable[[float], None]:
    """Progress inside one part of the work, as a share of the whole block."""
    begin, end = _PARTS[what]
    return lambda share: step(what, begin + share * (end - begin))


def _needs(job: BlockJob) -> dict[str, Need]:
    return {
        name: Need(assignment.method == "gptq", CLIP_ROWS if assignment.method == "awq" else 0)
        for name, assignment in job.assignments.items()
    }


def _smooth(
    block: LoadedBlock,
    job: BlockJob,
    observed: Observed,
    traces: dict[str, ModuleTrace],
    outcome: BlockOutcome,
    tick: Callable[[float], None],
) -> dict[str, Tensor]:
    """Searches all edges, then folds them. Returns the scale now inside each target's columns."""
    layouts = {edge: head_layout(block, edge, job.head_dim) for edge in job.edges}
    found: dict[SmoothingEdge, SmoothingResult] = {}
    for number, edge in enumerate(job.edges):
        tick(number / len(job.edges))
        found[edge] = search_edge(block, edge, traces[edge.parent], observed, job.assignments, layouts[edge])
    folded: dict[str, Tensor] = {}
    for edge, result in found.items():
        targets = tuple(f"{block.name}.{name}" for name in edge.targets)
        record = EdgeRecord(f"{block.name}.{edge.source}", targets, result.ratio, result.loss_before, result.loss_after)
        outcome.edges.append(record)
        if result.applies:
            folded |= dict.fromkeys(edge.targets, fold_edge(block, edge, result.scale, layouts[edge]))
    return folded


def _round(
    block: LoadedBlock, job: BlockJob, observed: Observed, folded: dict[str, Tensor], outcome: BlockOutcome
) -> None:
    """Quantizes each linear, siblings together, and puts the dequantized weights into the block."""
    unreached = tuple((name,) for name in job.assignments if name not in observed.statistics)
    for group in observed.groups + unreached:
        methods = [_Rounding(block, job, observed, folded.get(name), name) for name in group]
        factor = None
        for rounding in methods:
            if rounding.method == "gptq" and factor is None:
                factor = factorize(rounding.statistics.hessian, GptqOptions())
            quantized, record = rounding.apply(factor)
            block.set_weight(rounding.name, quantized.dequantize(torch.float32))
            outcome.weights[record.module] = _on_host(quantized)
            outcome.linears.append(record)


class _Rounding:
    """One linear on its way to integers: its master weight and what is known of its (smoothed) inputs."""

    def __init__(self, block: LoadedBlock, job: BlockJob, observed: Observed, scale: Tensor | None, name: str) -> None:
        assignment = job.assignments[name]
        self.name = name
        self.module = f"{block.name}.{name}"
        self.weight = block.weights.pop(name)
        self.scheme = assignment.scheme
        self.scale_dtype = job.scale_dtype
        self.scale = scale
        self.statistics = observed.statistics.get(name)
        self.method = assignment.method if self.statistics is not None else "unreached"
        self.importance = None if self.statistics is None else self.statistics.mean_square
        if self.importance is not None and scale is not None:
            self.importance = self.importance / scale.square()

    def apply(self, factor: Any) -> tuple[IntegerWeight, LinearRecord]:
        clip, details = None, {}
        match self.method:
            case "gptq":
                quantized = quantize_gptq(self.weight, factor, self.scheme, self.scale_dtype)
                details = {
                    "recovery": factor.recovery,
                    "damping": factor.damping,
                    "dead_columns": factor.dead_columns,
                }
            case "awq":
                clip = self._clip()
                quantized = quantize_awq(self.weight, self.scheme, self.importance, clip, self.scale_dtype)
                details = {"clipped": clip is not None}
            case "rtn" | "smoothquant":
                quantized = quantize_rtn(self.weight, self.scheme, self.importance, self.scale_dtype)
            case _:
                quantized = quantize_rtn(self.weight, self.scheme, None, self.scale_dtype)
                details = {"recovery": "rtn: no calibration token reached this layer"}
        error = _relative_error(self.weight, quantized, self.importance)
        method = "rtn" if self.method == "unreached" else self.method
        return quantized, LinearRecord(self.module, method, error, **details)

    def _clip(self) -> GroupScales | None:
        if any(part in self.name for part in _UNCLIPPED):
            return None
        rows = self.statistics.sample(CLIP_ROWS).float()
        return search_clip(
            self.weight, rows if self.scale is None else rows / self.scale, self.scheme, self.scale_dtype
        )


def _output_error(
    block: LoadedBlock, job: BlockJob, search: BlockInputs, expected: list[Tensor], device: torch.device
) -> float:
    _, outputs = trace_modules(block, search, job.index, (), device)
    error, added = 0.0, 0.0
    for (hidden, _), output, reference in zip(search.batches(job.index, device), outputs, expected, strict=True):
        error += float((output.float() - reference.float()).square().sum())
        added += float((reference.float() - hidden.float()).square().sum())
    return error / added if added else 0.0


def _relative_error(weight: Tensor, quantized: IntegerWeight, importance: Tensor | None) -> float:
    """Squared rounding error over squared weights, each column weighted by the mean square of its input."""
    columns = torch.ones(weight.shape[1], device=weight.device) if importance is None else importance
    error = ((quantized.dequantize(torch.float32) - weight).square() * columns).sum()
    total = (weight.square() * columns).sum()
    return float(error / total) if float(total) else 0.0


def _on_host(weight: IntegerWeight) -> IntegerWeight:
    return IntegerWeight(weight.codes.cpu(), weight.scale.cpu(), weight.zero.cpu(), weight.scheme)
