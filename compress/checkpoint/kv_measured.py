"""What quantized KV caches of a checkpoint were measured to cost, as its config.json keeps it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from compress.checkpoint.config import compression_block
from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.kv_cache import KVCacheScheme

KV_MEASURED_KEY = "kv_cache_measured"


@dataclass(frozen=True, slots=True)
class MeasuredKVCache:
    """One form of keys and values, beside the same checkpoint with a cache of 16 bits.

    Attributes:
        token_bytes: keys and values of one token in all layers; exact sinks and recent tokens not counted.
        kl_mean, kl_p999: mean and 99.9 % quantile of KL(16-bit cache || this), in nats.
        kl_standard_error: of the mean, over windows; None for a single window.
        top1_agreement: share of positions where both put the same token first.
    """

    scheme: KVCacheScheme
    token_bytes: int
    kl_mean: float
    kl_p999: float
    perplexity: float
    top1_agreement: float
    kl_standard_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class KVCacheRecord:
    """All that was measured, and on what.

    Attributes:
        max_kl: the gate: most mean KL that the recipe allowed.
        tokens: predicted ones; `length` of them and one more are a window.
        perplexity: with a 16-bit cache.
        token_bytes: with a 16-bit cache.
    """

    max_kl: float
    tokens: int
    length: int
    data: str
    data_sha256: str
    protocol: str
    perplexity: float
    token_bytes: int
    candidates: tuple[MeasuredKVCache, ...]

    def find(self, scheme: KVCacheScheme) -> MeasuredKVCache | None:
        """What this form was measured to cost, if it was."""
        return next((each for each in self.candidates if each.scheme == scheme), None)

    def passes(self, candidate: MeasuredKVCache) -> bool:
        return candidate.kl_mean <= self.max_kl

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"candidates": [each.to_dict() for each in self.candidates]}

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> KVCacheRecord:
        """The inverse of `to_dict`. Raises CheckpointError when it is none."""
        try:
            candidates = tuple(_candidate(each) for each in block["candidates"])
            record = cls(**{**block, "candidates": candidates})
            numbers = [record.max_kl, *(each.kl_mean for each in candidates)]
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{KV_MEASURED_KEY} cannot be read: {error!r}", "Write the checkpoint again"
            ) from error
        if not all(isinstance(number, int | float) for number in numbers):
            raise CheckpointError(f"{KV_MEASURED_KEY} has a KL that is no number", "Write the checkpoint again")
        return record


def _candidate(block: Mapping[str, Any]) -> MeasuredKVCache:
    return MeasuredKVCache(**{**block, "scheme": KVCacheScheme.from_dict(block["scheme"])})


def measured_kv_caches(config: Mapping[str, Any]) -> KVCacheRecord | None:
    """What a checkpoint's config.json records, or None.

    Raises:
        CheckpointError: the record cannot be understood.
        SchemeError: a form in it cannot.
    """
    block = compression_block(config).get(KV_MEASURED_KEY)
    return None if block is None else KVCacheRecord.from_dict(block)


def kv_cache_warning(record: KVCacheRecord | None, scheme: KVCacheScheme) -> str | None:
    """Why this form should not serve a checkpoint, by what was measured when it was made; None where it may."""
    found = record.find(scheme) if record else None
    if record is None or found is None or record.passes(found):
        return None
    return (
        f"measured to change this checkpoint by a mean KL of {found.kl_mean:.4g} nats (perplexity "
        f"{record.perplexity:.2f} -> {found.perplexity:.2f}, {record.tokens:,} tokens of {record.data}), more than the "
        f"{record.max_kl:g} its recipe allows"
    )
