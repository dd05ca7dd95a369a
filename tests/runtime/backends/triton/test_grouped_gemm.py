"""Products of rows with the weights of their experts, against float64; memory is poisoned before it is written."""

import pytest
import torch
from covering import covering
from poisoned_memory import poisoned_allocations
from products import BOUND, activations, relative_error
from tiny_models import random_weight
from torch import Tensor

from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.coded import CodedWeight
from runtime.backends.triton.kernels.weight_layout import interleave

SCHEMES = [Int(4, 128), Int(4, 32, False), Int(4, None, False), Int(3, 64), Int(2, 64, False)]
ROUTES = {
    "one token": torch.tensor([[2, 0]]),
    "one expert": torch.full((20, 1), 1),
    "an expert without rows": torch.tensor([[0, 3], [3, 0], [2, 3], [0, 2], [3, 2]]),
}


def experts_of(scheme: Scheme, shape: tuple[int, int], count: int = 4) -> list[CodedWeight]:
    return [random_weight(shape, scheme, seed=seed) for seed in range(count)]


def expected(x: Tensor, weights: list[CodedWeight], chosen: Tensor, rows_per_token: int) -> Tensor:
    dense = [weight.dequantize(torch.float64).to(x.device) for weight in weights]
    rows = chosen.flatten().tolist()
    return torch.stack([dense[expert] @ x[row // rows_per_token].double() for row, expert in enumerate(rows)])


@pytest.mark.parametrize(("scheme", "route", "dtype"), covering(SCHEMES, list(ROUTES), list(BOUND)), ids=str)
def test_each_row_meets_its_expert(gpu, scheme: Scheme, route: str, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.grouped_gemm import GroupedWeight, block_rows

    chosen = ROUTES[route].to(gpu)
    weights = experts_of(scheme, (100, 288 if scheme.group_size == 32 else 256))
    grouped = GroupedWeight([interleave(weight, gpu) for weight in weights])
    tokens, per_token = chosen.shape
    for rows_per_token in {1, per_token}:
        x = activations(tokens * per_token // rows_per_token, weights[0].shape[1], dtype, gpu)
        with poisoned_allocations():
            found = grouped.product(x, block_rows(chosen, len(weights)), rows_per_token)
        assert relative_error(found, expected(x, weights, chosen, rows_per_token)) < BOUND[dtype]


def test_a_row_does_not_see_its_neighbours(gpu) -> None:
    from runtime.backends.triton.kernels.grouped_gemm import GroupedWeight, block_rows

    grouped = GroupedWeight([interleave(weight, gpu) for weight in experts_of(Int(4, 128), (64, 256))])
    chosen, x = torch.randint(4, (9, 2), device=gpu), activations(9, 256, torch.bfloat16, gpu)
    together = grouped.product(x, block_rows(chosen, 4), 2)
    alone = grouped.product(x[4:5], block_rows(chosen[4:5], 4), 2)
    assert torch.equal(alone, together[8:10])


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_blocks_hold_every_row_once_and_one_expert_each(tokens: int) -> None:
    from runtime.backends.triton.kernels.grouped_gemm import block_rows

    chosen = torch.rand(tokens, 5, generator=torch.Generator().manual_seed(tokens)).topk(2, -1).indices
    blocks = block_rows(chosen, 5)
    owners = blocks.experts.repeat_interleave(blocks.block_m)
    used = blocks.rows < blocks.num_rows
    assert sorted(blocks.rows[used].tolist()) == list(range(2 * tokens))
    assert torch.equal(chosen.flatten()[blocks.rows[used].long()], owners[used].long())
    assert not used[owners < 0].any()
