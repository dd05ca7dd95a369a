"""The Triton loop of GPTQ and SparseGPT against torch, bit for bit where sums are exact, and with poisoned outputs."""

import pytest
import torch
from poisoned_memory import poisoned_allocations
from torch import Tensor

from compress.checkpoint.grids import IntegerGrid
from compress.checkpoint.scale_search import GroupScales, search_scales
from compress.checkpoint.weights import Int, NMSparsity, Scheme
from compress.methods.shared.column_solver import Choice, GPTQSolver, column_kernel
from compress.methods.shared.hessian import HessianFactor, HessianOptions, factorize


def layer(outputs: int, inputs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A weight `[outputs, inputs]`, and the Hessian of inputs that are correlated."""
    random = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=random) * 0.1
    mixing = torch.eye(inputs) + torch.randn(inputs, inputs, generator=random) / inputs**0.5
    rows = torch.randn(2 * inputs, inputs, generator=random) @ mixing
    return weight.to(device), (rows.T @ rows / len(rows)).to(device)


def changed(weight: Tensor, factor: HessianFactor, grid: IntegerGrid | None, on_gpu: bool, **more) -> GPTQSolver:
    with poisoned_allocations():
        columns = GPTQSolver(weight, factor.order, factor.feedback, grid, instruction_set=None, on_gpu=on_gpu, **more)
    columns.run()
    return columns


def loss(columns: GPTQSolver, hessian: Tensor) -> float:
    errors = columns.in_original_order(columns.errors).double()
    return float(((errors @ hessian.double()) * errors).sum())


@pytest.mark.parametrize("scheme", [Int(4, 32), Int(3, 32, symmetric=False), Int(8, None)], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(20, 96), (33, 64)])
def test_nearly_all_codes_are_those_of_torch(gpu, outputs: int, inputs: int, scheme: Scheme) -> None:
    weight, hessian = layer(outputs, inputs, gpu)
    factor = factorize(hessian)
    grid = IntegerGrid(search_scales(weight, scheme, factor.importance), scheme)
    by_torch, in_triton = (changed(weight, factor, grid, on_gpu) for on_gpu in (False, True))
    # One code on the verge of two that falls to the other side changes what its row is fed back.
    rows_apart = (by_torch.codes != in_triton.codes).any(0).float().mean()
    assert rows_apart < 0.1
    assert loss(in_triton, hessian) == pytest.approx(loss(by_torch, hessian), rel=0.01)
    new = weight.T[factor.order] - in_triton.errors
    group = factor.order // (inputs // grid.scales.scales.shape[1])
    exact = (in_triton.codes - grid.scales.zero_points.T[group].float()) * grid.scales.scales.T[group].float()
    torch.testing.assert_close(new, exact, atol=1e-6, rtol=1e-5)


def test_the_same_bits_as_torch_where_sums_are_exact(gpu) -> None:
    """Few binary digits everywhere: no order of adding rounds. Halves must go to the even code."""
    random = torch.Generator().manual_seed(0)
    weight = (torch.randint(-32, 33, (40, 48), generator=random) / 8).to(gpu)
    feedback = torch.eye(48)
    feedback.diagonal(1)[:] = torch.randint(-2, 3, (47,), generator=random) / 2
    factor = HessianFactor(feedback.to(gpu), None, torch.arange(48, device=gpu), torch.ones(48), 0.01, "", 0)
    scales = GroupScales(torch.full((40, 3), 0.5, device=gpu), torch.full((40, 3), 8, dtype=torch.uint8, device=gpu))
    grid = IntegerGrid(scales, Int(4, 16))
    by_torch, in_triton = (changed(weight, factor, grid, on_gpu) for on_gpu in (False, True))
    assert torch.equal(in_triton.codes, by_torch.codes)
    assert torch.equal(in_triton.errors, by_torch.errors)
    assert torch.equal(in_triton.targets, by_torch.targets)
    assert len(in_triton.codes.unique()) > 10


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("pruned", ["kept", "2:4", "4:8", "share"])
def test_as_good_as_torch_where_something_is_pruned(gpu, pruned: str, rounded: bool) -> None:
    weight, hessian = layer(40, 64, gpu)
    factor = factorize(hessian, HessianOptions(activation_order=False))
    scheme, more = Int(4, 32), how_pruned(pruned, weight, factor)
    grid = IntegerGrid(search_scales(weight, scheme), scheme) if rounded else None
    by_torch, in_triton = (changed(weight, factor, grid, on_gpu, **more) for on_gpu in (False, True))
    assert (by_torch.kept != in_triton.kept).float().mean() < 0.02
    assert loss(in_triton, hessian) == pytest.approx(loss(by_torch, hessian), rel=0.02)
    new = weight.T[factor.order] - in_triton.errors
    assert bool((new[~in_triton.kept] == 0).all())
    if not rounded:
        torch.testing.assert_close(in_triton.values, new, atol=1e-6, rtol=1e-5)


def how_pruned(pruned: str, weight: Tensor, factor: HessianFactor) -> dict:
    if pruned == "kept":
        return {"kept": weight.abs() > 0.05}
    pattern = NMSparsity(*map(int, pruned.split(":"))) if ":" in pruned else None
    return {"choice": Choice(factor.spread, pattern, 0.5)}


def test_neighbours_are_not_touched(gpu) -> None:
    weight, hessian = layer(33, 128, gpu)
    factor = factorize(hessian)
    scheme = Int(4, 32)
    grid = IntegerGrid(search_scales(weight, scheme), scheme)
    columns = GPTQSolver(weight, factor.order, factor.feedback, grid, on_gpu=True)
    columns.codes.fill_(77)
    before = columns.errors.clone()
    columns._gpu.change(64, 90)
    assert bool((columns.codes[:64] == 77).all())
    assert bool((columns.codes[90:] == 77).all())
    assert bool((columns.codes[64:90] < 16).all())
    assert torch.equal(columns.errors[:64], before[:64])
    assert torch.equal(columns.errors[90:], before[90:])


def test_a_gpu_takes_it_by_itself_and_what_runs_has_a_name(gpu) -> None:
    assert column_kernel(torch.device("cuda")) == "Triton"
    assert column_kernel(torch.device("cpu")).startswith(("C", "torch, column by column: "))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_chosen() -> None:
    weight, hessian = layer(16, 64, torch.device("cuda"))
    factor = factorize(hessian)
    assert GPTQSolver(weight, factor.order, factor.feedback, None)._gpu is not None
