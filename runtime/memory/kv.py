"""Which form keys and values have while serving: what was asked for, or what the checkpoint records. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheRecord, KVCacheScheme, kv_cache_warning, wished_kv_cache
from compress.common.device import format_bytes
from compress.common.errors import ToolkitError
from runtime.core.attention_window import AttentionWindow
from runtime.core.config import RuntimeConfig
from runtime.speculative.ngram import CHAINS, TREES

if TYPE_CHECKING:
    from runtime.core.model_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class KVCacheChoice:
    """A scheme, why it, and what cannot be had with it."""

    scheme: KVCacheScheme = UNCOMPRESSED
    reason: str = "the default"
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """`int4 rotated (as asked for)`."""
        return f"{self.scheme} ({self.reason})"


DEFAULT_CHOICE = KVCacheChoice()


def choose_kv_cache(
    recorded: KVCacheScheme | None,
    config: RuntimeConfig,
    attention_window: AttentionWindow,
    measured: KVCacheRecord | None = None,
) -> KVCacheChoice:
    """The form of keys and values.

    Args:
        recorded: the checkpoint's default.
        attention_window: what tokens attend to. Sinks and recent tokens outside of it need not be exact.
        measured: what forms were measured to cost this checkpoint; one above its limit is warned of.

    Raises:
        SchemeError: an unknown format, or options that mean nothing for it.
    """
    scheme = wished_kv_cache(recorded, config.kv_cache, config.kv_rotate, config.kv_sinks, config.kv_residual_length)
    reason = "as asked for"
    if scheme == (recorded or UNCOMPRESSED):
        reason = "the default" if recorded is None else "the checkpoint's default"
    choice = _within(scheme, attention_window, reason, config.prefix_caching)
    warning = kv_cache_warning(measured, scheme)
    return choice if warning is None else replace(choice, notes=(warning, *choice.notes))


def _within(
    scheme: KVCacheScheme, attention_window: AttentionWindow, reason: str, prefix_caching: bool
) -> KVCacheChoice:
    """Leaves out exact tokens that nobody sees, and says what the others cost."""
    notes = []
    if attention_window.window is not None and scheme.sinks > attention_window.sinks:
        notes.append(f"{attention_window.sinks} instead of {scheme.sinks} exact sinks: tokens see {attention_window}")
        scheme = replace(scheme, sinks=attention_window.sinks)
    if attention_window.window is not None and scheme.recent > attention_window.window:
        notes.append(
            f"{attention_window.window} instead of {scheme.recent} exact recent tokens: tokens see {attention_window}"
        )
        scheme = replace(scheme, recent=attention_window.window)
    if scheme.recent and prefix_caching:
        notes.append(
            f"prefix caching is off, and each of several answers computes its prompt: the last {scheme.recent} tokens "
            "are exact for the sequence that computed them only"
        )
    return KVCacheChoice(scheme, reason, tuple(notes))


CPU_BYTES = 512 * 2**20
"""On a CPU, whose memory belongs to others too."""
SPARE_SHARE, LEAST_SPARE_BYTES = 50, 512 * 2**20
"""One part in so many of a GPU's memory, and so many bytes at least, are left to nobody: allocators round up."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Memory for keys and values.

    Attributes:
        nbytes: at most.
        reason: why so much.
        step_bytes: beside it, for what a GPU computes.
        spare_bytes: for nobody.
    """

    nbytes: int
    reason: str
    step_bytes: int = 0
    spare_bytes: int = 0


NO_BUDGET = KVBudget(0, "as many blocks as asked for")


def find_budget(config: RuntimeConfig, step_bytes: int, free: int | None) -> KVBudget:
    """Memory for keys and values.

    Args:
        step_bytes: that the largest step takes on a GPU.
        free: of a GPU, beside the weights; None on a CPU.

    Raises:
        ToolkitError: nothing is left for them.
    """
    beside = 0 if free is None else step_bytes
    if config.num_blocks:
        return replace(NO_BUDGET, step_bytes=beside)
    if config.kv_memory_bytes is not None:
        return KVBudget(config.kv_memory_bytes, "as asked for", beside)
    if free is None:
        return KVBudget(CPU_BYTES, "the default on a CPU")
    spare = max(LEAST_SPARE_BYTES, free // SPARE_SHARE)
    left = free - step_bytes - spare
    if left <= 0:
        raise ToolkitError(
            f"{format_bytes(free)} of the GPU are free beside the weights, and steps take {format_bytes(step_bytes)}",
            "Allow fewer --max-num-seqs, use a smaller checkpoint, or say --kv-memory to try how little does",
        )
    reason = f"what {format_bytes(free)} beside the weights leave"
    if drafts_with_model(config):
        return KVBudget(left // 2, f"half of {reason}; the other half is the draft model's", step_bytes, spare)
    return KVBudget(left, reason, step_bytes, spare)


def drafts_with_model(config: RuntimeConfig) -> bool:
    """Whether guesses come from a model, which needs weights and a KV pool of its own."""
    return bool(config.speculative_model) and config.speculative_model not in (CHAINS, TREES)


SPARE_RECENT_TOKENS = 17
"""A sequence's exact recent tokens have room for so many more: one that is known and the longest draft. What a rejected
draft overwrote is out of sight then."""


@dataclass(frozen=True, slots=True)
class ExactTokens:
    """Tokens whose keys and values are kept as they were computed, beside the blocks.

    Attributes:
        per_sequence: so many of a sequence have room.
        num_sequences: that have such tokens at the same time, at most.
        token_bytes: keys and values of one of them in all layers.
    """

    per_sequence: int = 0
    num_sequences: int = 0
    token_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.per_sequence * self.num_sequences * self.token_bytes

    def __str__(self) -> str:
        return f"{self.per_sequence} tokens of {self.num_sequences} sequences"


NO_EXACT_TOKENS = ExactTokens()


def exact_tokens(model: DecoderConfig, scheme: KVCacheScheme, itemsize: int, num_sequences: int) -> ExactTokens:
    """What a form of keys and values keeps exactly of so many sequences; `itemsize` as in `kv_token_bytes`."""
    recent = scheme.recent + SPARE_RECENT_TOKENS if scheme.recent else 0
    return ExactTokens(scheme.sinks + recent, num_sequences, kv_token_bytes(model, itemsize=itemsize))


def kv_token_bytes(model: DecoderConfig, scheme: KVCacheScheme = UNCOMPRESSED, itemsize: int = 2) -> int:
    """Keys and values of one token in all layers, scales and offsets included, exact copies not.

    Args:
        itemsize: bytes of one element where nothing is quantized.
    """
    return model.num_layers * model.num_kv_heads * scheme.head_bytes(model.head_dim, itemsize)
