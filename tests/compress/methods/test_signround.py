"""Learned rounding: its start, its gradients, what learning gives, and what it leaves alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.weights.coded import CodedWeight
from compress.cpu.binding import BEST, best_instruction_set
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


def gradient_of(rounding: LearnedRounding, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of a loss with respect to the values of a weight."""
    values = rounding.values().requires_grad_()
    return torch.autograd.grad(loss(values), values)[0]


def taught(weight: Tensor, start: CodedWeight, inputs: Tensor, seed: int = 0) -> tuple[CodedWeight, Learned]:
    """Learned on samples of the inputs, judged on all."""
    rounding, generator = LearnedRounding(weight, start), torch.Generator().manual_seed(seed)

    def gradients(_step: int) -> list[Tensor]:
        rows = torch.randperm(len(inputs), generator=generator)[:384]
        return [gradient_of(rounding, lambda values: output_error(weight, values, inputs[rows]))]

    def judge() -> float:
        return float(output_error(weight, rounding.values(), inputs))

    learned = learn([rounding], gradients, judge, STEPS, 1 / STEPS)
    return rounding.codes(), learned


def equal(left: CodedWeight, right: CodedWeight) -> bool:
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
        rounding.descend(torch.randn(rounding.offset.shape, generator=generator), 0.3)
        assert float(rounding.offset.abs().max()) <= LARGEST_OFFSET
        assert torch.equal(rounding.values(), rounding.codes().dequantize())


def by_autograd(offset: Tensor, stretch: Tensor, weight: Tensor, start: CodedWeight) -> Tensor:
    """The same values, composed of operations whose gradients torch knows."""

    def rounded(exact: Tensor) -> Tensor:
        return exact + (exact.round() - exact).detach()

    scheme, scale, zero = start.scheme, start.scales.float(), start.zero_points.float()
    low, high = -zero * scale * stretch[0], (scheme.max_code - zero) * scale * stretch[-1]
    if scheme.symmetric:
        scale = scale * stretch[0]
    else:
        scale = (high - low) / scheme.max_code
        zero = rounded(-low / scale)
    exact = weight.unflatten(1, (scale.shape[1], -1)) / scale.unsqueeze(-1)
    codes = rounded(exact + offset.unflatten(1, (scale.shape[1], -1))) + zero.unsqueeze(-1)
    return ((codes.clamp(0, scheme.max_code) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("instruction_set", [BEST, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_pass_straight_through_rounding_and_end_at_the_clamp(
    symmetric: bool, instruction_set: int | None
) -> None:
    weight, scheme = random_weight(), Int(3, 32, symmetric)
    start = scheme.round(weight, scale_dtype=torch.float32)
    # Values between the codes' borders, so that both ways of writing it begin with the same numbers.
    weight = start.dequantize() + 0.1 * start.scales.float().repeat_interleave(32, 1)
    rounding, upstream = LearnedRounding(weight, start, instruction_set), torch.randn(weight.shape)
    rounding.offset.uniform_(-LARGEST_OFFSET, LARGEST_OFFSET, generator=torch.Generator().manual_seed(3))
    offset = rounding.offset.clone().requires_grad_()
    stretch = rounding.stretch.detach().clone().requires_grad_()
    expected = torch.autograd.grad(by_autograd(offset, stretch, weight, start), (offset, stretch), upstream)
    assert 0 < (expected[0] == 0).float().mean() < 0.5, "some codes are clamped, and most are not"
    rounding.descend(upstream, 0.25)
    wanted = (offset.detach() - 0.25 * expected[0].sign()).clamp(-LARGEST_OFFSET, LARGEST_OFFSET)
    assert torch.equal(rounding.offset, wanted)
    assert torch.equal((1 - rounding.stretch).sign(), expected[1].sign())


@pytest.mark.parametrize("instruction_set", range(best_instruction_set() + 1))
@pytest.mark.parametrize("scheme", [*SCHEMES, Int(4, 20)], ids=str)
def test_compiled_steps_are_those_of_torch(scheme: Int, instruction_set: int) -> None:
    weight = random_weight(columns=120 if scheme.group_size == 20 else 128)
    start = scheme.round(weight)
    compiled, plain = LearnedRounding(weight, start, instruction_set), LearnedRounding(weight, start, None)
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        gradient = torch.randn(weight.shape, generator=generator)
        compiled.descend(gradient, 0.1)
        plain.descend(gradient, 0.1)
        assert torch.equal(compiled.offset, plain.offset)
        # Sums in another order: the sign of a gradient that is nearly zero may differ.
        assert (compiled.stretch == plain.stretch).float().mean() > 0.9
        compiled.restore(plain.state())
        assert torch.equal(compiled.values(), plain.values())


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
    learned = learn([rounding], lambda _: [torch.ones_like(weight)], never_better(), 20, 0.05)
    assert learned == Learned(0, 1.0, 1.0)
    assert equal(rounding.codes(), start)


def test_the_best_state_is_kept_not_the_last() -> None:
    weight = random_weight()
    rounding, losses = started(weight, Int(3, 32)), iter([3.0, 2.0, 1.0, *[4.0] * 20])
    seen: list[CodedWeight] = []

    def judge() -> float:
        seen.append(rounding.codes())
        return next(losses)

    learned = learn([rounding], lambda _: [torch.ones_like(weight)], judge, 20, 0.05)
    assert learned == Learned(4, 3.0, 1.0)
    assert equal(rounding.codes(), seen[2])
    assert not equal(rounding.codes(), seen[-1])
