"""Which form of keys and values becomes a checkpoint's default. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.kv_cache import AUTO, UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.kv_measured import KVCacheRecord, MeasuredKVCache
from compress.recipe import Recipe
from compress.stages.kv_cache import KVCacheStage


@dataclass(frozen=True, slots=True)
class KVChoice:
    """The default, and why it is not what a reader of the recipe expects; empty where it is."""

    scheme: KVCacheScheme
    warning: str = ""


def choose_kv_cache(stage: KVCacheStage, record: KVCacheRecord | None) -> KVChoice:
    """The smallest form within the recipe's limit; 16 bits where none is."""
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
        f"the default stays 16 bits; raise max_kl, or serve with --kv-cache {stage.format} all the same",
    )


def _cost(candidate: MeasuredKVCache) -> tuple[int, float]:
    return candidate.token_bytes, candidate.kl_mean


def kv_notes(recipe: Recipe, context: int | None) -> list[str]:
    """What the plan says of the stage."""
    stage = recipe.kv_cache
    if stage is None or not stage.candidates:
        return [] if stage is None else ["keys and values stay 16 bits by default"]
    text = f"{stage.tokens:,} tokens of {stage.data} in windows of {stage.window_length(context):,}"
    listed = "; ".join(map(str, stage.candidates))
    which = "the smallest" if len(stage.candidates) > 1 else "it"
    return [
        f"keys and values: {listed}: measured on {text} when the weights are done; {which} becomes the default if its "
        f"mean KL to a 16-bit cache is at most {stage.max_kl:g}"
    ]
