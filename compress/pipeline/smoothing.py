"""AWQ's smoothing of one block: for each edge, search a scale by the parent module's own output, then fold it.

All searches see the block as it was; the folds, which leave the block's function unchanged, come after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.architectures.architecture import SmoothingEdge
from compress.checkpoint.scheme import Scheme
from compress.methods.awq import SmoothingResult, search_smoothing
from compress.methods.folding import one_per_value_head, scale_inputs, scale_norm, scale_outputs
from compress.methods.scales import round_in_range
from compress.pipeline.blocks import LoadedBlock
from compress.pipeline.capture import BlockInputs, Call, run_block
from compress.pipeline.observe import Observed

NUM_RATIOS = 10


@dataclass
class ModuleTrace:
    """What one module was called with and what it returned, micro-batch by micro-batch."""

    calls: list[Call] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How o_proj's input repeats value heads: `heads_per_group` query heads of `head_dim` channels read each."""

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
        outputs = [run_block(block.module, hidden, call) for hidden, call in inputs.batches(index, device)]
    finally:
        for handle in handles:
            handle.remove()
    return traces, outputs


def search_edge(
    block: LoadedBlock,
    edge: SmoothingEdge,
    trace: ModuleTrace,
    observed: Observed,
    schemes: dict[str, Scheme],
    layout: HeadLayout,
) -> SmoothingResult:
    """The scale of one edge that lets the quantized targets reproduce the parent's output best."""
    scheme = schemes[edge.targets[0]]
    parent = block.module.get_submodule(edge.parent)

    def fake_quantize(weight: Tensor) -> Tensor:
        return round_in_range(weight, scheme)

    def loss(weights: list[Tensor]) -> float:
        for name, weight in zip(edge.targets, weights, strict=True):
            block.set_weight(name, weight)
        return _mean_square_error(parent, trace)

    with _weights_restored(block, edge.targets):
        return search_smoothing(
            [block.weights[name] for name in edge.targets],
            observed.statistics[edge.targets[0]].abs_mean,
            fake_quantize,
            loss,
            NUM_RATIOS,
            group_size=scheme.group_size,
            heads_per_group=layout.heads_per_group,
            head_dim=layout.head_dim,
        )


def fold_edge(block: LoadedBlock, edge: SmoothingEdge, scale: Tensor, layout: HeadLayout) -> Tensor:
    """Moves `scale [I]` into the targets' columns and its inverse into the source.

    Returns the scale in effect: a norm's weight is rounded to its stored dtype, and the targets undo just that.
    """
    if edge.source in block.weights:
        rows = one_per_value_head(scale, layout.heads_per_group, layout.head_dim)
        block.weights[edge.source] = scale_outputs(block.weights[edge.source], rows)
        if (bias := f"{edge.source}.bias") in block.dense:
            block.set_dense(bias, scale_outputs(block.dense[bias].to(scale.device), rows))
    else:
        name = f"{edge.source}.weight"
        divided, scale = scale_norm(block.dense[name].to(scale.device), scale)
        block.set_dense(name, divided)
    for name in edge.targets:
        block.weights[name] = scale_inputs(block.weights[name], scale)
    return scale


def head_layout(block: LoadedBlock, edge: SmoothingEdge, head_dim: int) -> HeadLayout:
    """Grouped-query layout of an edge between linears; trivial for every other edge."""
    if edge.source not in block.weights:
        return HeadLayout()
    produced, read = block.weights[edge.source].shape[0], block.weights[edge.targets[0]].shape[1]
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
