"""What a report says of keys and values, every field checked."""

from __future__ import annotations

from compress.checkpoint.errors import SchemeError
from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_measured import KVCacheRecord, MeasuredKVCache
from compress.reporting.fields import Fields
from compress.reporting.run_report import KVCacheFacts


def kv_cache_facts(fields: Fields) -> KVCacheFacts:
    """Raises CheckpointError that names the place."""
    record = _record(fields.child("measured")) if "measured" in fields else None
    return KVCacheFacts(_scheme(fields, "default"), fields.text("warning", ""), record)


def _record(fields: Fields) -> KVCacheRecord:
    return KVCacheRecord(
        max_kl=fields.number("max_kl"),
        tokens=fields.count("tokens"),
        length=fields.count("length"),
        data=fields.text("data"),
        data_sha256=fields.text("data_sha256"),
        protocol=fields.text("protocol"),
        perplexity=fields.number("perplexity"),
        token_bytes=fields.count("token_bytes"),
        candidates=tuple(map(_candidate, fields.children("candidates"))),
    )


def _candidate(fields: Fields) -> MeasuredKVCache:
    return MeasuredKVCache(
        scheme=_scheme(fields, "scheme"),
        token_bytes=fields.count("token_bytes"),
        kl_mean=fields.number("kl_mean"),
        kl_p999=fields.number("kl_p999"),
        perplexity=fields.number("perplexity"),
        top1_agreement=fields.number("top1_agreement"),
        kl_standard_error=fields.optional_number("kl_standard_error"),
    )


def _scheme(fields: Fields, key: str) -> KVCacheScheme:
    try:
        return KVCacheScheme.from_dict(fields.child(key).values)
    except (SchemeError, TypeError) as error:
        fields.refuse(key, f"cannot be read ({error})")
