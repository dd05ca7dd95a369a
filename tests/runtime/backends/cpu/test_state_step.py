"""Compiled layers with a state give what plain torch gives in float64, with every instruction set."""

from collections.abc import Mapping
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from compress.cpu.binding import best_instruction_set, library
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from compress.models.spec import Linear, Norm
from runtime.backends.base import NormWeights, Target
from runtime.backends.cpu.state_step import (
    delta_unsupported_reason,
    mamba2_unsupported_reason,
    prepare_delta,
    prepare_mamba2,
)
from runtime.backends.registry import REFERENCE, choose_state_steps
from runtime.backends.state_kernels import DeltaWeights, Mamba2Weights
from runtime.backends.state_memory import StateMemory, StepStates
from runtime.backends.torch.ops import TorchOps
from runtime.core.state_rows import StateRows, build_state_rows
from runtime.core.step import NO_STATE, ScheduledSequence
from runtime.model.mixers.gated_delta_net import DeltaNet
from runtime.model.mixers.mamba2 import Mamba2Layer

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled library")
SETS = range(best_instruction_set() + 1)
CPU, NUM_SLOTS = torch.device("cpu"), 9
DECODE = [(1, 4, ((0, 2),)), (1, 1, ((0, 1),)), (1, NO_STATE, ((0, 3),))]
SPANS = [(21, 4, ((2, 7), (3, 0), (20, 2))), (1, 1, ((0, 1),)), (8, NO_STATE, ((7, 3),)), (5, 5, ((0, 5), (4, 6)))]
"""Sequences of a step: rows, slot that is read, and slots that are written behind rows."""


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


DELTA_NETS = [delta_net(2, 2, 24, 80, False), delta_net(4, 2, 32, 16, True), delta_net(2, 1, 128, 128, False)]
MAMBAS = [
    mamba2(2, 16),
    mamba2(1, 64, norms_before_gate=True, kernel=4, state_size=128),
    mamba2(1, 80, norm=None, has_conv_bias=False),
]
RECORDS = {GatedDeltaNet: DeltaWeights, Mamba2: Mamba2Weights}
LAYERS = {GatedDeltaNet: DeltaNet, Mamba2: Mamba2Layer}
PREPARE = {GatedDeltaNet: prepare_delta, Mamba2: prepare_mamba2}
UNSUPPORTED = {GatedDeltaNet: delta_unsupported_reason, Mamba2: mamba2_unsupported_reason}


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


def in_dtype(weights, dtype: torch.dtype):
    """The record with its tensors in a dtype, and with the norm in that of activations."""
    found = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        wide = torch.promote_types(dtype, torch.float32)
        if isinstance(value, NormWeights):
            found[field.name] = replace(value, weight=value.weight.to(dtype))
        else:
            found[field.name] = None if value is None else value.to(wide)
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


def state_rows(spans: list[tuple[int, int, tuple[tuple[int, int], ...]]]) -> StateRows:
    unread = None
    entries = [ScheduledSequence(unread, 0, count, read, writes) for count, read, writes in spans]
    return build_state_rows(entries, NUM_SLOTS, CPU)


def random_memory(mixer: GatedDeltaNet | Mamba2, dtype: torch.dtype) -> Mapping[str, Tensor]:
    memory = StateMemory({0: mixer.state_fields}, NUM_SLOTS, dtype, CPU).tensors[0]
    for number, tensor in enumerate(memory.values()):
        generator = torch.Generator().manual_seed(number)
        tensor[:NUM_SLOTS] = torch.randn(tensor[:NUM_SLOTS].shape, generator=generator).to(torch.bfloat16)
        tensor[NUM_SLOTS + 1 :] = 0
    return memory


def compare(mixer: GatedDeltaNet | Mamba2, spans: list, dtype: torch.dtype, instruction_set: int, tolerance: float):
    generator, rows = torch.Generator().manual_seed(1), state_rows(spans)
    weights, inputs = random_weights(mixer, generator), projections(mixer, sum(rows.lengths), generator)
    weights, inputs = in_dtype(weights, dtype), tuple(part.to(dtype) for part in inputs)
    assert not UNSUPPORTED[type(mixer)](mixer, weights, Target(CPU, dtype))
    step = PREPARE[type(mixer)](mixer, weights, Target(CPU, dtype), instruction_set)
    memory = random_memory(mixer, dtype)
    found = step(inputs, memory, rows)

    exact = torch.float64 if dtype == torch.float32 else dtype
    expected_memory = random_memory(mixer, exact)
    layer = layer_of(mixer, in_dtype(weights, exact), Target(CPU, exact))
    states = StepStates(rows, {0: expected_memory})
    expected = layer._compute(*(part.to(exact) for part in inputs), 0, states, TorchOps())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
    for name, tensor in memory.items():
        torch.testing.assert_close(tensor.double(), expected_memory[name].double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spans", [DECODE, SPANS], ids=["decode", "spans"])
@pytest.mark.parametrize("mixer", [*DELTA_NETS, *MAMBAS])
@pytest.mark.parametrize("instruction_set", SETS)
def test_equals_plain_torch(mixer: GatedDeltaNet | Mamba2, spans: list, instruction_set: int) -> None:
    compare(mixer, spans, torch.float32, instruction_set, 2e-5)


@pytest.mark.parametrize("mixer", [DELTA_NETS[1], MAMBAS[0], MAMBAS[1]])
def test_numbers_are_rounded_where_plain_torch_rounds(mixer: GatedDeltaNet | Mamba2) -> None:
    """A sum in another order may be rounded to the other side, no more."""
    compare(mixer, SPANS, torch.bfloat16, SETS[-1], 2**-6)


@pytest.mark.parametrize("mixer", [DELTA_NETS[2], MAMBAS[1]])
def test_rows_do_not_depend_on_what_is_beside_them(mixer: GatedDeltaNet | Mamba2) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = in_dtype(random_weights(mixer, generator), torch.bfloat16)
    inputs = projections(mixer, sum(count for count, _, _ in SPANS), generator)
    inputs = tuple(part.to(torch.bfloat16) for part in inputs)
    step, first = PREPARE[type(mixer)](mixer, weights, Target(CPU, torch.bfloat16)), 0
    found = step(inputs, random_memory(mixer, torch.bfloat16), state_rows(SPANS))
    for span in SPANS:
        rows = slice(first, first + span[0])
        alone = step([part[rows] for part in inputs], random_memory(mixer, torch.bfloat16), state_rows([span]))
        assert torch.equal(alone, found[rows])
        first = rows.stop
