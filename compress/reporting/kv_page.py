"""The section of a page that says how keys and values are kept, and what every form was measured to cost."""

from __future__ import annotations

from compress.checkpoint.kv_cache import EXACT
from compress.checkpoint.kv_measured import KVCacheRecord, MeasuredKVCache
from compress.reporting.axis import short
from compress.reporting.html import bullets, facts, paragraph, section, table, tag
from compress.reporting.run_report import KVCacheFacts, RunReport
from compress.reporting.svg import MUTED, Bar, bars, figure
from compress.reporting.units import change, percent, size

GIB = 2**30
HEAD = (
    "keys and values",
    "one token",
    "tokens per GiB",
    "KL mean",
    "KL 99.9 %",
    "perplexity",
    "change",
    "first token",
    "",
)
NUMERIC = (1, 2, 3, 4, 5, 6, 7)


def kv_section(report: RunReport) -> list[str]:
    """One section, or none where the recipe said nothing of the cache."""
    found = report.kv_cache
    if found is None:
        return []
    said = [] if not found.warning else [bullets([f"warning: {found.warning}"])]
    if found.record is None:
        return [section("KV cache", paragraph("Keys and values stay 16 bits; nothing was measured."), *said)]
    record = found.record
    measured = facts(
        [
            ("predicted tokens", f"{record.tokens:,}, in windows of {record.length:,}"),
            ("compared with", "this checkpoint with a cache of 16 bits"),
            ("limit", f"a mean KL of {record.max_kl:g}"),
            ("protocol", record.protocol),
        ]
    )
    drawn = tag("div", _bytes_chart(record), _cost_chart(record), class_="charts")
    return [section("KV cache", drawn, table(HEAD, _rows(found, record), NUMERIC), measured, *said)]


def _rows(found: KVCacheFacts, record: KVCacheRecord) -> list[tuple[str, ...]]:
    chosen = "the default" if found.default.is_exact else ""
    exact = (EXACT, size(record.token_bytes), _tokens(record.token_bytes), "0", "0", f"{record.perplexity:.3f}")
    rows: list[tuple[str, ...]] = [(*exact, "-", "-", chosen)]
    return rows + [_row(found, record, each) for each in record.candidates]


def _row(found: KVCacheFacts, record: KVCacheRecord, each: MeasuredKVCache) -> tuple[str, ...]:
    verdict = "within the limit" if record.passes(each) else "above the limit"
    return (
        str(each.scheme),
        size(each.token_bytes),
        _tokens(each.token_bytes),
        _kl(each),
        short(each.kl_p999),
        f"{each.perplexity:.3f}",
        change(record.perplexity, each.perplexity) if record.perplexity else "-",
        percent(each.top1_agreement),
        "the default" if each.scheme == found.default else verdict,
    )


def _kl(each: MeasuredKVCache) -> str:
    error = f" ± {each.kl_standard_error:.4f}" if each.kl_standard_error is not None else ""
    return f"{each.kl_mean:.4f}{error}"


def _tokens(token_bytes: int) -> str:
    return f"{GIB // token_bytes:,}" if token_bytes else "-"


def _bytes_chart(record: KVCacheRecord) -> str:
    rows = [Bar(EXACT, size(record.token_bytes), ((record.token_bytes, MUTED),))]
    rows += [Bar(str(each.scheme), size(each.token_bytes), ((each.token_bytes, 2),)) for each in record.candidates]
    subtitle = "keys and values of one token in all layers, with their scales"
    return figure("Bytes per token", subtitle, bars("Bytes of keys and values per token", rows))


def _cost_chart(record: KVCacheRecord) -> str:
    rows = [Bar(str(each.scheme), _kl(each), ((each.kl_mean, 0),)) for each in record.candidates]
    subtitle = "mean KL(16-bit cache || this), in nats, ± standard error over windows"
    return figure("What it costs", subtitle, bars("Divergence from a cache of 16 bits", rows)) if rows else ""
