"""Quantization of token embedding and output head, in chunks of rows.

The embedding is processed before the blocks, which are then calibrated on its quantized values; the head is processed
after them, with the hidden states that reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from calibration.statistics import InputStatistics
from compress.checkpoint.weights.base import StoredTensors
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.workers import Worker, Workers
from compress.methods import base
from compress.methods.base import Layer
from compress.methods.shared.hessian import HessianCache
from compress.pipeline.block import BlockOutcome, LinearRecord, fill, release
from compress.pipeline.finish import environment
from compress.pipeline.memory import ELEMENTS_AT_ONCE
from compress.pipeline.prepare import RunContext
from compress.pipeline.resume import EMBEDDING, HEAD, Progress
from compress.plan import LayerPlan

Rounded = tuple[CodedWeight, float, float]
"""Integers of some rows on the host, their squared error and the squared weights, columns weighted by their inputs."""
_NO_NORM = "the final norm of this family is unknown"


def quantize_embedding(context: RunContext, progress: Progress) -> None:
    """Quantizes and saves the embedding, if planned; keeps the result of an earlier run. Raises NumericsError: NaN or
    infinity in the weight."""
    module = context.skeleton.architecture.embedding
    layer_plan = context.plan.layer_plans.get(module)
    if layer_plan is not None and not progress.pieces.has(EMBEDDING):
        _save(context, progress, EMBEDDING, module, layer_plan, None)


def quantize_head(context: RunContext, progress: Progress) -> None:
    """Quantizes and saves an untied output head, if planned; keeps the result of an earlier run. Raises NumericsError:
    the weight or the head's inputs contain NaN or infinity."""
    module = context.skeleton.architecture.head
    layer_plan = context.plan.layer_plans.get(module)
    if layer_plan is not None and not progress.pieces.has(HEAD):
        statistics = _observe(context, progress) if head_needs_inputs(context) else None
        _save(context, progress, HEAD, module, layer_plan, statistics)


def head_needs_inputs(context: RunContext) -> bool:
    """Returns whether the hidden states after the last block are needed."""
    architecture = context.skeleton.architecture
    layer_plan = context.plan.layer_plans.get(architecture.head)
    return layer_plan is not None and layer_plan.needs.inputs and bool(architecture.final_norm)


def stored_embedding(context: RunContext, progress: Progress) -> Tensor | None:
    """Returns the dequantized embedding `[V, H]` in the dtype of computation; None if it is not quantized."""
    module = context.skeleton.architecture.embedding
    scheme = context.plan.schemes.get(module)
    if scheme is None:
        return None
    stored = progress.pieces.open(EMBEDDING)
    return scheme.read(StoredTensors(module, stored.tensor)).dequantize(context.dtype)


def _save(
    context: RunContext,
    progress: Progress,
    key: str,
    module: str,
    layer_plan: LayerPlan,
    statistics: InputStatistics | None,
) -> None:
    outcome = BlockOutcome()
    outcome.keep(*round_matrix(context, module, layer_plan, statistics))
    facts = outcome.facts() | {"block": module, "environment": environment(context)}
    progress.pieces.write(key, outcome.tensors(context.scale_dtype), facts)
    context.files.release()


def round_matrix(
    context: RunContext, module: str, layer_plan: LayerPlan, statistics: InputStatistics | None
) -> tuple[CodedWeight, LinearRecord]:
    """Quantizes a matrix of the source in chunks of rows. Raises ValueError: it has no scheme or no method."""
    if layer_plan.scheme is None or layer_plan.method is None:
        raise ValueError(f"{module} is not quantized")
    method, details = layer_plan.method, dict[str, Any]()
    if method.needs(layer_plan.options).inputs and statistics is None:
        method = base.fallback("quantize")
        details["recovery"] = f"{method.name}: {_NO_NORM}"
    inputs, workers = HessianCache(statistics), context.workers
    known = [inputs.to(worker.device) for worker in workers.all]
    dtype, empty = context.scale_dtype, torch.empty(0)
    layer = Layer(module, empty, layer_plan.scheme, layer_plan.options, dtype, inputs, None, details)

    def quantize(worker: Worker, rows: Tensor) -> Rounded:
        inputs, rows = known[worker.number], rows.to(worker.device, torch.float32)
        found = cast(CodedWeight, method.compress(replace(layer, weight=rows, inputs=inputs)))
        columns = 1.0 if inputs.mean_square is None else inputs.mean_square
        error = float(((found.dequantize() - rows).square() * columns).sum(dtype=torch.float64))
        return found.to("cpu"), error, float((rows.square() * columns).sum(dtype=torch.float64))

    found, error = _by_rows(context.files.tensor(f"{module}.weight"), quantize, workers)
    recovery, damping = details.get("recovery", ""), details.get("damping")
    return found, LinearRecord(module, layer_plan.method.name, error, recovery, damping)


@torch.no_grad()
def _by_rows(
    weight: Tensor, quantize: Callable[[Worker, Tensor], Rounded], workers: Workers
) -> tuple[CodedWeight, float]:
    """Returns the integers of `weight [O, I]` on the host, and their squared error divided by the squared weights."""
    parts: list[CodedWeight] = []
    error = total = 0.0
    for found, wrong, squares in workers.map(quantize, weight.split(max(1, ELEMENTS_AT_ONCE // weight.shape[1]))):
        parts.append(found)
        error, total = error + wrong, total + squares
    return cast(CodedWeight, parts[0].fuse(parts[1:])), error / total if total else 0.0


@torch.no_grad()
def _observe(context: RunContext, progress: Progress) -> InputStatistics:
    """Returns statistics of the head's inputs: outputs of the last block after the final norm."""
    skeleton = context.skeleton
    name = skeleton.architecture.final_norm
    norm = skeleton.model.get_submodule(name)
    hidden = progress.load_hidden(skeleton.num_blocks)
    statistics = InputStatistics(hidden.shape[-1], skeleton.architecture.head, device=context.device)
    try:
        fill(norm, name, context.files, context.device, context.dtype)
        for batch in hidden.split(context.micro_batch):
            statistics.update(norm(batch.to(context.device)))
    finally:
        release(norm)
    return statistics
