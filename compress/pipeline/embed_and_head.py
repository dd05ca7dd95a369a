"""The matrices at both ends of a model, the token embedding and the output head: rounded a few rows at a time.

The embedding comes before the blocks, so that they are calibrated on what will be looked up; the head comes after them,
with the hidden states that reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.checkpoint.weights.base import StoredTensors
from compress.checkpoint.weights.integer import IntegerWeight
from compress.methods import base
from compress.methods.base import Layer
from compress.methods.shared.hessian import HessianCache
from compress.pipeline.block import BlockOutcome, LinearRecord, fill, release
from compress.pipeline.finish import environment
from compress.pipeline.memory import ELEMENTS_AT_ONCE
from compress.pipeline.prepare import RunContext
from compress.pipeline.resume import EMBEDDING, HEAD, Progress
from compress.plan import LayerPlan

Quantize = Callable[[Tensor], IntegerWeight]
_NO_NORM = "the norm before the head of this family is not known"


def quantize_embedding(prepared: RunContext, progress: Progress) -> None:
    """Rounds the embedding, if the plan says so, and saves it; what an earlier run saved is kept.

    Raises:
        NumericsError: NaN or infinity in the weight.
    """
    module = prepared.skeleton.architecture.embedding
    assignment = prepared.plan.assignments.get(module)
    if assignment is not None and not progress.pieces.has(EMBEDDING):
        _save(prepared, progress, EMBEDDING, module, assignment, None)


def quantize_head(prepared: RunContext, progress: Progress) -> None:
    """Rounds an output head of its own, if the plan says so, and saves it; what an earlier run saved is kept.

    Raises:
        NumericsError: NaN or infinity in the weight or in what reaches the head.
    """
    module = prepared.skeleton.architecture.head
    assignment = prepared.plan.assignments.get(module)
    if assignment is not None and not progress.pieces.has(HEAD):
        statistics = _observe(prepared, progress) if head_needs_inputs(prepared) else None
        _save(prepared, progress, HEAD, module, assignment, statistics)


def head_needs_inputs(prepared: RunContext) -> bool:
    """Return whether the hidden states behind the last block are wanted."""
    architecture = prepared.skeleton.architecture
    assignment = prepared.plan.assignments.get(architecture.head)
    return assignment is not None and assignment.needs.inputs and bool(architecture.final_norm)


def stored_embedding(prepared: RunContext, progress: Progress) -> Tensor | None:
    """Return the quantized embedding `[V, H]` as numbers, in the dtype of computation; None when it stays as it is."""
    module = prepared.skeleton.architecture.embedding
    scheme = prepared.plan.schemes.get(module)
    if scheme is None:
        return None
    stored = progress.pieces.open(EMBEDDING)
    return scheme.read(StoredTensors(module, stored.tensor)).dequantize(prepared.dtype)


def _save(
    prepared: RunContext,
    progress: Progress,
    key: str,
    module: str,
    assignment: LayerPlan,
    statistics: InputStatistics | None,
) -> None:
    outcome = BlockOutcome()
    outcome.keep(*_quantize(prepared, module, assignment, statistics))
    facts = outcome.facts() | {"block": module, "environment": environment(prepared)}
    progress.pieces.write(key, outcome.tensors(prepared.scale_dtype), facts)
    prepared.files.release()


def _quantize(
    prepared: RunContext, module: str, assignment: LayerPlan, statistics: InputStatistics | None
) -> tuple[IntegerWeight, LinearRecord]:
    if assignment.scheme is None or assignment.method is None:
        raise ValueError(f"{module} is not quantized")
    method, details = assignment.method, dict[str, Any]()
    if method.needs(assignment.options).inputs and statistics is None:
        method = base.quantization(base.fallback("quantize").name)
        details["recovery"] = f"{method.name}: {_NO_NORM}"
    inputs = HessianCache(statistics)
    dtype, empty = prepared.scale_dtype, torch.empty(0)
    layer = Layer(module, empty, assignment.scheme, assignment.options, dtype, inputs, None, details)

    def quantize(rows: Tensor) -> IntegerWeight:
        return cast(IntegerWeight, method.compress(replace(layer, weight=rows)))

    weight = prepared.files.tensor(f"{module}.weight")
    found, error = _by_rows(weight, quantize, prepared.device, inputs.mean_square)
    recovery, damping = details.get("recovery", ""), details.get("damping")
    return found, LinearRecord(module, assignment.method.name, error, recovery, damping)


@torch.no_grad()
def _by_rows(
    weight: Tensor, quantize: Quantize, device: torch.device, importance: Tensor | None
) -> tuple[IntegerWeight, float]:
    """Return the integers of `weight [O, I]` on the host, and their squared error over the squared weights, each column
    weighted by its importance."""
    parts: list[IntegerWeight] = []
    error = total = 0.0
    for rows in weight.split(max(1, ELEMENTS_AT_ONCE // weight.shape[1])):
        rows = rows.to(device, torch.float32)
        found = quantize(rows)
        columns = 1.0 if importance is None else importance
        error += float(((found.dequantize() - rows).square() * columns).sum(dtype=torch.float64))
        total += float((rows.square() * columns).sum(dtype=torch.float64))
        parts.append(found.to("cpu"))
    names = "qweight", "scales", "zero_points"
    qweight, scales, zero_points = (torch.cat([getattr(part, name) for part in parts]) for name in names)
    return IntegerWeight(qweight, scales, zero_points, parts[0].scheme), error / total if total else 0.0


@torch.no_grad()
def _observe(prepared: RunContext, progress: Progress) -> InputStatistics:
    """Return statistics of the head's inputs: the last block's outputs after the final norm."""
    skeleton = prepared.skeleton
    name = skeleton.architecture.final_norm
    norm = skeleton.model.get_submodule(name)
    hidden = progress.load_hidden(skeleton.num_blocks)
    statistics = InputStatistics(hidden.shape[-1], skeleton.architecture.head, device=prepared.device)
    try:
        fill(norm, name, prepared.files, prepared.device, prepared.dtype)
        for batch in hidden.split(prepared.micro_batch):
            statistics.update(norm(batch.to(prepared.device)))
    finally:
        release(norm)
    return statistics
