"""Mixtures of experts in C (`mixture.h`): the choice of experts, their products and the weighted sum in one call."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from compress.common.errors import ToolkitError
from compress.cpu.binding import BEST, absence, function
from compress.models.spec import Mixture
from runtime.backends.base import ExpertWeights, Linear, MixtureWeights, Target
from runtime.backends.cpu.linear import TYPES, CpuLinear
from runtime.backends.fused_layers import is_gated_silu, is_plain_mixture

MOST_EXPERTS = 1024


class Product(ctypes.Structure):
    """`Product` of mixture.h."""

    _fields_ = (("weight", c_void_p), ("activations", c_int64))


class ExpertAddresses(ctypes.Structure):
    """`Expert` of mixture.h."""

    _fields_ = (("gate_up", Product), ("down", Product))


class _Mixture(ctypes.Structure):
    """`Mixture` of mixture.h, with its `Router`."""

    _fields_ = (
        *((name, c_int64) for name in ("num_experts", "size", "num_chosen", "num_groups", "num_chosen_groups")),
        *((name, c_int32) for name in ("type", "sigmoid", "normalizes")),
        ("scale", c_float),
        ("least_sum", c_float),
        *((name, c_void_p) for name in ("scores", "bias", "experts", "shared", "shared_gate")),
    )


class CpuMixture:
    """A mixture whose linears are `CpuLinear`, with the bits that they give expert by expert.

    Attributes:
        address: of the C structure, for compiled code that computes whole layers.

    Raises:
        ValueError: there is no library; by a call, linears of another kind.
    """

    def __init__(self, weights: MixtureWeights, instruction_set: int = BEST) -> None:
        self._run = function("mixture", c_void_p, c_int64, c_void_p, c_void_p, c_int)
        self._route = function("mixture_route", c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int)
        self._instruction_set, router = instruction_set, weights.router
        tensors = [None if t is None else t.contiguous() for t in (weights.scores, weights.bias, weights.shared_gate)]
        experts = (ExpertAddresses * len(weights.experts))(*map(_expert, weights.experts))
        shared = None if weights.shared is None else _expert(weights.shared)
        self._kept = weights, tensors, experts, shared  # their memory is what the structure points at
        scores, bias, gate = (None if t is None else t.data_ptr() for t in tensors)
        self._mixture = _Mixture(
            num_experts=len(experts),
            size=weights.scores.shape[1],
            num_chosen=router.num_chosen,
            num_groups=router.num_groups,
            num_chosen_groups=router.num_chosen_groups,
            type=TYPES[weights.scores.dtype],
            sigmoid=router.activation == "sigmoid",
            normalizes=router.normalizes,
            scale=router.scale,
            least_sum=router.least_sum,
            scores=scores,
            bias=bias,
            experts=ctypes.addressof(experts),
            shared=None if shared is None else ctypes.addressof(shared),
            shared_gate=gate,
        )
        self.address = ctypes.addressof(self._mixture)

    def __call__(self, x: Tensor) -> Tensor:
        """Computes `[T, H]` of bfloat16 `x [T, H]`; a row of the result depends on its row of x alone.

        Raises:
            ToolkitError: no memory, or not the instruction set that was asked for.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        self._check(self._run(self.address, len(x), x.data_ptr(), out.data_ptr(), self._instruction_set))
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns float32 weights `[T, k]` and int64 experts `[T, k]` in ascending order. Raises as a call does."""
        x, shape = x.contiguous(), (len(x), self._mixture.num_chosen)
        weights, chosen = torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        where = x.data_ptr(), chosen.data_ptr(), weights.data_ptr()
        self._check(self._route(self.address, len(x), *where, self._instruction_set))
        return weights, chosen

    def _check(self, status: int) -> None:
        if status:
            reason = "this machine lacks the instruction set, or there is no memory"
            raise ToolkitError(f"a compiled mixture failed: {reason}", "Use --linear-backend reference")


def _expert(weights: ExpertWeights) -> ExpertAddresses:
    return ExpertAddresses(product(weights.gate_up), product(weights.down))


def product(linear: Linear) -> Product:
    """Returns the address of a linear in C. Raises ValueError for another one."""
    if not isinstance(linear, CpuLinear):
        raise ValueError(f"{type(linear).__name__} is no linear in C")
    return Product(linear.address, linear.activations)


def mixture_unsupported_reason(mixture: Mixture, weights: MixtureWeights, target: Target) -> str:
    """Why a mixture cannot be computed in C on a target; "" when it can."""
    if target.device.type != "cpu" or target.dtype != torch.bfloat16:
        return "takes bfloat16 on CPUs"
    if absence():
        return f"is not there: {absence()}"
    if not is_plain_mixture(mixture) or not all(is_gated_silu(mlp) for mlp in mixture.mlps):
        return "computes experts with gated silu, and plain routers"
    if len(weights.experts) > MOST_EXPERTS:
        return f"takes at most {MOST_EXPERTS} experts"
    experts = (*weights.experts, *(() if weights.shared is None else (weights.shared,)))
    linears = (linear for expert in experts for linear in (expert.gate_up, expert.down))
    others = {type(linear).__name__ for linear in linears} - {CpuLinear.__name__}
    return f"takes linears in C only, not {', '.join(sorted(others))}" if others else ""
