"""The compiled loop of GPTQ and SparseGPT against float64, against torch, and against itself on other machines."""

import pytest
import torch
from torch import Tensor

from compress.checkpoint.grids import IntegerGrid
from compress.checkpoint.scale_search import GroupScales, search_scales
from compress.checkpoint.weights import Int, NMSparsity, Scheme
from compress.cpu.binding import best_instruction_set, library, set_threads
from compress.cpu.gptq import LONGEST_STRETCH, ColumnGrid, CpuColumns
from compress.methods.shared.column_solver import Choice, GPTQSolver
from compress.methods.shared.hessian import HessianFactor, HessianOptions, factorize

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
SCHEMES = (Int(4, 32), Int(3, 32, symmetric=False), Int(8, None))


def layer(outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight `[outputs, inputs]`, and the Hessian of inputs that are correlated."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) * 0.1
    mixing = torch.eye(inputs) + torch.randn(inputs, inputs, generator=random) / inputs**0.5
    rows = torch.randn(2 * inputs, inputs, generator=random) @ mixing
    return weight, rows.T @ rows / len(rows)


def changed(
    weight: Tensor, factor: HessianFactor, grid: IntegerGrid | None, instruction_set: int | None, **more
) -> GPTQSolver:
    columns = GPTQSolver(weight, factor.order, factor.feedback, grid, instruction_set=instruction_set, **more)
    columns.run()
    return columns


def loss(columns: GPTQSolver, hessian: Tensor) -> float:
    errors = columns.in_original_order(columns.errors).double()
    return float(((errors @ hessian.double()) * errors).sum())


def exact_codes(weight: Tensor, factor: HessianFactor, scales: GroupScales, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes `[I, O]` in the loop's order by the definition, in float64, and how far each was from another code."""
    errors = weight.double().T[factor.order].clone()
    scale, zero = scales.scales.double().T, scales.zero_points.double().T
    size = weight.shape[1] // len(scale)
    codes, margin = torch.zeros_like(errors), torch.zeros_like(errors)
    for i, column in enumerate(factor.order.tolist()):
        target = errors[i] + errors[:i].T @ factor.feedback[:i, i].double()
        group = column // size
        steps = target / scale[group]
        codes[i] = (steps.round() + zero[group]).clamp(0, scheme.max_code)
        margin[i] = (steps - steps.floor() - 0.5).abs()
        errors[i] -= (codes[i] - zero[group]) * scale[group]
    return codes, margin


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("instruction_set", SETS)
def test_codes_are_those_of_float64(instruction_set: int, scheme: Scheme) -> None:
    weight, hessian = layer(37, 160)
    factor = factorize(hessian)
    scales = search_scales(weight, scheme, factor.importance)
    expected, margin = exact_codes(weight, factor, scales, scheme)
    # One code that falls to the other side changes what its row feeds back: rows that come that close do not count.
    clear = (margin > 1e-4).all(0)
    found = changed(weight, factor, IntegerGrid(scales, scheme), instruction_set).codes
    assert clear.float().mean() > 0.5
    assert torch.equal(found[:, clear].double(), expected[:, clear])


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("pruned", ["kept", "2:4", "4:8", "share", ""])
def test_every_instruction_set_gives_the_same_bits(outputs: int, pruned: str) -> None:
    weight, hessian = layer(outputs, 192, seed=outputs)
    factor = factorize(hessian, HessianOptions(activation_order=False))
    scheme = Int(4, 32)
    more = how_pruned(pruned, weight, factor)
    grid = IntegerGrid(search_scales(weight, scheme), scheme)
    first, *others = (changed(weight, factor, grid, instruction_set, **more) for instruction_set in SETS)
    for other in others:
        assert torch.equal(first.codes, other.codes)
        assert torch.equal(first.errors, other.errors)
        assert first.kept is None or torch.equal(first.kept, other.kept)


def how_pruned(pruned: str, weight: Tensor, factor: HessianFactor) -> dict:
    if not pruned:
        return {}
    if pruned == "kept":
        return {"kept": weight.abs() > 0.05}
    pattern = NMSparsity(*map(int, pruned.split(":"))) if ":" in pruned else None
    return {"choice": Choice(factor.spread, pattern, 0.5)}


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("pruned", ["kept", "2:4", "4:8", "share"])
def test_as_good_as_torch_where_something_is_pruned(pruned: str, rounded: bool) -> None:
    weight, hessian = layer(96, 256)
    factor = factorize(hessian, HessianOptions(activation_order=False))
    scheme, more = Int(4, 32), how_pruned(pruned, weight, factor)
    grid = IntegerGrid(search_scales(weight, scheme), scheme) if rounded else None
    by_torch, compiled = (changed(weight, factor, grid, instruction_set, **more) for instruction_set in (None, -1))
    assert (by_torch.kept != compiled.kept).float().mean() < 0.01
    assert loss(compiled, hessian) == pytest.approx(loss(by_torch, hessian), rel=0.01)
    if pruned != "share":
        assert compiled.kept.float().mean() == by_torch.kept.float().mean()
    new = weight.T[factor.order] - compiled.errors
    assert bool((new[~compiled.kept] == 0).all())
    if not rounded:
        torch.testing.assert_close(compiled.values, new, atol=1e-6, rtol=1e-5)


def test_threads_change_nothing() -> None:
    weight, hessian = layer(700, 128)
    factor = factorize(hessian)
    grid = IntegerGrid(search_scales(weight, Int(4, 32)), Int(4, 32))
    try:
        found = []
        for threads in (1, 2):
            set_threads(threads)
            found.append(changed(weight, factor, grid, -1))
    finally:
        set_threads(0)
    assert torch.equal(found[0].codes, found[1].codes)
    assert torch.equal(found[0].errors, found[1].errors)


def test_neighbours_are_not_touched() -> None:
    weight, hessian = layer(19, 128)
    factor = factorize(hessian)
    scheme = Int(4, 32)
    columns = GPTQSolver(weight, factor.order, factor.feedback, IntegerGrid(search_scales(weight, scheme), scheme))
    columns.codes.fill_(77)
    before = columns.errors.clone()
    columns._native.change(64, 112)
    assert bool((columns.codes[:64] == 77).all())
    assert bool((columns.codes[112:] == 77).all())
    assert torch.equal(columns.errors[:64], before[:64])
    assert torch.equal(columns.errors[112:], before[112:])
    assert bool((columns.codes[64:112] < 16).all())


@pytest.mark.parametrize(("count", "instruction_set"), [(LONGEST_STRETCH + 1, -1), (8, 99)])
def test_what_cannot_be_done_is_refused(count: int, instruction_set: int) -> None:
    columns = torch.zeros(128, 4)
    grid = ColumnGrid(torch.ones(1, 4), torch.zeros(1, 4), torch.zeros(128, dtype=torch.int64), 15)
    codes = torch.zeros(128, 4, dtype=torch.uint8)
    native = CpuColumns(columns, columns.clone(), torch.eye(128), codes, None, grid, None, instruction_set)
    with pytest.raises(ValueError, match=rf"\b0 .*\b{count} .* {instruction_set}$"):
        native.change(0, count)
