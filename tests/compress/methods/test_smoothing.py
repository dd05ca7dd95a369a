"""Folds leave the function unchanged: norm to linears, up to down through SwiGLU, v to o through grouped attention."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from compress.methods.shared.smoothing import (
    one_per_value_head,
    scale_inputs,
    scale_norm,
    scale_outputs,
    share_across_heads,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positive(size: int) -> Tensor:
    return torch.exp(draw(size, seed=9))


def test_norm_to_linears() -> None:
    hidden, norm, weight = draw(5, 32), positive(32), draw(16, 32, seed=1)
    divided, scale = scale_norm(norm, torch.exp(draw(32, seed=2)))
    before = rms_norm(hidden, (32,), norm) @ weight.T
    after = rms_norm(hidden, (32,), divided) @ scale_inputs(weight, scale).T
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_a_16_bit_norm_is_undone_by_its_readers(dtype: torch.dtype) -> None:
    norm = positive(64).to(dtype)
    divided, scale = scale_norm(norm, torch.exp(draw(64, seed=2)))
    assert divided.dtype == dtype
    torch.testing.assert_close(divided.float() * scale, norm.float(), rtol=1e-6, atol=0)


def test_a_silent_norm_channel_keeps_its_scale() -> None:
    norm, wanted = torch.tensor([0.0, 2.0]), torch.tensor([3.0, 0.5])
    divided, scale = scale_norm(norm, wanted)
    assert torch.equal(scale, wanted)
    assert torch.equal(divided, torch.tensor([0.0, 4.0]))


def test_up_to_down() -> None:
    hidden, gate, up, down = draw(5, 16), draw(32, 16, seed=1), draw(32, 16, seed=2), draw(16, 32, seed=3)
    bias, scale = draw(32, seed=4), positive(32)
    before = (silu(hidden @ gate.T) * (hidden @ up.T + bias)) @ down.T
    eased = hidden @ scale_outputs(up, scale).T + scale_outputs(bias, scale)
    after = (silu(hidden @ gate.T) * eased) @ scale_inputs(down, scale).T
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads_per_group", [1, 2, 4])
def test_values_to_output_with_grouped_queries(heads_per_group: int) -> None:
    head_dim, query_heads, tokens = 8, 4, 6
    value_heads = query_heads // heads_per_group
    queries = draw(query_heads, tokens, head_dim, seed=1)
    keys = draw(value_heads, tokens, head_dim, seed=2)
    hidden, value, output = draw(tokens, 16, seed=3), draw(value_heads * head_dim, 16, seed=4), draw(16, 32, seed=5)

    def attend(value: Tensor, output: Tensor) -> Tensor:
        values = (hidden @ value.T).view(tokens, value_heads, head_dim).transpose(0, 1)
        spread = [each.repeat_interleave(heads_per_group, 0) for each in (keys, values)]
        mixed = scaled_dot_product_attention(queries, *spread, is_causal=True)
        return mixed.transpose(0, 1).reshape(tokens, -1) @ output.T

    scale = share_across_heads(positive(query_heads * head_dim), heads_per_group, head_dim)
    per_value = one_per_value_head(scale, heads_per_group, head_dim)
    assert per_value.shape == (value_heads * head_dim,)
    folded = attend(scale_outputs(value, per_value), scale_inputs(output, scale))
    torch.testing.assert_close(folded, attend(value, output), rtol=1e-4, atol=1e-4)


def test_folds_keep_dtypes() -> None:
    weight, scale = draw(4, 8).to(torch.bfloat16), positive(8)
    assert scale_inputs(weight, scale).dtype == torch.bfloat16
    assert scale_outputs(weight, positive(4)).dtype == torch.bfloat16
