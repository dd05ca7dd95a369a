"""Smoothing of one block: searches a scale per mapping by the parent module's output, then folds it.

All searches use the unmodified block; the folds, which preserve the block's function, follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calibration.statistics import InputStatistics
from compress.checkpoint.scale_search import quantize_tokens
from compress.checkpoint.weights import Activations, Scheme
from compress.checkpoint.weights.rotated_inputs import rotate
from compress.common.workers import moved
from compress.methods.base import SMOOTHING_ROWS, ScaleSearch
from compress.methods.shared.learned_rounding import straight_through
from compress.methods.shared.smoothing import (
    SmoothingResult,
    one_per_value_head,
    scale_inputs,
    scale_norm,
    scale_outputs,
)
from compress.models.architecture import SmoothingMapping
from compress.pipeline.block import LoadedBlock
from compress.pipeline.capture import BlockInputs, Call
from compress.plan import LayerPlan


@dataclass
class ModuleTrace:
    """Arguments and outputs of one module per micro-batch."""

    calls: list[Call] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def on(self, device: torch.device) -> ModuleTrace:
        """Returns the same arguments and outputs on `device`."""
        calls = [Call(moved(call.args, device), moved(call.kwargs, device)) for call in self.calls]
        return ModuleTrace(calls, [output.to(device) for output in self.outputs])


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Layout of o_proj's input over value heads: `heads_per_group` query heads of `head_dim` channels share each."""

    heads_per_group: int = 1
    head_dim: int = 1


def trace_modules(
    block: LoadedBlock, inputs: BlockInputs, index: int, names: Sequence[str], device: torch.device
) -> tuple[dict[str, ModuleTrace], list[Tensor]]:
    """Runs `inputs` through the block; returns a trace of each named module and the block's own outputs."""
    traces = {name: ModuleTrace() for name in names}
    handles = [
        block.module.get_submodule(name).register_forward_hook(_keep_call(trace), with_kwargs=True)
        for name, trace in traces.items()
    ]
    try:
        outputs = [call.run(block.module, hidden) for hidden, call in inputs.batches(index, device)]
    finally:
        for handle in handles:
            handle.remove()
    return traces, outputs


def trace_samples(block: LoadedBlock, name: str, statistics: InputStatistics) -> ModuleTrace:
    """Returns a trace of a linear on sample rows of its statistics, which exist even for rarely chosen experts."""
    linear = block.linear(name)
    rows = statistics.sample(SMOOTHING_ROWS).to(linear.weight)
    return ModuleTrace([Call((rows,), {})], [linear(rows)])


def search_scale(
    block: LoadedBlock,
    mapping: SmoothingMapping,
    trace: ModuleTrace,
    statistics: InputStatistics,
    layer_plans: Mapping[str, LayerPlan],
    layout: HeadLayout,
) -> SmoothingResult:
    """Returns the scale of one mapping with the least error of the parent's output with quantized targets.

    Args:
        statistics: of the input that the targets share.
    """
    layer_plan = layer_plans[mapping.balance_layers[0]]
    scheme = layer_plan.quantized
    if scheme is None or layer_plan.method is None:
        raise ValueError(f"{mapping.balance_layers[0]} is not quantized, so smoothing has no effect")
    rounded_inputs = dict.fromkeys(mapping.balance_layers, scheme) if scheme.activation_bits else {}
    parent, device = block.module.get_submodule(mapping.parent), block.linear(mapping.balance_layers[0]).weight.device

    def loss(weights: list[Tensor], scale: Tensor) -> float:
        for name, weight in zip(mapping.balance_layers, weights, strict=True):
            block.set_weight(name, weight)
        with activations_quantized(block, rounded_inputs, scale):
            return _mean_square_error(parent, trace)

    search = ScaleSearch(
        [block.weights[name].to(device) for name in mapping.balance_layers],
        statistics.to(device),
        scheme.round_in_range,
        loss,
        scheme.group_size,
        layout.heads_per_group,
        layout.head_dim,
    )
    with _weights_restored(block, mapping.balance_layers):
        return layer_plan.method.smoothing_scale(search, layer_plan.options)


@contextmanager
def activations_quantized(
    block: LoadedBlock,
    schemes: Mapping[str, Scheme],
    scale: Tensor | None = None,
    outliers: Mapping[str, Tensor] | None = None,
) -> Iterator[None]:
    """Rounds the inputs of the named linears as their schemes say inside the context, rotated and back again where they
    are rotated; gradients pass through.

    Args:
        scale: `[I]`, divisor of inputs before rounding.
        outliers: columns `[k]` of inputs that stay unquantized, by linear.
    """

    def round_input(exact: Tensor, columns: Tensor | None, kind: Activations, order: int) -> Tensor:
        inputs = exact if scale is None else exact.float() / scale
        inputs = rotate(inputs, order) if order else inputs
        columns = None if columns is None else columns.to(inputs.device)
        levels, steps = quantize_tokens(inputs if columns is None else inputs.index_fill(-1, columns, 0.0), kind)
        rounded = rotate(levels * steps, order) if order else levels * steps
        rounded = (rounded if scale is None else rounded * scale).to(exact.dtype)
        if columns is not None:
            rounded[..., columns] = exact[..., columns]
        return rounded

    def hook(columns: Tensor | None, kind: Activations, order: int) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        rounding = partial(round_input, columns=columns, kind=kind, order=order)
        return lambda _module, args: (straight_through(args[0], rounding), *args[1:])

    kept = outliers or {}
    handles = [
        block.linear(name).register_forward_pre_hook(hook(kept.get(name), scheme.activations, scheme.hadamard))
        for name, scheme in schemes.items()
        if scheme.activations
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fold_scale(block: LoadedBlock, mapping: SmoothingMapping, scale: Tensor, layout: HeadLayout) -> Tensor:
    """Folds `scale [I]` into the targets' columns and its inverse into the source.

    Returns the effective scale: a norm's weight is rounded to its stored dtype, and the targets compensate exactly
    that.
    """
    if mapping.smooth_layer in block.weights:
        rows = one_per_value_head(scale, layout.heads_per_group, layout.head_dim)
        block.weights[mapping.smooth_layer] = scale_outputs(block.weights[mapping.smooth_layer], rows)
        if (bias := f"{mapping.smooth_layer}.bias") in block.dense:
            block.set_dense(bias, scale_outputs(block.dense[bias].to(scale.device), rows))
    else:
        name = f"{mapping.smooth_layer}.weight"
        divided, scale = scale_norm(block.dense[name].to(scale.device), scale, mapping.offset)
        block.set_dense(name, divided)
        if (bias := f"{mapping.smooth_layer}.bias") in block.dense:
            block.set_dense(bias, scale_outputs(block.dense[bias].to(scale.device), scale))
    for name in mapping.balance_layers:
        block.weights[name] = scale_inputs(block.weights[name], scale)
    for name in mapping.routers:
        weight = f"{name}.weight"
        block.set_dense(weight, scale_inputs(block.dense[weight].to(scale.device), scale))
    return scale


def head_layout(block: LoadedBlock, mapping: SmoothingMapping, head_dim: int) -> HeadLayout:
    """Returns the grouped-query layout of a mapping between linears; trivial for other mappings."""
    if mapping.smooth_layer not in block.weights:
        return HeadLayout()
    produced, read = block.weights[mapping.smooth_layer].shape[0], block.weights[mapping.balance_layers[0]].shape[1]
    return HeadLayout() if produced == read else HeadLayout(read // produced, head_dim)


def _keep_call(trace: ModuleTrace) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trace.calls.append(Call(args, kwargs))
        trace.outputs.append(output if isinstance(output, Tensor) else output[0])

    return hook


def _mean_square_error(parent: nn.Module, trace: ModuleTrace) -> float:
    total, count = 0.0, 0
    for call, expected in zip(trace.calls, trace.outputs, strict=True):
        output = parent(*call.args, **call.kwargs)
        output = output if isinstance(output, Tensor) else output[0]
        total += float((output.float() - expected.float()).square().sum())
        count += expected.numel()
    return total / count


@contextmanager
def _weights_restored(block: LoadedBlock, names: Sequence[str]) -> Iterator[None]:
    before = {name: block.linear(name).weight.data for name in names}
    try:
        yield
    finally:
        for name, weight in before.items():
            block.linear(name).weight.data = weight
