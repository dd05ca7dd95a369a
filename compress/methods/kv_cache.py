"""Default KV cache format of a checkpoint: candidates, and the choice by their loss on long texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compress.checkpoint.kv_cache import (
    AUTO,
    KV_FORMATS,
    UNCOMPRESSED,
    KVCacheRecord,
    KVCacheScheme,
    MeasuredKVCache,
    with_stored_names,
)
from compress.common.cli import nearest
from compress.common.errors import RecipeError

SMALLEST_FIRST = ("int4", "k8v4", "fp8", "int8")
LONGEST_WINDOW = 8192
"""Windows have the length of the model's context, up to this: attention over more tokens takes minutes on a CPU."""


@dataclass(frozen=True, slots=True)
class KVCacheStage:
    """Choice of the checkpoint's default KV cache format by its loss on long texts. No tensor changes.

    Attributes:
        format: `16bit`, `fp8`, `int8`, `k8v4`, `int4`, or `auto`: the smallest that stays within `max_kl`.
        rotate: whether to Hadamard-rotate keys; None rotates those of int4.
        sinks, residual_length: number of first and last tokens that stay exact. The last ones restore the most quality,
            but disable the runtime's prefix cache: blocks then differ between sequences with the same tokens.
        max_kl: maximum mean KL, in nats, between the checkpoint with a 16-bit cache and with this one.
        data: text to measure on, see `calibration.sources.load_texts`.
        tokens: number of tokens of the text.
        max_seq_length: tokens per window; None takes the model's context, up to `LONGEST_WINDOW`.
    """

    format: str = AUTO
    rotate: bool | None = None
    sinks: int = 0
    residual_length: int = 0
    max_kl: float = 0.01
    data: str = "pydoc"
    tokens: int = 16384
    max_seq_length: int | None = None

    def __post_init__(self) -> None:
        if self.format not in (AUTO, *KV_FORMATS):
            raise RecipeError(
                f"KV cache format {self.format!r} does not exist", nearest(self.format, (AUTO, *KV_FORMATS), "Formats")
            )
        if not self.max_kl > 0:
            raise RecipeError(f"max_kl={self.max_kl} excludes every format", "Use 0.01, or format: 16bit")
        if self.tokens < 2 or (self.max_seq_length is not None and self.max_seq_length < 2):
            raise RecipeError("a KV cache cannot be measured on less than 2 tokens", "Use tokens: 16384")
        # Raises SchemeError for invalid combinations.
        _ = self.candidates

    @property
    def candidates(self) -> tuple[KVCacheScheme, ...]:
        """Formats to measure, smallest first; none for a cache of 16 bits."""
        formats = SMALLEST_FIRST if self.format == AUTO else (self.format,)
        schemes = [KVCacheScheme.named(format, self.rotate, self.sinks, self.residual_length) for format in formats]
        return tuple(scheme for scheme in schemes if not scheme.is_exact)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for recorded recipes."""
        return with_stored_names(asdict(self))

    @property
    def needs_calibration(self) -> bool:
        return False

    def window_length(self, context: int | None) -> int:
        """Returns the tokens per window for a model with this context."""
        wanted = self.max_seq_length or LONGEST_WINDOW
        return min(wanted, context or wanted)


@dataclass(frozen=True, slots=True)
class KVChoice:
    """Chosen default, and the reason if it differs from the recipe's format."""

    scheme: KVCacheScheme
    warning: str = ""


def choose_kv_cache(stage: KVCacheStage, record: KVCacheRecord | None) -> KVChoice:
    """Returns the smallest format within the recipe's limit, or 16 bits."""
    if record is None:
        return KVChoice(UNCOMPRESSED)
    passing = [each for each in record.candidates if record.passes(each)]
    if passing:
        return KVChoice(min(passing, key=_cost).scheme)
    nearest = min(record.candidates, key=lambda each: each.kl_mean)
    if stage.format == AUTO:
        return KVChoice(
            UNCOMPRESSED,
            f"no KV cache format stays within a mean KL of {stage.max_kl:g} (nearest: {nearest.scheme}, "
            f"{nearest.kl_mean:.4g}): the default stays 16 bits; raise max_kl to allow it",
        )
    return KVChoice(
        UNCOMPRESSED,
        f"a KV cache in {nearest.scheme} costs a mean KL of {nearest.kl_mean:.4g}, more than max_kl={stage.max_kl:g}: "
        f"the default stays 16 bits; raise max_kl, or serve with --kv-cache {stage.format} anyway",
    )


def _cost(candidate: MeasuredKVCache) -> tuple[int, float]:
    return candidate.token_bytes, candidate.kl_mean


def kv_notes(stage: KVCacheStage | None, context: int | None) -> list[str]:
    """Returns notes on the kv_cache stage."""
    if stage is None or not stage.candidates:
        return [] if stage is None else ["keys and values stay in 16 bits by default"]
    text = f"{stage.tokens:,} tokens of {stage.data} in windows of {stage.window_length(context):,}"
    listed = "; ".join(map(str, stage.candidates))
    which = "the smallest" if len(stage.candidates) > 1 else "it"
    return [
        f"keys and values: {listed}: measured on {text} after compression of the weights; {which} becomes the default "
        "if its "
        f"mean KL to a 16-bit cache is at most {stage.max_kl:g}"
    ]
