"""The last stage of a run: keys and values measured on the finished weights, and the default written beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.checkpoint.config import COMPRESSION_KEY, read_config, write_config
from compress.checkpoint.kv_cache import KV_CACHE_KEY, KV_MEASURED_KEY, KVCacheRecord, KVCacheScheme, MeasuredKVCache
from compress.pipeline.prepare import RunContext
from compress.pipeline.progress import RunDisplay
from compress.plan import KVChoice, choose_kv_cache
from compress.recipe import KVCacheStage

if TYPE_CHECKING:
    from compress.evaluate.perplexity import Evaluation


@dataclass(frozen=True, slots=True)
class KVResult:
    """What was chosen; `record` is None where 16 bits were asked for and nothing had to be measured."""

    choice: KVChoice
    record: KVCacheRecord | None

    @property
    def warnings(self) -> tuple[str, ...]:
        return (self.choice.warning,) if self.choice.warning else ()

    def describe(self) -> str:
        """The default with its figures, in one line."""
        scheme, record = self.choice.scheme, self.record
        if record is None:
            return str(scheme)
        exact = f"{record.token_bytes:,} bytes per token in 16 bits"
        found = record.find(scheme)
        if found is None:
            return f"{scheme}: {exact}"
        return (
            f"{scheme}: {found.token_bytes:,} bytes per token ({exact}), KL {found.kl_mean:.5f} to those, perplexity "
            f"{record.perplexity:.3f} -> {found.perplexity:.3f} ({record.tokens} tokens of {record.data}, "
            f"{record.length} in a window)"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for the report."""
        return {
            "default": self.choice.scheme.to_dict(),
            "warning": self.choice.warning,
            "measured": self.record.to_dict() if self.record else None,
        }


def choose_default(prepared: RunContext, folder: Path, quiet: bool) -> KVResult | None:
    """Measures what the recipe names, chooses, and records both in config.json of the finished checkpoint in `folder`.

    Returns:
        None without such a stage.

    Raises:
        ToolkitError: the text cannot be used, or the model does not compute.
    """
    stage = prepared.request.recipe.kv_cache
    if stage is None:
        return None
    record = _measure(prepared, stage, folder, quiet) if stage.candidates else None
    result = KVResult(choose_kv_cache(stage, record), record)
    config = read_config(folder)
    config[COMPRESSION_KEY][KV_CACHE_KEY] = result.choice.scheme.to_dict()
    if record is not None:
        config[COMPRESSION_KEY][KV_MEASURED_KEY] = record.to_dict()
    write_config(folder, config)
    return result


def _measure(prepared: RunContext, stage: KVCacheStage, folder: Path, quiet: bool) -> KVCacheRecord:
    from compress.evaluate.kv_cache import measure_kv_caches

    length = stage.window_length(prepared.config.get("max_position_embeddings"))
    with RunDisplay(1, 0, quiet, unit="KV cache") as display:
        display.say(f"measuring {len(stage.candidates)} KV caches on {stage.tokens:,} tokens, {length:,} in a window")
        found = measure_kv_caches(
            folder,
            stage.candidates,
            data=stage.data,
            tokens=stage.tokens,
            length=length,
            device=str(prepared.device),
            on_progress=lambda done, total: display.step(f"window {done} of {total}", done / total),
        )
    measured = zip(stage.candidates, found.token_bytes, found.results, strict=True)
    windows, first = found.windows, found.results[0]
    return KVCacheRecord(
        stage.max_kl,
        first.tokens,
        length,
        windows.source,
        windows.sha256,
        windows.protocol,
        first.baseline_perplexity or first.perplexity,
        found.exact_token_bytes,
        tuple(_candidate(*each) for each in measured),
    )


def _candidate(scheme: KVCacheScheme, token_bytes: int, result: Evaluation) -> MeasuredKVCache:
    return MeasuredKVCache(
        scheme,
        token_bytes,
        result.kl_mean or 0.0,
        result.kl_p999 or 0.0,
        result.perplexity,
        result.top1_agreement or 0.0,
        result.kl_standard_error,
    )
