"""The form of weights, keys and values that fits a memory with the least predicted loss, from config.json alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from compress.checkpoint.scheme import GROUP_SIZES, Scheme
from compress.checkpoint.weights import Int, Nvfp4
from compress.common.device import format_bytes
from compress.common.errors import SchemeError, ToolkitError
from compress.draft_model import DraftModel
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import DecoderConfig
from runtime.memory.capacity import estimate
from runtime.memory.estimate import kv_token_bytes
from runtime.memory.plan import choose_model_kv_cache, find_model_window, longest_wanted, plan_memory

DTYPE, ITEMSIZE = "bfloat16", 2


@dataclass(frozen=True, slots=True)
class WeightForm:
    """A form of the linears of all blocks.

    Attributes:
        scheme: None for 16 bits.
        kl: KL to dense weights, nats per token.
    """

    scheme: Scheme | None
    kl: float

    @property
    def stage(self) -> dict[str, Any]:
        """Keys of the stage `quantize`."""
        if isinstance(self.scheme, Int):
            return {"method": "gptq", "bits": self.scheme.bits, "group_size": self.scheme.group_size or -1}
        return {"method": "gptq", "weights": self.scheme.word} if self.scheme else {}

    def __str__(self) -> str:
        return str(self.scheme) if self.scheme else "16 bits"


WEIGHTS = (
    WeightForm(None, 0.0),
    WeightForm(Int(8, 128), 0.0001),
    WeightForm(Nvfp4(), 0.0162),
    WeightForm(Int(4, 64), 0.0184),
    WeightForm(Int(4, 128), 0.0216),
    WeightForm(Int(3, 64), 0.0719),
    WeightForm(Int(2, 64), 0.3457),
)
"""Measured on the demo model with GPTQ, text `pydoc`: docs/choosing.md."""
KEYS = {"16bit": 0.0, "int8": 0.0006, "int4": 0.0262}
"""KL of forms of keys and values to 16 bits, measured on the demo model in windows of 2,048: docs/recipes.md."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Users, context and memory that a model must serve.

    Attributes:
        memory_bytes: for weights, keys, values, steps, the process and a draft model.
        context: tokens of prompt and output of each user.
        is_gpu: whether the memory is a GPU's.
        draft: model that drafts for this one.
        bytes_per_second: that the device reads; None if it is not known.
        least_rate: tokens per second that each user must get without drafts.
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
    """A form and what is predicted of it.

    Attributes:
        kv_bytes: keys and values of all users at full context.
        needed_bytes: the least memory that is enough, a draft model included.
        draft_bytes: weights, keys and values of a draft model.
    """

    weights: WeightForm
    kv_cache: str
    weight_bytes: int
    kv_bytes: int
    needed_bytes: int
    draft_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """Bytes that a step without drafts reads."""
        return self.weight_bytes + self.kv_bytes

    @property
    def kl(self) -> float:
        """Sum of the measured losses of both forms."""
        return self.weights.kl + KEYS[self.kv_cache]

    def tokens_per_second(self, bytes_per_second: float, users: int) -> float:
        """Tokens of all users where a step reads all weights and the keys and values of all users once."""
        return users * bytes_per_second / self.step_bytes

    def is_fast_enough(self, wish: Wish) -> bool:
        return wish.bytes_per_second is None or wish.bytes_per_second >= wish.least_rate * self.step_bytes

    def recipe(self) -> dict[str, Any]:
        """A recipe as `compress run` reads it; without stages where all stays in 16 bits."""
        stages: list[dict[str, Any]] = [{"quantize": self.weights.stage}] if self.weights.scheme else []
        stages += [{"kv_cache": {"format": self.kv_cache}}] if self.kv_cache != "16bit" else []
        return {"stages": stages}


def weight_bytes(model: DecoderConfig, scheme: Scheme | None) -> int:
    """Bytes of all weights, those outside of the blocks in 16 bits. Raises SchemeError where groups divide no layer."""
    total = model.spec.weight_bytes(ITEMSIZE)
    if scheme is None:
        return total
    linears = [linear.shape for linear in model.spec.linears()]
    packed = sum(scheme.stored_bits(*shape) for shape in linears) // 8
    return total - ITEMSIZE * sum(rows * columns for rows, columns in linears) + packed


def forms(model: DecoderConfig) -> Iterator[WeightForm]:
    """Yields the forms whose groups divide every layer, with smaller groups in place of those that do not."""
    for form in WEIGHTS:
        schemes = [form.scheme]
        if isinstance(form.scheme, Int):
            widest = form.scheme.group_size or 0
            schemes = [Int(form.scheme.bits, size) for size in reversed(GROUP_SIZES) if size <= widest]
        yield from [WeightForm(scheme, form.kl) for scheme in schemes if _divides(model, scheme)][:1]


def _divides(model: DecoderConfig, scheme: Scheme | None) -> bool:
    try:
        weight_bytes(model, scheme)
    except SchemeError:
        return False
    return True


def holds(model: DecoderConfig, wish: Wish, kv_cache: str, weights: int, memory_bytes: int) -> bool:
    """Whether a memory holds all users at full context beside weights of a size, by the runtime's own plan."""
    config = wish.config(kv_cache)
    if not wish.is_gpu:
        return estimate(model, config, DTYPE, weights, memory_bytes).concurrency(wish.context) >= wish.users
    try:
        plan = plan_memory(model, weights, ITEMSIZE, config, memory_bytes - weights)
    except ToolkitError:
        return False
    has_states = not plan.states.slot_bytes or plan.states.max_running >= wish.users
    return has_states and plan.num_blocks >= wish.users * plan.blocks_per_sequence


def needed_bytes(model: DecoderConfig, wish: Wish, kv_cache: str, weights: int) -> int:
    """The least memory that holds all users, to a MiB."""
    low, high = weights >> 20, (weights >> 20) + 1
    while not holds(model, wish, kv_cache, weights, high << 20):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(model, wish, kv_cache, weights, middle << 20) else (middle, high)
    return high << 20


def candidates(model: DecoderConfig, wish: Wish) -> list[Fit]:
    """Returns every form of weights, keys and values, the least predicted loss first.

    Raises:
        ToolkitError: a context that the model does not have.
    """
    longest_wanted(model, wish.config("16bit"))
    if wish.draft is not None:
        wish.draft.check(model)
    found = []
    for form in forms(model):
        weights = weight_bytes(model, form.scheme)
        for kv_cache in KEYS if model.mixers else ("16bit",):
            kv_bytes = wish.users * _kv_bytes(model, wish, kv_cache)
            drafts = _draft_bytes(wish, kv_cache)
            needed = needed_bytes(model, wish, kv_cache, weights) + drafts
            found.append(Fit(form, kv_cache, weights, kv_bytes, needed, drafts))
    return sorted(found, key=lambda each: (each.kl, each.needed_bytes))


def _kv_bytes(model: DecoderConfig, wish: Wish, kv_cache: str) -> int:
    """Keys, values and states of one user at full context."""
    config = wish.config(kv_cache)
    window = find_model_window(model, config)
    scheme = choose_model_kv_cache(model, config, window).scheme
    tokens = window.blocks_for(wish.context, config.max_span_tokens, config.block_size) * config.block_size
    return tokens * kv_token_bytes(model, scheme, ITEMSIZE) + model.state_bytes(ITEMSIZE)


def _draft_bytes(wish: Wish, kv_cache: str) -> int:
    """Bytes of the draft model, whose keys and values have the form of those of the model."""
    if wish.draft is None:
        return 0
    shorter = replace(wish, context=min(wish.context, wish.draft.config.context_length))
    return wish.draft.weight_bytes + wish.users * _kv_bytes(wish.draft.config, shorter, kv_cache)


def choose(model: DecoderConfig, wish: Wish) -> Fit:
    """Chooses the form with the least predicted loss that fits and is fast enough.

    Raises:
        ToolkitError: none fits, with the least memory that would do; none is fast enough, with the fastest; a context
            that the model does not have; or a draft model with another vocabulary.
    """
    found = candidates(model, wish)
    fitting = [each for each in found if each.needed_bytes <= wish.memory_bytes]
    if not fitting:
        raise _too_large(model, wish, min(found, key=lambda each: each.needed_bytes))
    for each in fitting:
        if each.is_fast_enough(wish):
            return each
    raise _too_slow(wish, min(fitting, key=lambda each: each.step_bytes))


def _too_slow(wish: Wish, fastest: Fit) -> ToolkitError:
    rate = fastest.tokens_per_second(wish.bytes_per_second or 0, 1)
    return ToolkitError(
        f"no form gives each user {wish.least_rate:g} tokens per second: the fastest that fits ({fastest.weights}, "
        f"keys and values in {fastest.kv_cache}) gives about {rate:.3g}, as a step reads "
        f"{format_bytes(fastest.step_bytes)}",
        f"Use --tokens-per-second {math.floor(rate * 10) / 10:g}, fewer --users, less --context or a smaller model",
    )


def _too_large(model: DecoderConfig, wish: Wish, least: Fit) -> ToolkitError:
    drafts = f", {format_bytes(least.draft_bytes)} of the draft model" if least.draft_bytes else ""
    return ToolkitError(
        f"{wish} need {format_bytes(least.needed_bytes)} at least ({least.weights}, keys and values in "
        f"{least.kv_cache}: {format_bytes(least.weight_bytes)} of weights, {format_bytes(least.kv_bytes)} of keys and "
        f"values{drafts}), and --memory is {format_bytes(wish.memory_bytes)}",
        f"Use --memory {least.needed_bytes >> 20}MiB{_smaller(model, wish, least)}",
    )


def _smaller(model: DecoderConfig, wish: Wish, least: Fit) -> str:
    """Names the most users, and the longest context by halves, that the memory would hold."""
    memory_bytes = wish.memory_bytes - least.draft_bytes
    held = partial(holds, model, kv_cache=least.kv_cache, weights=least.weight_bytes, memory_bytes=memory_bytes)
    users = next((n for n in _halves(wish.users) if held(wish=replace(wish, users=n))), None)
    context = next((n for n in _halves(wish.context) if n >= 256 and held(wish=replace(wish, context=n))), None)
    ways = [f"--users {users}" if users else "", f"--context {context}" if context else ""]
    return "".join(f", or {way}" for way in ways if way)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number
