"""Choice of weight form and format of the KV cache that fit a memory with the least predicted loss, by config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from compress.checkpoint.scheme import Scheme
from compress.common.device import format_bytes
from compress.common.errors import ToolkitError
from compress.draft_model import DraftModel
from compress.measured_speed import gpu_step_seconds
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import DecoderConfig
from runtime.memory.capacity import estimate
from runtime.memory.estimate import kv_token_bytes
from runtime.memory.losses import KEYS, WeightForm, weight_forms
from runtime.memory.plan import choose_model_kv_cache, find_model_window, plan_memory

DTYPE, ITEMSIZE = "bfloat16", 2


@dataclass(frozen=True, slots=True)
class ServingTarget:
    """Number of users, context length and memory to serve a model with.

    Attributes:
        memory_bytes: memory for weights, KV cache, activations, the process and a draft model.
        context: tokens per user, prompt and output together.
        bytes_per_second: memory bandwidth of the device, of a GPU by its data sheet; None if unknown.
        least_rate: minimum tokens per second per user, without speculation.
    """

    memory_bytes: int
    context: int
    users: int
    is_gpu: bool = False
    draft: DraftModel | None = None
    bytes_per_second: float | None = None
    least_rate: float = 0.0

    def config(self, kv_cache: str) -> RuntimeConfig:
        return RuntimeConfig(max_num_seqs=self.users, max_model_len=self.context, kv_cache=kv_cache)

    def __str__(self) -> str:
        return f"{self.users} users with {self.context:,} tokens each"


@dataclass(frozen=True, slots=True)
class Fit:
    """Combination of forms with its predicted memory, loss and speed.

    Attributes:
        needed_bytes: least sufficient memory, including the draft model.
        dense_bytes: bytes of weights that are in 16 bits in any form.
    """

    weights: WeightForm
    kv_cache: str
    weight_bytes: int
    kv_bytes: int
    needed_bytes: int
    draft_bytes: int = 0
    dense_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """Bytes read per decoding step without speculation."""
        return self.weight_bytes + self.kv_bytes

    @property
    def kl(self) -> float:
        """Sum of the KL divergences measured for both forms."""
        return self.weights.kl + KEYS[self.kv_cache]

    def user_rate(self, target: ServingTarget) -> float:
        """Predicts tokens per second of each user: a step reads all weights and the KV cache of all users once.

        A CPU is assumed to read at its bandwidth, a GPU at the shares of it that were measured. Without a bandwidth the
        rate is infinite.
        """
        if target.bytes_per_second is None:
            return math.inf
        if not target.is_gpu:
            return target.bytes_per_second / self.step_bytes
        weights = (None, self.dense_bytes), (self.weights.scheme, self.weight_bytes - self.dense_bytes)
        return 1 / gpu_step_seconds(weights, (self.kv_cache, self.kv_bytes), target.users, target.bytes_per_second)

    def recipe(self) -> dict[str, Any]:
        """Returns a recipe for `compress run`; it has no stages if everything stays in 16 bits."""
        stages: list[dict[str, Any]] = [{"quantize": self.weights.stage}] if self.weights.scheme else []
        stages += [{"kv_cache": {"format": self.kv_cache}}] if self.kv_cache != "16bit" else []
        return {"stages": stages}


def dense_bytes(model: DecoderConfig) -> int:
    """Returns bytes of the weights that stay in 16 bits in every form: embedding, head and norms."""
    linears = sum(rows * columns for rows, columns in (linear.shape for linear in model.spec.linears()))
    return model.spec.weight_bytes(ITEMSIZE) - ITEMSIZE * linears


def weight_bytes(model: DecoderConfig, scheme: Scheme | None) -> int:
    """Returns bytes of all weights. Raises SchemeError if the groups divide no layer."""
    if scheme is None:
        return model.spec.weight_bytes(ITEMSIZE)
    return dense_bytes(model) + sum(scheme.stored_bits(*linear.shape) for linear in model.spec.linears()) // 8


def holds(model: DecoderConfig, target: ServingTarget, kv_cache: str, weights: int, memory_bytes: int) -> bool:
    """Returns whether the runtime's memory plan holds all users at full context in addition to weights of this size."""
    config = target.config(kv_cache)
    if not target.is_gpu:
        return estimate(model, config, DTYPE, weights, memory_bytes).concurrency(target.context) >= target.users
    try:
        plan = plan_memory(model, weights, ITEMSIZE, config, memory_bytes - weights)
    except ToolkitError:
        return False
    has_states = not plan.states.slot_bytes or plan.states.max_running >= target.users
    return has_states and plan.num_blocks >= target.users * plan.blocks_per_sequence


def needed_bytes(model: DecoderConfig, target: ServingTarget, kv_cache: str, weights: int) -> int:
    """Returns the least memory that holds all users, rounded to a MiB."""
    low, high = weights >> 20, (weights >> 20) + 1
    while not holds(model, target, kv_cache, weights, high << 20):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(model, target, kv_cache, weights, middle << 20) else (middle, high)
    return high << 20


def candidates(model: DecoderConfig, target: ServingTarget) -> list[Fit]:
    """Returns all combinations of forms in order of predicted loss. Raises ToolkitError: the context is longer than
    that of the model."""
    if target.context > model.context_length:
        raise ToolkitError(
            f"--context {target.context} is longer than the model's context of {model.context_length} tokens",
            f"Use --context {model.context_length} or less",
        )
    if target.draft is not None:
        target.draft.check(model)
    found, dense = [], dense_bytes(model)
    for form in weight_forms({linear.in_features for linear in model.spec.linears()}):
        weights = weight_bytes(model, form.scheme)
        for kv_cache in KEYS if model.spec.attentions else ("16bit",):
            kv_bytes = target.users * _kv_bytes(model, target, kv_cache)
            drafts = _draft_bytes(target, kv_cache)
            needed = needed_bytes(model, target, kv_cache, weights) + drafts
            found.append(Fit(form, kv_cache, weights, kv_bytes, needed, drafts, dense))
    return sorted(found, key=lambda each: (each.kl, each.needed_bytes))


def _kv_bytes(model: DecoderConfig, target: ServingTarget, kv_cache: str) -> int:
    """Returns bytes of keys, values and recurrent states of one user at full context."""
    config = target.config(kv_cache)
    window = find_model_window(model, config)
    scheme = choose_model_kv_cache(model, config, window).scheme
    tokens = window.blocks_for(target.context, config.max_span_tokens, config.block_size) * config.block_size
    return tokens * kv_token_bytes(model, scheme, ITEMSIZE) + model.state_bytes(ITEMSIZE)


def _draft_bytes(target: ServingTarget, kv_cache: str) -> int:
    """Returns bytes of the draft model; its KV cache has the form of the target model's."""
    if target.draft is None:
        return 0
    shorter = replace(target, context=min(target.context, target.draft.config.context_length))
    return target.draft.weight_bytes + target.users * _kv_bytes(target.draft.config, shorter, kv_cache)


def choose(model: DecoderConfig, target: ServingTarget) -> Fit:
    """Chooses the combination with the least predicted loss that fits and is fast enough. Raises ToolkitError: none
    fits (names the least sufficient memory), none is fast enough (names the fastest), the context is longer than that
    of the model, or the draft model has another vocabulary."""
    found = candidates(model, target)
    fitting = [each for each in found if each.needed_bytes <= target.memory_bytes]
    if not fitting:
        raise _too_large(model, target, min(found, key=lambda each: each.needed_bytes))
    for each in fitting:
        if each.user_rate(target) >= target.least_rate:
            return each
    raise _too_slow(target, max(fitting, key=lambda each: each.user_rate(target)))


def _too_slow(target: ServingTarget, fastest: Fit) -> ToolkitError:
    rate = fastest.user_rate(target)
    return ToolkitError(
        f"no form gives each user {target.least_rate:g} tokens per second: the fastest that fits ({fastest.weights}, "
        f"keys and values in {fastest.kv_cache}) gives about {rate:.3g}, as a step reads "
        f"{format_bytes(fastest.step_bytes)}",
        f"Use --tokens-per-second {math.floor(rate * 10) / 10:g}, fewer --users, less --context or a smaller model",
    )


def _too_large(model: DecoderConfig, target: ServingTarget, least: Fit) -> ToolkitError:
    drafts = f", {format_bytes(least.draft_bytes)} of the draft model" if least.draft_bytes else ""
    return ToolkitError(
        f"{target} need {format_bytes(least.needed_bytes)} at least ({least.weights}, keys and values in "
        f"{least.kv_cache}: {format_bytes(least.weight_bytes)} of weights, {format_bytes(least.kv_bytes)} of keys and "
        f"values{drafts}), and --memory is {format_bytes(target.memory_bytes)}",
        f"Use --memory {least.needed_bytes >> 20}MiB{_smaller(model, target, least)}",
    )


def _smaller(model: DecoderConfig, target: ServingTarget, least: Fit) -> str:
    """Returns a suggestion: the number of users, and the context in halves, that the memory would hold."""
    memory_bytes = target.memory_bytes - least.draft_bytes
    held = partial(holds, model, kv_cache=least.kv_cache, weights=least.weight_bytes, memory_bytes=memory_bytes)
    users = next((n for n in _halves(target.users) if held(target=replace(target, users=n))), None)
    context = next((n for n in _halves(target.context) if n >= 256 and held(target=replace(target, context=n))), None)
    ways = [f"--users {users}" if users else "", f"--context {context}" if context else ""]
    return "".join(f", or {way}" for way in ways if way)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number
