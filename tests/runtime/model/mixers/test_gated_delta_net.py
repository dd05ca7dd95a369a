"""The gated delta rule equals transformers' functions."""

from dataclasses import replace

import pytest
import torch
from tiny_models import StayInFloat64
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from runtime.model.mixers.gated_delta_net import CHUNK, DeltaInputs, delta_rule


def random_inputs(count: int) -> tuple[DeltaInputs, Tensor]:
    """Inputs of `count` tokens of two sequences with three heads, and the states before them."""
    generator = torch.Generator().manual_seed(count)
    query, key, value = (torch.randn(2, 3, count, size, generator=generator, dtype=torch.float64) for size in (8, 8, 5))
    beta, decay = (torch.rand(2, 3, count, generator=generator, dtype=torch.float64) for _ in range(2))
    query, key = (part / part.norm(dim=-1, keepdim=True) for part in (query, key))
    state = torch.randn(2, 3, 8, 5, generator=generator, dtype=torch.float64)
    return DeltaInputs(query, key, value, beta, -4 * decay**3), state


@pytest.mark.parametrize("reference", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
@pytest.mark.parametrize("chunk", [1, 7, CHUNK])
def test_delta_rule_equals_transformers(reference, chunk: int) -> None:
    inputs, state = random_inputs(150)
    parts = (inputs.query * 8**0.5, inputs.key, inputs.value, inputs.decay, inputs.beta)
    with StayInFloat64():
        expected, last = reference(
            *(part.transpose(1, 2) for part in parts), initial_state=state, output_final_state=True
        )
    found, after = delta_rule(inputs, state, chunk)
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(after, last, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1])
def test_a_state_that_decays_to_nothing_stays_finite(count: int) -> None:
    inputs, state = random_inputs(count)
    found, after = delta_rule(replace(inputs, decay=torch.full_like(inputs.beta, -1e4)), state)
    assert found.isfinite().all()
    assert after.isfinite().all()
