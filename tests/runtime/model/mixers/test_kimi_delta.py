"""The delta rule with a decay for each channel equals transformers' functions."""

from dataclasses import replace

import pytest
import torch
from tiny_models import StayInFloat64
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from runtime.model.mixers.causal_conv import RowGroup
from runtime.model.mixers.gated_delta_net import DeltaInputs
from runtime.model.mixers.group_scan import scan_segments
from runtime.model.mixers.kimi_delta import CHUNK, delta_chunk


def random_inputs(count: int) -> tuple[DeltaInputs, Tensor]:
    """Inputs of `count` tokens of two sequences with three heads, and the states before them."""
    generator = torch.Generator().manual_seed(count)
    query, key, value = (torch.randn(2, 3, count, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    beta, decay = (torch.rand(2, 3, count, *rest, generator=generator, dtype=torch.float64) for rest in ((), (8,)))
    query, key = (part / part.norm(dim=-1, keepdim=True) for part in (query, key))
    state = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
    return DeltaInputs(query, key, value, beta, -4 * decay**3), state


def compute(inputs: DeltaInputs, state: Tensor, lengths: tuple[int, ...], chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Outputs, and the state after the last segment."""
    found, after = scan_segments(RowGroup(2, lengths), inputs, state, delta_chunk, chunk)
    return found, after.unflatten(0, (2, -1))[:, -1]


@pytest.mark.parametrize("reference", [chunk_kimi_delta_attention, recurrent_kimi_delta_attention])
@pytest.mark.parametrize(("chunk", "lengths"), [(1, (90,)), (7, (31, 1, 58)), (CHUNK, (90,)), (CHUNK, (40, 50))])
def test_delta_rule_equals_transformers(reference, chunk: int, lengths: tuple[int, ...]) -> None:
    inputs, state = random_inputs(90)
    parts = (inputs.query * 8**0.5, inputs.key, inputs.value, inputs.decay, inputs.beta)
    with StayInFloat64():
        expected, last = reference(
            *(part.transpose(1, 2) for part in parts), initial_state=state, output_final_state=True
        )
    found, after = compute(inputs, state, lengths, chunk)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(after, last, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1])
def test_channels_that_decay_to_nothing_stay_finite(count: int) -> None:
    inputs, state = random_inputs(count)
    inputs = replace(inputs, decay=inputs.decay.index_fill(-1, torch.tensor([1, 4]), -1e4))
    found, after = compute(inputs, state, (count,))
    assert found.isfinite().all()
    assert after.isfinite().all()
