"""Default KV cache format of a checkpoint: candidates, and the choice by their loss on long texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from compress.checkpoint.kv_cache import (
    AUTO,
    KV_FORMATS,
    UNCOMPRESSED,
    KVCacheRecord,
    KVCacheScheme,
    MeasuredKVCache,
    with_stored_names,
)
from compress.common.cli import Key, option
from compress.plan import PlanRow
from compress.stages.base import STAGES, Stage

SMALLEST_FIRST = ("int4", "k8v4", "fp8", "int8")
LONGEST_WINDOW = 8192
"""Windows have the length of the model's context, up to this: attention over more tokens takes minutes on a CPU."""


@STAGES.register(order=2)
@dataclass(frozen=True)
class KVCacheStage(Stage):
    """Choice of the checkpoint's default KV cache format by its loss on long texts. No tensor changes.

    Attributes:
        sinks, residual_length: number of first and last tokens that stay exact. The last ones restore the most quality,
            but disable the runtime's prefix cache: blocks then differ between sequences with the same tokens.
        max_seq_length: tokens per window; None takes the model's context, up to `LONGEST_WINDOW`.
    """

    name: ClassVar[str] = "kv_cache"
    is_single: ClassVar[bool] = True
    added_by: ClassVar[Key | None] = (
        "kv_cache",
        str | None,
        option(
            default=None,
            metavar="FORMAT",
            help="Default KV cache format, measured on long texts: auto (smallest within a mean KL of 0.01), int4, "
            "k8v4, int8 or fp8. Default: 16 bits, not measured.",
        ),
    )

    format: str = option(
        default=AUTO,
        words=(AUTO, *KV_FORMATS),
        help="int4, k8v4, fp8, int8, 16bit (not measured), or auto: the smallest within max_kl.",
    )
    rotate: bool | None = option(
        default=None, help="Multiply keys and queries by a Hadamard matrix. Default: for int4 only."
    )
    sinks: int = option(default=0, help="First tokens that stay exact.")
    residual_length: int = option(default=0, help="Last tokens that stay exact; the runtime has no prefix cache then.")
    max_kl: float = option(default=0.01, limits={"above": 0}, help="Largest mean KL to the 16-bit cache, in nats.")
    data: str = option(default="pydoc", help="Text to measure on.")
    tokens: int = option(default=16384, limits={"at least": 2}, help="Tokens of the text.")
    max_seq_length: int | None = option(
        default=None, limits={"at least": 2}, help="Tokens of a window. Default: the model's context, up to 8,192."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.candidates  # raises SchemeError for an invalid combination

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
    def label(self) -> str:
        return f"kv-{self.format}"

    def notes(self, rows: Sequence[PlanRow], context_length: int | None) -> list[str]:
        if not self.candidates:
            return ["keys and values stay in 16 bits by default"]
        text = f"{self.tokens:,} tokens of {self.data} in windows of {self.window_length(context_length):,}"
        which = "the smallest" if len(self.candidates) > 1 else "it"
        return [
            f"keys and values: {'; '.join(map(str, self.candidates))}: measured on {text} after compression of the "
            f"weights; {which} becomes the default if its mean KL to a 16-bit cache is at most {self.max_kl:g}"
        ]

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
