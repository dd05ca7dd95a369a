"""Compiled ops between linears: as exact as their output, the bits of torch, and no writes outside of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from compress.cpu.binding import best_instruction_set, library, set_threads
from compress.models.clamped_gate import ClampedGate
from compress.models.rope import Rope
from runtime.backends.base import NormWeights, Target
from runtime.backends.cpu.layers import CpuOps
from runtime.backends.registry import choose_ops
from runtime.backends.torch.ops import TorchOps
from runtime.model.rotary import Rotary

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
EPS = 1e-5


def numbers(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).bfloat16()


def close(found: Tensor, expected: Tensor) -> None:
    """Within the rounding of a few bfloat16 steps of a float64 result."""
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 48), (17, 2048), (40, 1040)])
def test_add_and_norm(rows: int, size: int, instruction_set: int) -> None:
    hidden, update, weight = numbers(rows, size, spread=3), numbers(rows, size, seed=1), numbers(size, seed=2)
    exact = hidden.double() + update.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    ours, theirs = hidden.clone(), hidden.clone()
    found = CpuOps(instruction_set).add_rms_norm(ours, update, weight, EPS)
    close(found, expected)
    by_torch = TorchOps().add_rms_norm(theirs, update, weight, EPS)
    assert torch.equal(ours, theirs)
    assert (found != by_torch).float().mean() < 0.01  # sums are added in another order
    before = ours.clone()
    assert torch.equal(CpuOps(instruction_set).add_rms_norm(ours, None, weight, EPS), found)
    assert torch.equal(ours, before)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (5, 3, 256), (3, 24)])
def test_a_norm_with_a_wide_weight_is_rounded_once(shape: tuple[int, ...], instruction_set: int) -> None:
    hidden, weight = numbers(*shape, spread=3), numbers(shape[-1], seed=2).float() + 1.001
    norm, exact, before = NormWeights(weight, EPS), hidden.double(), hidden.clone()
    found = CpuOps(instruction_set).normalize(hidden.transpose(0, -2).contiguous().transpose(0, -2), norm)
    expected = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    assert found.dtype == torch.bfloat16
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 32), (5, 6, 64), (20, 9, 96), (3, 2, 256)])
def test_rotation_leaves_values_alone(rows: int, heads: int, dim: int, normed: bool, instruction_set: int) -> None:
    fused = numbers(rows, heads + 2, dim)
    weight = numbers(heads, dim, seed=1) if normed else None
    rotary = Rotary(Rope("default", 1e4, {}), dim, torch.bfloat16, torch.device("cpu"))
    cos, sin = rotary.at(torch.arange(rows) * 7)
    expected = TorchOps().rotate(fused[:, :heads], weight, EPS, cos, sin)
    ours = fused.clone()
    found = CpuOps(instruction_set).rotate(ours[:, :heads], weight, EPS, cos, sin)
    close(found, exactly_rotated(fused[:, :heads], weight, cos, sin))
    assert (found != expected).float().mean() < (0.01 if normed else 1e-9)
    assert torch.equal(ours[:, heads:], fused[:, heads:])


def exactly_rotated(heads: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    x = heads.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return x * cos.double() + x.roll(x.shape[-1] // 2, -1) * sin.double()


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (7, 80), (33, 1040)])
def test_gating(rows: int, size: int, instruction_set: int) -> None:
    gate_up = numbers(rows, 2 * size, spread=20)
    gate, up = gate_up.double().chunk(2, -1)
    found = CpuOps(instruction_set).silu_and_mul(gate_up)
    torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, rtol=0.02, atol=1e-30)
    assert (found != TorchOps().silu_and_mul(gate_up)).float().mean() < 0.001


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("rows", [1, 33])
def test_other_gates(rows: int, instruction_set: int) -> None:
    gate_up, ops, clamped = numbers(rows, 2080, spread=5), CpuOps(instruction_set), ClampedGate(1.702, 3.0)
    gate, up = gate_up.double().chunk(2, -1)
    found = ops.activate_and_mul(gate_up, "gelu_pytorch_tanh")
    exact = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=1e-5)
    assert (found != TorchOps().activate_and_mul(gate_up, "gelu_pytorch_tanh"))[gate > -2].float().mean() < 0.001
    assert torch.equal(ops.activate_and_mul(gate_up, "relu"), TorchOps().activate_and_mul(gate_up, "relu"))
    found = ops.clamp_and_mul(gate_up, clamped)
    torch.testing.assert_close(found.double(), clamped(gate, up), rtol=0.02, atol=0.02)
    assert (found != TorchOps().clamp_and_mul(gate_up, clamped)).float().mean() < 0.001


@pytest.mark.parametrize("rows", [1, 200])
def test_rows_do_not_depend_on_others_or_on_threads(rows: int) -> None:
    hidden, update, weight = numbers(rows, 512), numbers(rows, 512, seed=1), numbers(512, seed=2)
    gate_up = numbers(rows, 1024)
    alone = CpuOps().add_rms_norm(hidden[:1].clone(), update[:1], weight, EPS)
    try:
        for threads in (1, 2, 3):
            set_threads(threads)
            assert torch.equal(CpuOps().add_rms_norm(hidden.clone(), update, weight, EPS)[:1], alone)
            assert torch.equal(CpuOps().silu_and_mul(gate_up)[-1:], CpuOps().silu_and_mul(gate_up[-1:]))
    finally:
        set_threads(0)


@pytest.mark.parametrize("instruction_set", SETS)
def test_what_is_not_finite_stays_so_in_its_row(instruction_set: int) -> None:
    hidden, weight, gate_up = numbers(2, 64), numbers(64), numbers(2, 128)
    hidden[0, 3] = gate_up[0, 3] = torch.nan
    ops = CpuOps(instruction_set)
    gated = [ops.silu_and_mul(gate_up), ops.activate_and_mul(gate_up, "gelu_pytorch_tanh")]
    gated += [ops.clamp_and_mul(part, ClampedGate(1.7, 7.0)) for part in (gate_up, gate_up.roll(64, -1))]
    for found in (ops.add_rms_norm(hidden, None, weight, EPS), *gated):
        assert not bool(found[0].isfinite().all())
        assert bool(found[1].isfinite().all())


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="set 7"):
        CpuOps(7).silu_and_mul(numbers(1, 32))


class _Sizes:
    spec, intermediate_size, head_dims = SimpleNamespace(hidden_size=64), 96, (32,)


@pytest.mark.parametrize(
    ("changed", "dtype", "device", "kernels", "said"),
    [
        ({}, torch.bfloat16, "cpu", "auto", ""),
        ({}, torch.float64, "cpu", "auto", "float64"),
        ({}, torch.bfloat16, "cuda", "auto", "one launch"),
        ({}, torch.float32, "cuda", "auto", "16 bits"),
        ({}, torch.bfloat16, "cpu", "reference", "reference"),
        ({"intermediate_size": 100}, torch.bfloat16, "cpu", "auto", "100"),
        ({"head_dims": (16, 32)}, torch.bfloat16, "cpu", "auto", "16"),
    ],
)
def test_the_choice_has_a_reason(
    changed: dict[str, Any], dtype: torch.dtype, device: str, kernels: str, said: str
) -> None:
    sizes: Any = type("Changed", (_Sizes,), changed)()
    choice = choose_ops(sizes, Target(torch.device(device), dtype), kernels)
    assert isinstance(choice.kernel, TorchOps if said else CpuOps)
    assert said in choice.reason
