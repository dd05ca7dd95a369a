"""Mixtures by grouped products in Triton, against the same experts one after the other in float64."""

from dataclasses import replace

import pytest
import torch
from poisoned_memory import poisoned_allocations
from products import BOUND, activations, relative_error
from tiny_models import random_weight
from torch import Tensor

from compress.checkpoint.weights import Int, Scheme
from compress.models.linear import Linear
from compress.models.mlp import MLP, Mixture
from compress.models.router import Router
from runtime.backends.base import Target
from runtime.backends.mlp import Expert, Experts
from runtime.backends.torch.linear import DenseLinear
from runtime.backends.torch.ops import TorchOps
from runtime.backends.triton.linear import W4A16_KERNEL
from runtime.backends.triton.mixture import TritonMixture, mixture_unsupported_reason
from runtime.model.expert_offload import ExpertOffload

EXPERTS, SIZE, INNER = 5, 128, 96
ROUTER = Router(Linear("gate", EXPERTS, SIZE), 2, "sigmoid", scale=1.5, bias="bias")


def experts_of(target: Target | None, *, dtype: torch.dtype = torch.float64, shared: bool = True) -> Experts:
    """Packed for a target, or dense in a dtype with the same numbers."""
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        found = torch.randn(*shape, generator=random).half()
        return found.to(dtype) if target is None else found.to(target.device, target.dtype)

    def linear(rows: int, columns: int, seed: int):
        weight = random_weight((rows, columns), Int(4, 32), seed, torch.float16)
        weight.scales.mul_(columns**-0.5)
        if target is None:
            return DenseLinear(weight.dequantize(dtype), None)
        return W4A16_KERNEL.prepare(weight, None, target)

    experts = [Expert(linear(2 * INNER, SIZE, seed), linear(SIZE, INNER, 10 + seed)) for seed in range(EXPERTS + 1)]
    scores, bias, gate = numbers(EXPERTS, SIZE) * 0.1, numbers(EXPERTS), numbers(1, SIZE) * 0.1
    rest = (experts[-1], gate) if shared else (None, None)
    return Experts(described(), scores, tuple(experts[:-1]), bias, *rest)


@pytest.mark.parametrize(("tokens", "shared"), [(1, True), (9, False)])
def test_as_experts_one_after_the_other(gpu, tokens: int, shared: bool) -> None:
    dtype = torch.float16
    exact = experts_of(None, shared=shared)
    x = activations(tokens, SIZE, dtype, gpu)
    packed = experts_of(Target(gpu, dtype), shared=shared)
    weights, chosen = packed.route(x)
    expected = exact.weighted(
        x.cpu().double(),
        weights.cpu().double(),
        chosen.cpu(),
        TorchOps(),
    )
    with poisoned_allocations():
        found = TritonMixture(packed)(x)
    assert found.dtype == dtype
    assert relative_error(found.cpu(), expected) < 3 * BOUND[dtype]


@pytest.mark.parametrize(
    ("num_slots", "tokens"),
    [(1, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in [(1, 20), (3, 9)])],
)
def test_experts_in_host_memory_give_the_same_bits(gpu, num_slots: int, tokens: int) -> None:
    packed = experts_of(Target(gpu, torch.float16), shared=tokens > 1)
    offload = ExpertOffload(num_slots, gpu)
    experts = tuple(offload.expert(each, EXPERTS) for each in packed.experts)
    cached = replace(packed, experts=experts, slots=offload.slots("model.layers.0", experts))
    x = activations(tokens, SIZE, torch.float16, gpu)
    expected = TritonMixture(packed)(x)
    with poisoned_allocations():
        assert torch.equal(TritonMixture(cached)(x), expected)
    assert cached.slots.cache.queries >= 2


def described(activation: str = "silu") -> Mixture:
    experts = [
        MLP(
            (Linear(f"{index}.gate", INNER, SIZE), Linear(f"{index}.up", INNER, SIZE)),
            Linear(f"{index}.down", SIZE, INNER),
            activation,
        )
        for index in range(EXPERTS)
    ]
    return Mixture(ROUTER, tuple(experts))


def test_refusals_say_why() -> None:
    cuda = Target(torch.device("cuda"), torch.float16)
    weights = experts_of(Target(torch.device("cpu"), torch.float16), shared=False)
    assert mixture_unsupported_reason(weights, cuda) == ""
    assert "16 bits" in mixture_unsupported_reason(weights, Target(cuda.device, torch.float32))
    assert "silu" in mixture_unsupported_reason(replace(weights, spec=described("gelu")), cuda)
    sparse = replace(described(), router=replace(ROUTER, activation="sparsemixer"))
    assert "routers" in mixture_unsupported_reason(replace(weights, spec=sparse), cuda)
    odd = replace(weights.experts[0], down=other_scheme(Int(2, 32)))
    unlike = replace(weights, experts=(odd, *weights.experts[1:]))
    assert "packed alike" in mixture_unsupported_reason(unlike, cuda)
    assert "packed alike" in mixture_unsupported_reason(experts_of(None), cuda)


def other_scheme(scheme: Scheme):
    return W4A16_KERNEL.prepare(random_weight((SIZE, INNER), scheme), None, Target(torch.device("cpu"), torch.float16))
