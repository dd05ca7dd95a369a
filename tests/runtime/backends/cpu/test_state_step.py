"""Compiled layers with a state give what plain torch gives in float64, with every instruction set."""

import pytest
import torch
from state_layers import (
    CPU,
    DECODE,
    SPANS,
    computed_in_torch,
    delta_net,
    in_dtype,
    mamba2,
    projections,
    random_memory,
    random_weights,
    state_rows,
)

from compress.cpu.binding import best_instruction_set, library
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from runtime.backends.base import Target
from runtime.backends.cpu.state_step import (
    delta_unsupported_reason,
    mamba2_unsupported_reason,
    prepare_delta,
    prepare_mamba2,
)
from runtime.core.step import NO_STATE

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled library")
SETS = range(best_instruction_set() + 1)
DELTA_NETS = [delta_net(2, 2, 24, 80, False), delta_net(4, 2, 32, 16, True), delta_net(2, 1, 128, 128, False)]
MAMBAS = [
    mamba2(2, 16),
    mamba2(1, 64, norms_before_gate=True, kernel=4, state_size=128),
    mamba2(1, 80, norm=None, has_conv_bias=False),
]
PREPARE = {GatedDeltaNet: prepare_delta, Mamba2: prepare_mamba2}
UNSUPPORTED = {GatedDeltaNet: delta_unsupported_reason, Mamba2: mamba2_unsupported_reason}


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
    expected = computed_in_torch(mixer, weights, tuple(part.to(exact) for part in inputs), expected_memory, rows)
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


@pytest.mark.parametrize("mixer", [DELTA_NETS[1], MAMBAS[0]])
def test_results_do_not_depend_on_where_a_text_is_cut(mixer: GatedDeltaNet | Mamba2) -> None:
    generator, target = torch.Generator().manual_seed(3), Target(CPU, torch.float32)
    weights = in_dtype(random_weights(mixer, generator), torch.float32)
    inputs = tuple(part.float() for part in projections(mixer, 21, generator))
    step = PREPARE[type(mixer)](mixer, weights, target)
    whole, memory = random_memory(mixer, torch.float32), random_memory(mixer, torch.float32)
    expected = step(inputs, whole, state_rows([(21, NO_STATE, ((20, 0),))]))
    found, first, read = [], 0, NO_STATE
    for count in (1, 5, 8, 7):
        part = [each[first : first + count] for each in inputs]
        found.append(step(part, memory, state_rows([(count, read, ((count - 1, 0),))])))
        first, read = first + count, 0
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    for name, tensor in memory.items():
        torch.testing.assert_close(tensor[0], whole[name][0], rtol=1e-5, atol=1e-5)
