"""KV cache formats for serving. Does not import torch; the arithmetic is in `kv_quant`.

A checkpoint records its default as `compression_config.kv_cache` in config.json, and serving may choose another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from compress.checkpoint.config import compression_block
from compress.common.errors import CheckpointError, SchemeError
from compress.models.config import MAX_SIZE

KV_CACHE_KEY = "kv_cache"
AUTO = "auto"
"""Requests the checkpoint's default; without one, the model's dtype."""
EXACT = "16bit"
"""Values in the model's dtype: nothing is quantized."""
KV_FORMATS = (EXACT, "fp8", "int8", "k8v4", "int4")
_SPLIT = {"k8v4": ("int8", "int4")}
"""Formats of keys and of values where they differ."""
STORED_NAMES = {"residual_length": "recent", "max_seq_length": "length"}
"""Names in config.json, recorded recipes and reports, where they differ from the code."""
CODE_BITS = {"fp8": 8, "int8": 8, "int4": 4}
METADATA_BITS = {"fp8": 16, "int8": 32, "int4": 32}
"""Bits of the parameters of one token and head: a float16 scale, and for integers a float16 offset."""


@dataclass(frozen=True, slots=True)
class KVCacheScheme:
    """Format of keys and values in the cache. Each token and key-value head is quantized once, on writing.

    Attributes:
        format: `16bit`, `fp8`, `int8`, `k8v4` (keys int8, values int4) or `int4`.
        rotate: keys and queries are Hadamard-rotated after RoPE, which changes no score and spreads outlier channels
            of keys.
        sinks: first tokens of a sequence that stay exact.
        residual_length: last tokens that every token sees exactly, itself included, as in KIVI (arXiv:2402.02750);
            those before it are read quantized.
    """

    format: str = EXACT
    rotate: bool = False
    sinks: int = 0
    residual_length: int = 0

    def __post_init__(self) -> None:
        if self.format not in KV_FORMATS:
            raise SchemeError(f"KV cache format {self.format!r} is unknown", "Use " + ", ".join(KV_FORMATS))
        if not isinstance(self.rotate, bool):
            raise SchemeError(f"kv_cache.rotate={self.rotate!r} is neither true nor false", "Use true or false")
        for name, count in (("sinks", self.sinks), (STORED_NAMES["residual_length"], self.residual_length)):
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_SIZE:
                raise SchemeError(f"kv_cache.{name}={count!r} is not a number of tokens", f"Use 0 to {MAX_SIZE:,}")
        if self.format == EXACT and (self.rotate or self.sinks or self.residual_length):
            raise SchemeError(
                "a 16-bit KV cache is exact already: rotation, sinks and a recent window change nothing",
                "Leave them out, or choose a format with fewer bits",
            )

    @classmethod
    def named(cls, format: str, rotate: bool | None = None, sinks: int = 0, residual_length: int = 0) -> KVCacheScheme:
        """Builds a scheme from a format's name. `rotate=None` rotates keys of 4 bits.

        Raises:
            SchemeError: an unknown format or a number of tokens below zero.
        """
        return cls(format, format == "int4" if rotate is None else rotate, sinks, residual_length)

    @property
    def is_exact(self) -> bool:
        return self.format == EXACT

    @property
    def key_format(self) -> str:
        """`fp8`, `int8` or `int4`; `16bit` when exact."""
        return _SPLIT.get(self.format, (self.format, self.format))[0]

    @property
    def value_format(self) -> str:
        return _SPLIT.get(self.format, (self.format, self.format))[1]

    def head_bytes(self, head_dim: int, itemsize: int, value_dim: int | None = None) -> int:
        """Bytes of the key and the value of one token and head, scales and offsets included, exact copies not.

        Args:
            itemsize: bytes of an element where nothing is quantized.
            value_dim: channels of the value; None for as many as the key has.
        """
        value_dim = head_dim if value_dim is None else value_dim
        return _bytes(self.key_format, head_dim, itemsize) + _bytes(self.value_format, value_dim, itemsize)

    def __str__(self) -> str:
        extras = [" rotated"] if self.rotate else []
        extras += [f", {self.sinks} exact sinks"] if self.sinks else []
        extras += [f", last {self.residual_length} exact"] if self.residual_length else []
        return self.format + "".join(extras)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as config.json holds them."""
        return with_stored_names(asdict(self))

    @classmethod
    def from_dict(cls, block: Mapping[str, Any]) -> KVCacheScheme:
        """The inverse of `to_dict`; missing entries have their defaults.

        Raises:
            SchemeError: not an object, an unknown field, or an invalid value.
        """
        if not isinstance(block, Mapping):
            raise SchemeError(f"kv_cache is {block!r} and not an object", 'Write {"format": "int8"} and the like')
        known = with_stored_names({field.name: field.name for field in fields(cls)})
        unknown = [name for name in block if name not in known]
        if unknown:
            raise SchemeError.unknown("field of kv_cache", unknown[0], known, "Fields")
        return cls(**{known[name]: value for name, value in block.items()})


def with_stored_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a scheme or a stage under the names that config.json and recorded recipes have for them."""
    return {STORED_NAMES.get(name, name): value for name, value in values.items()}


UNCOMPRESSED = KVCacheScheme()


def wished_kv_cache(
    recorded: KVCacheScheme | None,
    format: str = AUTO,
    rotate: bool | None = None,
    sinks: int | None = None,
    residual_length: int | None = None,
) -> KVCacheScheme:
    """Chooses the requested format, or the default that the checkpoint may record.

    The recorded format keeps the options recorded with it, another one has its own defaults; None overrides neither.

    Raises:
        SchemeError: an unknown format, or options that it does not have.
    """
    scheme = KVCacheScheme.named(EXACT if format == AUTO else format)
    if recorded is not None and format in (AUTO, recorded.format):
        scheme = recorded
    overrides: dict[str, Any] = {"rotate": rotate, "sinks": sinks, "residual_length": residual_length}
    return replace(scheme, **{name: value for name, value in overrides.items() if value is not None})


def stored_kv_cache(config: Mapping[str, Any]) -> KVCacheScheme | None:
    """Returns the default recorded in a checkpoint's config.json, or None.

    Raises:
        SchemeError: the record cannot be understood.
    """
    block = compression_block(config).get(KV_CACHE_KEY)
    return None if block is None else KVCacheScheme.from_dict(block)


FP8_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": True}
"""Keys and values in 8-bit floats as compressed-tensors describes them; no scales are stored."""


def with_kv_cache(quantization: Mapping[str, Any], scheme: KVCacheScheme | None) -> dict[str, Any]:
    """Adds the default form to a `quantization_config` with a place for it. Of all forms, other engines know fp8."""
    is_known = scheme is not None and scheme.format == "fp8" and "kv_cache_scheme" in quantization
    return {**quantization, "kv_cache_scheme": FP8_CACHE} if is_known else dict(quantization)


def _bytes(format: str, head_dim: int, itemsize: int) -> int:
    if format == EXACT:
        return head_dim * itemsize
    return (-(-head_dim * CODE_BITS[format] // 8)) + METADATA_BITS[format] // 8


KV_MEASURED_KEY = "kv_cache_measured"


@dataclass(frozen=True, slots=True)
class MeasuredKVCache:
    """The measured cost of one format of keys and values, against a 16-bit cache of the same checkpoint.

    Attributes:
        token_bytes: keys and values of one token in all layers; exact sinks and recent tokens not counted.
        kl_mean, kl_p999: mean and 99.9 % quantile of KL(16-bit cache || this), in nats.
        kl_standard_error: of the mean, over windows; None for a single window.
        top1_agreement: share of positions with the same most likely token.
    """

    scheme: KVCacheScheme
    token_bytes: int
    kl_mean: float
    kl_p999: float
    perplexity: float
    top1_agreement: float
    kl_standard_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"scheme": self.scheme.to_dict()}


@dataclass(frozen=True, slots=True)
class KVCacheRecord:
    """All measured formats, and the data they were measured on.

    Attributes:
        max_kl: the gate: most mean KL that the recipe allowed.
        tokens: number of predicted tokens; a window has `length` of them and one more.
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
        """Measured cost of this format; None when it was not measured."""
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
            raise CheckpointError(f"{KV_MEASURED_KEY} has a KL that is not a number", "Write the checkpoint again")
        return record


def _candidate(block: Mapping[str, Any]) -> MeasuredKVCache:
    return MeasuredKVCache(**{**block, "scheme": KVCacheScheme.from_dict(block["scheme"])})


def measured_kv_caches(config: Mapping[str, Any]) -> KVCacheRecord | None:
    """Reads the record in a checkpoint's config.json; None without one.

    Raises:
        CheckpointError: the record cannot be understood.
        SchemeError: a form in it cannot.
    """
    block = compression_block(config).get(KV_MEASURED_KEY)
    return None if block is None else KVCacheRecord.from_dict(block)


def kv_cache_warning(record: KVCacheRecord | None, scheme: KVCacheScheme) -> str | None:
    """Returns the reason against serving in this format, as measured when the checkpoint was made; None without one."""
    found = record.find(scheme) if record else None
    if record is None or found is None or record.passes(found):
        return None
    return (
        f"measured to change this checkpoint by a mean KL of {found.kl_mean:.4g} nats (perplexity "
        f"{record.perplexity:.2f} -> {found.perplexity:.2f}, {record.tokens:,} tokens of {record.data}), more than the "
        f"{record.max_kl:g} its recipe allows"
    )
