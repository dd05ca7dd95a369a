"""Backends by name, and the one place that chooses what computes what, with the reasons."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from compress.checkpoint.activations import AS_STORED, EIGHT_BITS
from compress.checkpoint.weights import Scheme, Weight
from compress.common.errors import SchemeError
from compress.models.mixers.mixer import Mixer
from runtime.backends.adapted_linear import AdaptedLinear, Places, StepAdapters
from runtime.backends.backend import (
    BACKENDS,
    NO_ATTENTION,
    AttentionKernel,
    AttentionStep,
    Backend,
    Compiler,
    DenseKernel,
    FusedSampling,
    LayersStep,
    LinearKernel,
    SamplingKernel,
)
from runtime.backends.base import Linear, Ops, Target
from runtime.backends.kv_pages import KVCache
from runtime.backends.latent import LatentHeadsKernel
from runtime.backends.measured import Verdict
from runtime.backends.mlp import ComputeMixture, Experts
from runtime.backends.model import Model
from runtime.backends.state_kernels import StateSteps
from runtime.backends.torch.quantized_linear import REFERENCE as REFERENCE_KERNEL
from runtime.backends.torch.quantized_linear import RoundedInputs
from runtime.core.memory_plan import MemoryPlan
from runtime.core.model_config import DecoderConfig

logger = logging.getLogger("runtime.backends")

AUTO, REFERENCE = "auto", "reference"
FORMER_NAME = "w4a8"
"""Former name of the mode with 8-bit activations, which is an option of its own."""
EXPANDED = "zeros of {} are expanded at load: no kernel leaves them out on a GPU"

Chosen = TypeVar("Chosen")


@dataclass(frozen=True, slots=True)
class Choice(Generic[Chosen]):
    """A kernel.

    Attributes:
        reason: why it and none before it.
        shown: what it does, and why a faster one is not taken.
    """

    kernel: Chosen
    reason: str
    shown: str


def _prepare_dequantized(weight: Weight, bias: Tensor | None, target: Target) -> Linear:
    kernel = choose_dense(*weight.shape, target).kernel
    linear = kernel.prepare(weight.dequantize(target.dtype).to(target.device), bias)
    return RoundedInputs(linear) if weight.scheme.activation_bits else linear


def _dequantized_nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    return choose_dense(rows, columns, target).kernel.nbytes(rows, columns, target)


DEQUANTIZED = LinearKernel(
    "dequantized",
    "dequantized once at load: dense speed, dense memory",
    "",
    lambda scheme, in_features, target: (
        "keeps activations in 16 bits" if scheme.activations and scheme.activations.numbers == "int" else ""
    ),
    _prepare_dequantized,
    _dequantized_nbytes,
    lambda columns, target: choose_dense(columns, columns, target).kernel.reads_rows,
    is_dense=True,
)


def linear_kernels() -> list[LinearKernel[Any]]:
    """Kernels of quantized weights, in order of preference."""
    kernels = [kernel for backend in BACKENDS.values() for kernel in backend.linears]
    saving = [kernel for kernel in kernels if kernel.saves_memory]
    return [*(kernel for kernel in kernels if not kernel.saves_memory), DEQUANTIZED, *saving, REFERENCE_KERNEL]


def dense_kernels() -> list[DenseKernel]:
    """Kernels of weights that are not quantized, in order of preference; the last one supports everything."""
    return [kernel for backend in BACKENDS.values() for kernel in backend.dense]


def modes() -> list[str]:
    """Preferences: `auto` and `stored` take the fastest kernel, the latter with inputs rounded as the checkpoint says;
    others are names of modes of single kernels."""
    names = [kernel.mode for kernel in linear_kernels()] + [kernel.mode for kernel in dense_kernels()]
    return list(dict.fromkeys([AUTO, AS_STORED, *filter(None, names)]))


def check_name(kernels: str) -> None:
    """Raises SchemeError for a name of neither a mode nor a kernel of quantized weights."""
    names = list(dict.fromkeys([*modes(), *(kernel.name for kernel in linear_kernels() if not kernel.mode)]))
    names += [kernel.name for kernel in linear_kernels() if kernel.mode]
    if kernels == FORMER_NAME:
        raise SchemeError(f"{kernels} is no longer a kernel", f"Use --activations {EIGHT_BITS}")
    if kernels not in names:
        raise SchemeError.unknown("kernel", kernels, names, "Use --linear-backend")


def is_fast(dtype: torch.dtype) -> bool:
    """Whether CPUs like this one multiply matrices of a dtype in vectors; 16-bit ones are ten times slower without."""
    return any(backend.is_fast(dtype) for backend in BACKENDS.values())


def choose_linear(
    scheme: Scheme,
    in_features: int,
    target: Target,
    kernels: str = AUTO,
    excluded: Mapping[str, str] | None = None,
    of_expert: bool = False,
) -> Choice[LinearKernel[Any]]:
    """The first kernel that supports a quantized linear.

    Args:
        kernels: a mode, or the name of a kernel that must be used.
        excluded: names of kernels that may not be chosen, with the reason.
        of_expert: it is part of a mixture, whose products were not measured one by one.

    Raises:
        SchemeError: an unknown name, or a named kernel that does not support this scheme here.
    """
    if kernels not in modes():
        return _named(scheme, in_features, target, kernels, excluded or {})
    reasons = [EXPANDED.format(scheme.sparsity)] if scheme.sparsity and target.device.type == "cuda" else []
    verdicts = _verdicts(scheme, in_features, target) if kernels in (AUTO, AS_STORED) and not of_expert else []
    faster = [each for each in verdicts if each.verdict.is_faster]
    reasons += [str(each) for each in verdicts if not each.unsupported]
    left_out = [str(each) for each in faster if each.unsupported or each.kernel.on_request]
    for kernel in [*(each.kernel for each in faster if not each.kernel.on_request), *_preferred(kernels)]:
        reason: str | None = None
        if kernel.takes(scheme):
            reason = (excluded or {}).get(kernel.name) or kernel.unsupported_reason(scheme, in_features, target)
        elif kernel.mode:
            reason = "multiplies by another form of numbers"
        if reason == "":
            own = [*(k.name for each in _own(target.device) for k in each.linears), *(excluded or {})]
            return _choice(kernel, [*_summary(kernel, scheme), *left_out], reasons, own)
        if reason is not None:
            reasons.append(f"{kernel.name} {reason}")
    raise SchemeError(f"no kernel serves {scheme}: {'; '.join(reasons)}")


class _Measured(NamedTuple):
    """A kernel whose place measurements decide, with these, and why it cannot serve a linear."""

    kernel: LinearKernel[Any]
    verdict: Verdict
    unsupported: str

    def __str__(self) -> str:
        on_request = self.kernel.on_request if self.verdict.is_faster else ""
        return ": it ".join(filter(None, (f"{self.kernel.name} {self.verdict.reason}", self.unsupported or on_request)))


def _verdicts(scheme: Scheme, in_features: int, target: Target) -> list[_Measured]:
    linear = scheme, in_features, target
    return [
        _Measured(kernel, kernel.verdict(*linear), kernel.unsupported_reason(*linear))
        for kernel in linear_kernels()
        if kernel.verdict and kernel.takes(scheme)
    ]


def _preferred(mode: str) -> list[LinearKernel[Any]]:
    """Kernels of a mode first; those of other modes are left out."""
    kernels = linear_kernels()
    return [k for k in kernels if k.mode and k.mode == mode] + [k for k in kernels if not k.mode]


def _named(
    scheme: Scheme, in_features: int, target: Target, name: str, excluded: Mapping[str, str]
) -> Choice[LinearKernel[Any]]:
    check_name(name)
    kernel = next(kernel for kernel in linear_kernels() if kernel.name == name)
    reason = "multiplies by another form of numbers"
    if kernel.takes(scheme):
        reason = excluded.get(name) or kernel.unsupported_reason(scheme, in_features, target)
    if reason:
        raise SchemeError(f"kernel {name} cannot serve {scheme}: it {reason}", f"Choose {AUTO} or {REFERENCE}")
    return _choice(kernel, ["asked for", *_summary(kernel, scheme)])


def _own(device: torch.device) -> list[Backend]:
    """Backends that were written for a kind of device, whose kernels are the fast ones there."""
    return [backend for backend in BACKENDS.values() if backend.device == device.type]


def _choice(
    kernel: Chosen, about: Sequence[str], reasons: Sequence[str] = (), own: Collection[str] = ()
) -> Choice[Chosen]:
    """A choice whose shown text has one reason at most: the last one against `own`, kernels that would be faster,
    where none of these is taken."""
    is_own = getattr(kernel, "name", "") in own
    slower = [] if is_own else [reason for reason in reasons if reason.partition(" ")[0] in own][-1:]
    shown = [part.partition("; ")[0] for part in about]  # without the reasons of instructions
    return Choice(kernel, "; ".join([*about, *reasons]), "; ".join([*shown, *slower]))


def _summary(kernel: LinearKernel[Any], scheme: Scheme) -> list[str]:
    return list(filter(None, [kernel.summary, kernel.detail(scheme)]))


def choose_dense(
    out_features: int, in_features: int, target: Target, kernels: str = AUTO, weight: Tensor | None = None
) -> Choice[DenseKernel]:
    """The first kernel that supports a weight that is not quantized; `reference` asks for the last one.

    Args:
        kernels: a mode, or the name of a kernel of quantized weights.
        weight: `[O, I]`; without it kernels that gain from its values are left out.
    """
    found = dense_kernels()
    if kernels == REFERENCE:
        return _choice(found[-1], ["asked for", found[-1].summary])
    own = [kernel.name for each in _own(target.device) for kernel in each.dense]
    reasons: list[str] = []
    for kernel in sorted(found, key=lambda kernel: kernel.mode != kernels):
        if kernel.mode and weight is None:
            continue
        reason = kernel.unsupported_reason(out_features, in_features, target)
        if kernel.mode and weight is not None:
            if (reason and kernels != kernel.mode) or not kernel.suits(weight):
                continue
            if kernels != kernel.mode:
                reasons.append(kernel.note)
                continue
        if not reason:
            asked = ["asked for"] if kernel.mode else []
            return _choice(kernel, [*asked, kernel.summary], reasons, own)
        reasons.append(f"{kernel.name} {reason}")
    raise SchemeError(f"no kernel serves dense weights: {'; '.join(reasons)}")


def choose_ops(config: DecoderConfig, target: Target, kernels: str = AUTO) -> Choice[Ops]:
    """Operations between linears; `reference` asks for plain torch."""
    found = [(backend, backend.ops) for backend in _suited(target.device) if backend.ops is not None]
    if kernels == REFERENCE:
        return _choice(found[-1][1].prepare(), [f"{REFERENCE} kernels are plain torch"])
    backend, ops, reason = _first(found, lambda ops: ops.unsupported_reason(config, target))
    full = "; ".join(filter(None, [ops.summary, reason]))
    return Choice(ops.prepare(), full, full if backend.is_fallback else ops.summary)


def turned_linear(linear: Linear, inputs: int, order: int, target: Target, kernels: str = AUTO) -> Linear:
    """Returns a linear that multiplies its inputs by Hadamard matrices of an order first, by the first backend that
    can, or by plain torch where `reference` is asked for."""
    turns = [backend.turned for backend in _suited(target.device) if backend.turned is not None]
    found = (turn(linear, inputs, order, target) for turn in (turns[-1:] if kernels == REFERENCE else turns))
    return next(each for each in found if each is not None)


def adapted_linear(linear: Linear, places: Places, step: StepAdapters, target: Target) -> AdaptedLinear:
    """Returns a linear that adds the products of adapters, by the first kernel that can."""
    found = [(backend, backend.adapted) for backend in _suited(target.device) if backend.adapted is not None]
    _, kernel, _ = _first(found, lambda adapted: adapted.unsupported_reason(linear, places, target))
    return kernel.prepare(linear, places, step, target)


def adapted_mixture(weights: Experts, target: Target) -> ComputeMixture | None:
    """Returns what computes a mixture with adapted linears at once, if anything does."""
    found = (
        backend.mixture for backend in _suited(target.device) if backend.mixture and backend.mixture.takes_adapters
    )
    return next((each.prepare(weights) for each in found if not each.unsupported_reason(weights, target)), None)


def choose_state_steps(mixer: Mixer, weights: Any, target: Target, kernels: str = AUTO) -> StateSteps:
    """The first kernels of a mixer with these weights: for decode, and for all other steps."""
    if kernels == REFERENCE:
        return StateSteps(reason=REFERENCE)
    decode = spans = None
    reasons: list[str] = []
    for backend in _suited(target.device):
        for kernel in backend.states:
            if not isinstance(mixer, kernel.mixer) or (decode and (spans or kernel.only_decode)):
                continue
            if unsupported := kernel.unsupported_reason(mixer, weights, target):
                reasons.append(f"{backend.name} {unsupported}")
                continue
            step = kernel.prepare(mixer, weights, target)
            decode, spans = decode or step, spans if kernel.only_decode else step
            reasons.append(f"{backend.name}: {kernel.summary}")
    if spans is None:
        reasons.append("plain torch for spans" if decode else "plain torch")
    return StateSteps(decode, spans, "; ".join(reasons))


def choose_latent_heads(
    scheme: Scheme, rank: int, target: Target, kernels: str = AUTO
) -> Choice[LatentHeadsKernel | None]:
    """The first kernel that multiplies packed weights between latents and heads; None where they are dequantized."""
    if kernels == REFERENCE:
        return _choice(None, [f"{REFERENCE} dequantizes at load"])
    reasons = []
    for backend in _suited(target.device):
        if backend.latent_heads is None:
            continue
        if not (reason := backend.latent_heads.unsupported_reason(scheme, rank, target)):
            return _choice(backend.latent_heads, [f"{backend.name} multiplies packed weights"])
        reasons.append(f"{backend.name} {reason}")
    return _choice(None, ["dequantized at load", *reasons])


def choose_mixture(weights: Experts, target: Target, kernels: str = AUTO) -> Choice[ComputeMixture | None]:
    """The first kernel that computes a mixture at once; None where the decoder goes from expert to expert."""
    if kernels == REFERENCE:
        return _choice(None, [f"{REFERENCE} goes from expert to expert"])
    reasons: list[str] = []
    for backend in _suited(target.device):
        if backend.mixture is None:
            continue
        reason = backend.mixture.unsupported_reason(weights, target)
        if not reason:
            return _choice(backend.mixture.prepare(weights), [backend.mixture.summary], reasons)
        reasons.append(f"{backend.name} {reason}")
    return _choice(None, ["expert by expert", *reasons])


@dataclass(frozen=True, slots=True)
class StepKernels:
    """Kernels of the steps of one runner.

    Attributes:
        attention: the attention of a step, from its batch.
        attention_reason: which one it is; why none before it if it is a fallback.
        layers: all layers of a step at once; None where the decoder goes from layer to layer.
        layers_reason: which one it is; without one, why.
        windows: sliding window of every layer; None is none.
        records: steps of one token per sequence can be captured in CUDA graphs; also those of models with recurrent
            layers, which run layer by layer.
        adapt: prepares all layers at once of the same model with adapted linears; None where they cannot.
    """

    cache: KVCache
    windows: tuple[int | None, ...]
    attention: AttentionStep
    attention_reason: str
    layers: LayersStep | None
    layers_reason: str
    records: bool = False
    adapt: Callable[[Model], LayersStep | None] = lambda model: None

    def describe(self) -> str:
        """One line for people."""
        way = self.layers_reason if self.layers is not None else f"layer by layer: {self.layers_reason}"
        return f"{self.attention_reason}; {way}"


def choose_step_kernels(
    model: Model, memory: MemoryPlan, asked: str = AUTO, programmatic_launch: str = AUTO
) -> StepKernels:
    """The fastest attention that supports a model within a memory plan, and the fastest way through its layers; with
    `asked`, that of a backend where it can.

    Raises:
        ToolkitError: overlapping kernels are asked for on a GPU that has none.
    """
    backend, kernel, reason = choose_attention(model, memory, asked)
    windows = attention_windows(model, memory)
    cache = KVCache(model.config, memory, kernel.pages(model, memory), windows)
    attention = kernel.prepare(model, cache, windows, memory)
    described = "; ".join(filter(None, [f"{backend.name}: {kernel.summary}", reason]))
    logger.debug("attention %s", described)
    if not backend.is_fallback:
        described = f"{backend.name}: {kernel.summary}"
    layers = backend.layers
    if layers is None:
        return StepKernels(cache, windows, attention, described, None, f"{backend.name} computes no whole layers")
    if any(any(layer.sums) for layer in model.layers):
        reason = "ranks sum what layers compute"
        return StepKernels(cache, windows, attention, described, None, reason)
    if unsupported := layers.unsupported_reason(model, memory):
        records = layers.records and records_by_layer(model)
        return StepKernels(cache, windows, attention, described, None, unsupported, records)

    def adapt(adapted: Model) -> LayersStep | None:
        if not layers.takes_adapters or layers.unsupported_reason(adapted, memory):
            return None
        return layers.prepare(adapted, cache, windows, programmatic_launch)

    prepared = layers.prepare(model, cache, windows, programmatic_launch)
    return StepKernels(cache, windows, attention, described, prepared, layers.summary, layers.records, adapt)


def records_by_layer(model: Model) -> bool:
    """Whether steps that go from layer to layer can be captured: those of models with recurrent layers whose mixtures
    are computed at once. Where they go from expert to expert, the host asks which ones were chosen, and stages wait
    for each other."""
    mixtures = (layer.experts for layer in model.layers if layer.experts is not None)
    is_whole = model.config.whole is None
    return is_whole and bool(model.config.state_fields) and all(mixture.kernel is not None for mixture in mixtures)


def choose_attention(model: Model, memory: MemoryPlan, asked: str = AUTO) -> tuple[Backend, AttentionKernel, str]:
    """The first backend that supports attention of a model, its kernel, and why none before it.

    Args:
        asked: a backend that comes first.
    """
    found = [(backend, backend.attention) for backend in _suited(model.device) if backend.attention is not None]
    always = [(backend, kernel) for backend, kernel in found if kernel.verdict is None]
    if not model.config.spec.attentions:
        return always[0][0], NO_ATTENTION, ""
    first = [(backend, kernel) for backend, kernel in found if backend.name == asked]
    notes: list[str] = []
    for backend, kernel in found:
        if asked == AUTO and kernel.verdict is not None and not kernel.unsupported_reason(model, memory):
            verdict = kernel.verdict(model, memory)
            notes.append(f"{backend.name} {verdict.reason}")
            first += [(backend, kernel)] if verdict.is_faster else []
    backend, kernel, reason = _first([*first, *always], lambda kernel: kernel.unsupported_reason(model, memory))
    return backend, kernel, "; ".join(filter(None, [*notes, reason]))


def attention_windows(model: Model, memory: MemoryPlan) -> tuple[int | None, ...]:
    """Sliding window of every layer, that of the memory plan if it has one; None is none."""
    window = memory.attention_window.window
    return model.config.windows if window is None else (window,) * model.config.num_layers


def choose_sampling(device: torch.device, dtype: torch.dtype) -> tuple[SamplingKernel | None, FusedSampling | None]:
    """Sampling of logits of a dtype in the host's memory, and in launches that a CUDA graph can capture, if any."""
    kernels = [backend.sampling for backend in BACKENDS.values() if backend.sampling is not None]
    fused = [backend.fused_sampling for backend in BACKENDS.values() if backend.fused_sampling is not None]
    return (
        next((kernel for kernel in kernels if not kernel.unsupported_reason(device, dtype)), None),
        next((kernel for kernel in fused if not kernel.unsupported_reason(device, dtype)), None),
    )


def compilers(device: torch.device) -> list[Compiler]:
    """Compilers that build kernels for a device before they are launched."""
    return [backend.compiler for backend in _suited(device) if backend.compiler is not None]


def _suited(device: torch.device) -> Iterable[Backend]:
    return [backend for backend in BACKENDS.values() if backend.device in ("", device.type)]


def _first(
    found: Sequence[tuple[Backend, Chosen]], unsupported_reason: Callable[[Chosen], str]
) -> tuple[Backend, Chosen, str]:
    """The first without a reason against it, and the reasons against those before."""
    reasons: list[str] = []
    for backend, kernel in found:
        reason = unsupported_reason(kernel)
        if not reason:
            return backend, kernel, "; ".join(reasons)
        reasons.append(f"{backend.name} {reason}")
    raise SchemeError(f"no backend serves this model: {'; '.join(reasons)}")
