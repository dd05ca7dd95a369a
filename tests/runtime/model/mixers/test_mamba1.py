"""The selective scan of Mamba-1 equals transformers' function wherever a text is cut."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny_models import StayInFloat64
from torch import Tensor
from transformers.models.jamba.modeling_jamba import mamba_selective_scan

from runtime.model.mixers.causal_conv import RowGroup
from runtime.model.mixers.group_scan import scan_segments
from runtime.model.mixers.mamba1 import CHUNK, SelectiveInputs, selective_chunk

COUNT, CHANNELS, STATE = 75, 6, 4
RATE = -torch.linspace(0.01, 8, CHANNELS * STATE, dtype=torch.float64).view(CHANNELS, STATE)


def random_inputs(count: int) -> SelectiveInputs:
    """Inputs of `count` tokens of two sequences."""
    generator = torch.Generator().manual_seed(0)
    value, step, write, read = (
        torch.randn(2, count, size, generator=generator, dtype=torch.float64) for size in (CHANNELS,) * 2 + (STATE,) * 2
    )
    return SelectiveInputs(value, step.abs(), write, read)


def compute(inputs: SelectiveInputs, lengths: tuple[int, ...], chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Outputs, and the state after the last segment, of sequences that begin without one."""
    state = torch.zeros(2, CHANNELS, STATE, dtype=torch.float64)
    found, after = scan_segments(RowGroup(2, lengths), inputs, state, partial(selective_chunk, RATE), chunk)
    return found, after.unflatten(0, (2, -1))[:, -1]


@pytest.mark.parametrize(("chunk", "lengths"), [(1, (COUNT,)), (7, (31, 1, 43)), (CHUNK, (COUNT,)), (CHUNK, (40, 35))])
def test_scan_equals_transformers(chunk: int, lengths: tuple[int, ...]) -> None:
    inputs = random_inputs(COUNT)
    value, step, write, read = (part.mT for part in (inputs.value, inputs.step, inputs.write, inputs.read))
    with StayInFloat64():
        expected, last = mamba_selective_scan(value, step, RATE, write, read, return_last_state=True)
    found, after = compute(inputs, lengths, chunk)
    torch.testing.assert_close(found.mT, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(after, last, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1])
def test_channels_that_decay_to_nothing_stay_finite(count: int) -> None:
    inputs = random_inputs(count)
    found, after = compute(replace(inputs, step=torch.full_like(inputs.step, 1e4)), (count,))
    assert found.isfinite().all()
    assert after.isfinite().all()
