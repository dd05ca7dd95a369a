"""Mixtures of experts in C (`mixture.h`): the choice of experts, their products and the weighted sum in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from compress.common.errors import ToolkitError
from compress.cpu.binding import BEST, absence, function, struct_fields
from compress.models.clamped_gate import ClampedGate
from compress.models.mlp import MLP
from runtime.backends.base import Linear, Target
from runtime.backends.cpu.adapted_linear import CpuAdaptedLinear, adapters_of
from runtime.backends.cpu.huge_pages import empty_words
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.cpu.weight_layout import TYPES
from runtime.backends.mlp import Expert, Experts

MOST_EXPERTS = 1024


class Product(ctypes.Structure):
    """`Product` of mixture.h."""

    _fields_ = struct_fields("pointer weight", "int64 activations", "pointer adapters")


class ExpertAddresses(ctypes.Structure):
    """`Expert` of mixture.h."""

    _fields_ = struct_fields(("gate_up", Product), ("down", Product))


class Activation(ctypes.Structure):
    """`Activation` of norm_rope_act.h."""

    _fields_ = struct_fields("int32 kind", "float alpha limit")


ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
CHOICES = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}


def clamped(gate: ClampedGate) -> Activation:
    return Activation(2, gate.alpha, torch.tensor(gate.limit, dtype=torch.bfloat16).item())


class _Mixture(ctypes.Structure):
    """`Mixture` of mixture.h, with its `Router`."""

    _fields_ = struct_fields(
        "int64 num_experts size num_chosen num_groups num_chosen_groups",
        "int32 type choice normalizes",
        "float scale least_sum margin score_scale",
        "pointer scores bias scores_bias expert_scales",
        "int64 first_held num_held",
        "pointer experts shared shared_gate",
        ("activation", Activation),
        "int32 weighs_inputs",
    )


class CpuMixture:
    """A mixture whose linears are `CpuLinear`, with the bits that they give expert by expert.

    Attributes:
        address: of the C structure, for compiled code that computes whole layers.

    Raises:
        ValueError: the library is not built; by a call, linears of another kind.
    """

    def __init__(self, weights: Experts, instruction_set: int = BEST) -> None:
        self._run = function("mixture", c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int)
        self._route = function("mixture_route", c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int)
        self._instruction_set, router, mlp = instruction_set, weights.spec.router, weights.spec.experts[0]
        numbers = weights.bias, weights.scores_bias, weights.expert_scales
        tensors = [None if t is None else t.float().contiguous() for t in numbers]
        tensors += [None if t is None else t.contiguous() for t in (weights.scores, weights.shared_gate)]
        _move_together(weights.experts)
        self._adapters = adapters_of(linears_of(weights))
        experts = (ExpertAddresses * len(weights.experts))(*map(_expert, weights.experts))
        shared = None if weights.shared is None else _expert(weights.shared)
        self._kept = weights, tensors, experts, shared  # their memory is what the structure points at
        bias, scores_bias, scales, scores, gate = (None if t is None else t.data_ptr() for t in tensors)
        self._mixture = _Mixture(
            num_experts=len(weights.scores),
            size=weights.scores.shape[1],
            num_chosen=router.num_chosen,
            num_groups=router.num_groups,
            num_chosen_groups=router.num_chosen_groups,
            type=TYPES[weights.scores.dtype],
            choice=CHOICES[router.activation],
            normalizes=router.normalizes,
            scale=router.scale,
            least_sum=router.least_sum,
            margin=router.margin,
            score_scale=router.score_scale,
            scores=scores,
            bias=bias,
            scores_bias=scores_bias,
            expert_scales=scales,
            first_held=weights.spec.first_held,
            num_held=len(experts),
            experts=ctypes.addressof(experts),
            shared=None if shared is None else ctypes.addressof(shared),
            shared_gate=gate,
            activation=Activation(ACTIVATIONS[mlp.activation]) if mlp.clamped is None else clamped(mlp.clamped),
            weighs_inputs=router.weighs_inputs,
        )
        self.address = ctypes.addressof(self._mixture)

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Computes `[T, H]` of bfloat16 `x [T, H]`; a row of the result depends on its row of x alone.

        Args:
            routed: `[T, H]`, what the router reads instead of `x`.

        Raises:
            ToolkitError: no memory, or not the instruction set that was asked for.
        """
        x = x.contiguous()
        out, routed = torch.empty_like(x), None if routed is None else routed.contiguous()
        slots = None if self._adapters is None else self._adapters.of_rows(len(x))
        where = (None if each is None else each.data_ptr() for each in (x, routed, slots, out))
        self._check(self._run(self.address, len(x), *where, self._instruction_set))
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
            reason = "this machine lacks the instruction set, or is out of memory"
            raise ToolkitError(f"a compiled mixture failed: {reason}", "Use --linear-backend reference")


def _move_together(experts: Sequence[Expert]) -> None:
    """Moves the words of all experts, each too small for huge pages, into one piece of memory; prepared ones stay in
    their file."""
    both = (linear for each in experts for linear in (each.gate_up, each.down))
    linears = [linear for linear in both if isinstance(linear, CpuLinear) and not linear.is_prepared]
    sizes = [linear.num_words for linear in linears]
    for linear, memory in zip(linears, empty_words(sum(sizes)).split(sizes), strict=True):
        linear.move_words(memory)


def linears_of(weights: Experts) -> list[Linear]:
    """Returns the linears of all experts."""
    experts = (*weights.experts, *(() if weights.shared is None else (weights.shared,)))
    return [linear for expert in experts for linear in (expert.gate_up, expert.down)]


def _expert(weights: Expert) -> ExpertAddresses:
    return ExpertAddresses(product(weights.gate_up), product(weights.down))


def product(linear: Linear) -> Product:
    """Returns the addresses of a linear in C, and of its adapters. Raises ValueError for another one."""
    if isinstance(linear, CpuAdaptedLinear):
        return Product(linear.base.address, linear.base.activations, linear.address)
    if not isinstance(linear, CpuLinear):
        raise ValueError(f"{type(linear).__name__} is not a linear in C")
    return Product(linear.address, linear.activations)


def _is_compiled(mlp: MLP) -> bool:
    return mlp.gated and not mlp.curve and (mlp.clamped is not None or mlp.activation in ACTIVATIONS)


def mixture_unsupported_reason(weights: Experts, target: Target) -> str:
    """Why a mixture cannot be computed in C on a target; "" when it can."""
    if target.device.type != "cpu" or target.dtype != torch.bfloat16:
        return "takes bfloat16 on CPUs"
    if absence():
        return f"is not there: {absence()}"
    kinds = {(mlp.activation, mlp.clamped) for mlp in weights.spec.mlps}
    if len(kinds) > 1 or not all(map(_is_compiled, weights.spec.mlps)):
        return f"computes experts that are all gated by one of {', '.join(ACTIVATIONS)}, or by a clamped gate"
    if len(weights.scores) > MOST_EXPERTS:
        return f"takes at most {MOST_EXPERTS} experts"
    others = {type(each).__name__ for each in linears_of(weights) if not isinstance(each, CpuLinear | CpuAdaptedLinear)}
    return f"takes linears in C only, not {', '.join(sorted(others))}" if others else ""
