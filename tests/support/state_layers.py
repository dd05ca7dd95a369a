"""Layers with a state without linears: random ones in every shape, and what plain torch computes."""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from compress.models.linear import Linear
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from compress.models.norm import Norm
from runtime.backends.base import NormWeights, Target
from runtime.backends.registry import REFERENCE, choose_state_steps
from runtime.backends.state_kernels import DeltaWeights, Mamba2Weights
from runtime.backends.state_memory import StateMemory, StepStates
from runtime.backends.torch.ops import TorchOps
from runtime.core.state_rows import StateRows, build_state_rows
from runtime.core.step import NO_STATE, ScheduledSequence
from runtime.model.mixers.gated_delta_net import DeltaNet
from runtime.model.mixers.mamba2 import Mamba2Layer

CPU, NUM_SLOTS = torch.device("cpu"), 9
DECODE = [(1, 4, ((0, 2),)), (1, 1, ((0, 1),)), (1, NO_STATE, ((0, 3),))]
SPANS = [(21, 4, ((2, 7), (3, 0), (20, 2))), (1, 1, ((0, 1),)), (8, NO_STATE, ((7, 3),)), (5, 5, ((0, 5), (4, 6)))]
"""Sequences of a step: rows, slot that is read, and slots that are written after rows."""


def linear(name: str, out: int, size: int) -> Linear:
    return Linear(name, out, size)


def delta_net(heads: int, pairs: int, keys: int, values: int, grouped: bool) -> GatedDeltaNet:
    gates = (linear("gates", 2 * heads, 8),)
    norm = Norm("norm", values, 1e-6)
    return GatedDeltaNet(heads, pairs, keys, values, (), gates, linear("out", 8, heads * values), norm, 4, grouped)


def mamba2(groups: int, size: int, **options: object) -> Mamba2:
    norm = Norm("norm", 4 * size, 1e-5)
    mixer = Mamba2(4, groups, size, 24, (), linear("out", 8, 4 * size), norm, 3, step_limits=(0.01, 0.9))
    return replace(mixer, **options)


RECORDS = {GatedDeltaNet: DeltaWeights, Mamba2: Mamba2Weights}
LAYERS = {GatedDeltaNet: DeltaNet, Mamba2: Mamba2Layer}


def random_weights(mixer: GatedDeltaNet | Mamba2, generator: torch.Generator) -> DeltaWeights | Mamba2Weights:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, channels = mixer.num_heads, mixer.conv_size
    size = mixer.value_dim if isinstance(mixer, GatedDeltaNet) else mixer.inner_size
    norm = None if mixer.norm is None else NormWeights(1 + 0.1 * numbers(size), mixer.norm.eps)
    shared = (numbers(mixer.kernel, channels) / 2, -numbers(heads).exp(), numbers(heads), norm)
    if isinstance(mixer, GatedDeltaNet):
        return DeltaWeights(*shared)
    conv, decay, bias, _ = shared
    conv_bias = numbers(channels) if mixer.has_conv_bias else None
    return Mamba2Weights(conv, conv_bias, decay, bias, numbers(heads), norm)


def in_dtype(weights, dtype: torch.dtype, device: torch.device = CPU):
    """The record with its tensors in a dtype, and with the norm in that of activations."""
    found = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        wide = torch.promote_types(dtype, torch.float32)
        if isinstance(value, NormWeights):
            found[field.name] = replace(value, weight=value.weight.to(device, dtype))
        else:
            found[field.name] = None if value is None else value.to(device, wide)
    return type(weights)(**found)


def layer_of(mixer: GatedDeltaNet | Mamba2, weights, target: Target):
    """The layer in plain torch, without linears."""
    steps = choose_state_steps(mixer, weights, target, REFERENCE)
    linears = [None] * (3 if isinstance(mixer, GatedDeltaNet) else 2)
    return LAYERS[type(mixer)](mixer, *linears, weights, steps)


def projections(mixer: GatedDeltaNet | Mamba2, count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    if isinstance(mixer, Mamba2):
        sizes = (sum(mixer.sizes),)
    else:
        sizes = (mixer.conv_size + mixer.num_heads * mixer.value_dim, 2 * mixer.num_heads)
    return tuple(torch.randn(count, size, generator=generator, dtype=torch.float64) for size in sizes)


def state_rows(spans: list[tuple[int, int, tuple[tuple[int, int], ...]]], device: torch.device = CPU) -> StateRows:
    unread = None
    entries = [ScheduledSequence(unread, 0, count, read, writes) for count, read, writes in spans]
    return build_state_rows(entries, NUM_SLOTS, device)


def random_memory(mixer: GatedDeltaNet | Mamba2, dtype: torch.dtype) -> Mapping[str, Tensor]:
    memory = StateMemory({0: mixer.state_fields}, NUM_SLOTS, dtype, CPU).tensors[0]
    for number, tensor in enumerate(memory.values()):
        generator = torch.Generator().manual_seed(number)
        tensor[:NUM_SLOTS] = torch.randn(tensor[:NUM_SLOTS].shape, generator=generator).to(torch.bfloat16)
        tensor[NUM_SLOTS + 1 :] = 0
    return memory


def computed_in_torch(
    mixer: GatedDeltaNet | Mamba2, weights, inputs: tuple[Tensor, ...], memory: Mapping[str, Tensor], rows: StateRows
) -> Tensor:
    """Output of plain torch in the dtype of the inputs; states are read from `memory` and written there."""
    dtype = inputs[0].dtype
    layer = layer_of(mixer, in_dtype(weights, dtype), Target(CPU, dtype))
    return layer._compute(*inputs, 0, StepStates(rows, {0: memory}), TorchOps())
