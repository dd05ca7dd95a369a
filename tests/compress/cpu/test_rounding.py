"""The compiled search for ranges against torch's, and against itself with other instruction sets and threads."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compress.checkpoint.scale_search import (
    GroupScales,
    encode,
    range_scales,
    range_trials,
    round_in_range,
    search_scales,
)
from compress.checkpoint.weights import Int
from compress.cpu.binding import best_instruction_set, library, set_threads
from compress.cpu.rounding import RangeTrials, search_ranges

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
SCHEMES = (Int(4, 32), Int(4, 128, symmetric=False), Int(2, 48, symmetric=False), Int(3, 20), Int(8, None))


def layer(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight `[rows, columns]` with heavy tails, and the importance of its columns."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=random)
    weight = normal * torch.exp(0.5 * torch.randn(rows, columns, generator=random)) * 0.02
    return weight, torch.exp(torch.randn(columns, generator=random))


def errors(weight: Tensor, importance: Tensor, scales: GroupScales, scheme: Int) -> Tensor:
    """Weighted squared error of each group `[O, G]`, in float64."""
    change = encode(weight, scales, scheme).dequantize(torch.float64) - weight.double()
    return (change.square() * importance.double()).unflatten(1, (scales.scales.shape[1], -1)).sum(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("instruction_set", SETS)
def test_ranges_are_those_of_torch(instruction_set: int, scheme: Int, dtype: torch.dtype) -> None:
    weight, importance = layer(24, 1920 if scheme.group_size == 128 else 480)
    found = search_scales(weight, scheme, importance, dtype, instruction_set=instruction_set)
    expected = search_scales(weight, scheme, importance, dtype, instruction_set=None)
    same = (found.scales == expected.scales) & (found.zero_points == expected.zero_points)
    assert same.double().mean() > 0.95, "only where errors are equal up to the order of their sums"
    weights = importance / importance.mean() + 1e-4
    least, others = (errors(weight, weights, each, scheme) for each in (expected, found))
    torch.testing.assert_close(others, least, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("instruction_set", SETS)
def test_codes_under_given_scales_are_those_of_torch(instruction_set: int, scheme: Int) -> None:
    weight, importance = layer(24, 1920 if scheme.group_size == 128 else 480)
    scales = search_scales(weight, scheme, importance)
    weight[:2] *= 1e6
    weight[2] = (torch.arange(weight.shape[1]) % 16 - 7.5) * scales.scales[2, 0].float()  # ties
    found = encode(weight, scales, scheme, instruction_set=instruction_set)
    assert torch.equal(found.qweight, encode(weight, scales, scheme, instruction_set=None).qweight)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_bit_depends_on_instruction_set_or_threads(scheme: Int) -> None:
    weight, importance = layer(40, 1920 if scheme.group_size == 128 else 480)
    found = []
    for threads, instruction_set in ((1, 0), *((3, each) for each in SETS)):
        set_threads(threads)
        found.append(search_scales(weight, scheme, importance, instruction_set=instruction_set))
    set_threads(0)
    assert all(torch.equal(each.scales, found[0].scales) for each in found)
    assert all(torch.equal(each.zero_points, found[0].zero_points) for each in found)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("magnitude", [0.0, 1e-41, 1e-30, 1e30])
def test_numbers_at_the_ends_of_float32(magnitude: float, symmetric: bool) -> None:
    """Groups of zeros get a scale of 1; where every squared error overflows, both keep the first range."""
    weight, scheme = layer(4, 64)[0] * magnitude, Int(4, 32, symmetric)
    found, expected = (search_scales(weight, scheme, instruction_set=each) for each in (0, None))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.zero_points, expected.zero_points)


@pytest.mark.parametrize("scheme", [Int(4, 32), Int(4, 32, symmetric=False)], ids=str)
def test_several_ranges_come_in_the_order_of_their_errors(scheme: Int) -> None:
    weight, importance = layer(24, 480)
    trials = replace(range_trials(scheme), neighbours=())
    found = search_ranges(weight, importance, 15, trials, torch.bfloat16, kept=8)
    each = torch.stack([errors(weight, importance, GroupScales(*one), scheme) for one in zip(*found, strict=True)])
    assert (each[1:] >= each[:-1] * (1 - 1e-5)).all()
    for place, one in enumerate(zip(*found, strict=True)):
        others = search_ranges(weight, importance, 15, trials, torch.bfloat16, kept=place + 1)
        assert torch.equal(others[0][place], one[0])
        assert torch.equal(others[1][place], one[1])


@pytest.mark.parametrize("scheme", [Int(4, 32), Int(4, 96, symmetric=False)], ids=str)
def test_errors_of_outputs_of_likely_ranges_are_close_to_those_of_all(scheme: Int) -> None:
    weight, _ = layer(24, 480)
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(300, 30, generator=random) @ torch.randn(30, 480, generator=random)
    inputs += torch.randn(300, 480, generator=random)

    def error(scales: GroupScales) -> float:
        change = encode(weight, scales, scheme).dequantize() - weight
        groups = [each.unflatten(1, (scales.scales.shape[1], -1)) for each in (change, inputs)]
        return float(torch.einsum("ogi,tgi->otg", *groups).square().sum())

    likely, every = (search_scales(weight, scheme, inputs=inputs, instruction_set=each) for each in (0, None))
    assert error(likely) < 1.02 * error(every)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounding_in_the_full_range_is_that_of_torch(scheme: Int) -> None:
    weight, _ = layer(24, 1920 if scheme.group_size == 128 else 480)
    found, expected = (range_scales(weight, scheme, instruction_set=each) for each in (0, None))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.zero_points, expected.zero_points)
    compiled, torchs = (round_in_range(weight, scheme, instruction_set=each) for each in (0, None))
    assert (compiled != torchs).double().mean() < 1e-3, "only a tie may fall the other way"


def test_a_column_that_is_no_view_of_whole_rows() -> None:
    weight, scheme = layer(8, 128)[0], Int(4, 32)
    narrow = weight[:, 32:96]
    found, expected = (search_scales(each, scheme) for each in (narrow, narrow.contiguous()))
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(encode(narrow, found, scheme).qweight, encode(narrow.contiguous(), found, scheme).qweight)


def test_refusals() -> None:
    weight, importance = layer(2, 64)
    with pytest.raises(ValueError, match="instruction set 99"):
        search_scales(weight, Int(4, 32), importance, instruction_set=99)
    many = RangeTrials([(1.0, 1.0)] * 65, [(1.0, 0.0)], 15, True)
    with pytest.raises(ValueError, match="65"):
        search_ranges(weight, importance, 2, many, torch.bfloat16)
