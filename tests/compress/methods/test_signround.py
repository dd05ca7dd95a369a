"""Learned rounding: its start, its gradients, what learning gives, and what it leaves alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.integer import IntegerWeight
from compress.methods.gptq import quantize_gptq
from compress.methods.shared.hessian import HessianOptions, factorize
from compress.methods.shared.learned_rounding import LARGEST_OFFSET, Learned, LearnedRounding, learn

SCHEMES = [Int(bits, group, symmetric) for bits in (2, 3, 4, 8) for group in (32, None) for symmetric in (True, False)]
STEPS = 200


def random_weight(rows: int = 24, columns: int = 128) -> Tensor:
    return 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def correlated_inputs(tokens: int = 512, columns: int = 128) -> Tensor:
    """A few features and some noise: rounding to nearest, column by column, is far from the best there is."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(tokens, 16, generator=generator) @ torch.randn(16, columns, generator=generator)
    return features / 4 + 0.3 * torch.randn(tokens, columns, generator=generator)


def output_error(weight: Tensor, values: Tensor, inputs: Tensor) -> Tensor:
    return ((values - weight) @ inputs.T).square().mean() / (weight @ inputs.T).square().mean()


def started(weight: Tensor, scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> LearnedRounding:
    return LearnedRounding(weight, scheme.round(weight, scale_dtype=dtype))


def taught(weight: Tensor, start: IntegerWeight, inputs: Tensor, seed: int = 0) -> tuple[IntegerWeight, Learned]:
    """Learned on samples of the inputs, judged on all."""
    rounding, generator = LearnedRounding(weight, start), torch.Generator().manual_seed(seed)

    def backward(_step: int) -> None:
        rows = torch.randperm(len(inputs), generator=generator)[:384]
        output_error(weight, rounding.values(), inputs[rows]).backward()

    def judge() -> float:
        return float(output_error(weight, rounding.values().detach(), inputs))

    learned = learn([rounding], backward, judge, STEPS, 1 / STEPS)
    return rounding.codes(), learned


def equal(left: IntegerWeight, right: IntegerWeight) -> bool:
    return all(torch.equal(getattr(left, each), getattr(right, each)) for each in ("qweight", "scales", "zero_points"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_begins_with_the_codes_it_is_given(scheme: Scheme, dtype: torch.dtype) -> None:
    weight, inputs = random_weight(), correlated_inputs()
    factor = factorize(2 * inputs.T @ inputs / len(inputs), HessianOptions())
    start = quantize_gptq(weight, factor, scheme, dtype)
    rounding = LearnedRounding(weight, start)
    assert equal(rounding.codes(), start)
    assert torch.equal(rounding.values(), start.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_its_values_are_those_of_its_codes_wherever_it_is(scheme: Scheme) -> None:
    rounding, generator = started(random_weight(), scheme), torch.Generator().manual_seed(5)
    for _ in range(4):
        rounding.offset.grad = torch.randn(rounding.offset.shape, generator=generator)
        rounding.stretch.grad = torch.randn(rounding.stretch.shape, generator=generator)
        rounding.descend(0.3)
        assert float(rounding.offset.detach().abs().max()) <= LARGEST_OFFSET
        assert torch.equal(rounding.values(), rounding.codes().dequantize())


def by_autograd(rounding: LearnedRounding, weight: Tensor, start: IntegerWeight) -> Tensor:
    """The same values, composed of operations whose gradients torch knows."""

    def rounded(exact: Tensor) -> Tensor:
        return exact + (exact.round() - exact).detach()

    scheme, scale, zero = start.scheme, start.scales.float(), start.zero_points.float()
    low, high = -zero * scale * rounding.stretch[0], (scheme.max_code - zero) * scale * rounding.stretch[-1]
    if scheme.symmetric:
        scale = scale * rounding.stretch[0]
    else:
        scale = (high - low) / scheme.max_code
        zero = rounded(-low / scale)
    exact = weight.unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)
    codes = rounded(exact + rounding.offset.unflatten(1, (scale.shape[1], -1))) + zero.unsqueeze(-1)
    return ((codes.clamp(0, scheme.max_code) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_pass_straight_through_rounding_and_end_at_the_clamp(symmetric: bool) -> None:
    weight, scheme = random_weight(), Int(3, 32, symmetric)
    start = scheme.round(weight, scale_dtype=torch.float32)
    # Values between the codes' borders, so that both ways of writing it begin with the same numbers.
    weight = start.dequantize() + 0.1 * start.scales.float().repeat_interleave(32, 1)
    rounding, upstream = LearnedRounding(weight, start), torch.randn(weight.shape)
    found = torch.autograd.grad(rounding.values(), (rounding.offset, rounding.stretch), upstream)
    expected = torch.autograd.grad(by_autograd(rounding, weight, start), (rounding.offset, rounding.stretch), upstream)
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scheme", [Int(2, 32), Int(3, 32), Int(3, None, False), Int(4, 64)], ids=str)
def test_learning_beats_where_it_begins(scheme: Scheme) -> None:
    weight, inputs = random_weight(), correlated_inputs()
    start = scheme.round(weight, inputs.square().mean(0))
    _, learned = taught(weight, start, inputs)
    assert learned.step > 0
    assert learned.loss_after < 0.75 * learned.loss_before


def test_equal_seeds_give_equal_codes() -> None:
    weight, inputs = random_weight(), correlated_inputs()
    start = Int(3, 32).round(weight)
    first, second = taught(weight, start, inputs), taught(weight, start, inputs)
    assert equal(first[0], second[0])
    assert first[1] == second[1]


def never_better() -> Callable[[], float]:
    losses = iter(range(1, 100))
    return lambda: float(next(losses))


def test_keeps_the_start_when_nothing_is_better() -> None:
    weight, start = random_weight(), Int(3, 32).round(random_weight())
    rounding = LearnedRounding(weight, start)
    learned = learn([rounding], lambda _: rounding.values().sum().backward(), never_better(), 20, 0.05)
    assert learned == Learned(0, 1.0, 1.0)
    assert equal(rounding.codes(), start)


def test_the_best_state_is_kept_not_the_last() -> None:
    weight = random_weight()
    rounding, losses = started(weight, Int(3, 32)), iter([3.0, 2.0, 1.0, *[4.0] * 20])
    seen: list[IntegerWeight] = []

    def judge() -> float:
        seen.append(rounding.codes())
        return next(losses)

    learned = learn([rounding], lambda _: rounding.values().sum().backward(), judge, 20, 0.05)
    assert learned == Learned(4, 3.0, 1.0)
    assert equal(rounding.codes(), seen[2])
    assert not equal(rounding.codes(), seen[-1])
