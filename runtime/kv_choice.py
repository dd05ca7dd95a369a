"""Which form keys and values have while serving: what was asked for, or what the checkpoint records. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme, wished_kv_cache
from compress.checkpoint.kv_measured import KVCacheRecord, kv_cache_warning
from runtime.config import RuntimeConfig
from runtime.reach import Reach


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
    recorded: KVCacheScheme | None, config: RuntimeConfig, reach: Reach, measured: KVCacheRecord | None = None
) -> KVCacheChoice:
    """The form of keys and values.

    Args:
        recorded: the checkpoint's default.
        reach: what tokens look at. Sinks that they lose sight of need not be exact, and neither does what lies behind
            their window.
        measured: what forms were measured to cost this checkpoint; one above its limit is warned of.

    Raises:
        SchemeError: an unknown format, or options that mean nothing for it.
    """
    scheme = wished_kv_cache(recorded, config.kv_cache, config.kv_rotate, config.kv_sinks, config.kv_recent)
    reason = "as asked for"
    if scheme == (recorded or UNCOMPRESSED):
        reason = "the default" if recorded is None else "the checkpoint's default"
    choice = _within(scheme, reach, reason, config.prefix_caching)
    warning = kv_cache_warning(measured, scheme)
    return choice if warning is None else replace(choice, notes=(warning, *choice.notes))


def _within(scheme: KVCacheScheme, reach: Reach, reason: str, prefix_caching: bool) -> KVCacheChoice:
    """Leaves out exact tokens that nobody sees, and says what the others cost."""
    notes = []
    if reach.window is not None and scheme.sinks > reach.sinks:
        notes.append(f"{reach.sinks} instead of {scheme.sinks} exact sinks: tokens see {reach}")
        scheme = replace(scheme, sinks=reach.sinks)
    if reach.window is not None and scheme.recent > reach.window:
        notes.append(f"{reach.window} instead of {scheme.recent} exact recent tokens: tokens see {reach}")
        scheme = replace(scheme, recent=reach.window)
    if scheme.recent and prefix_caching:
        notes.append(
            f"prefix caching is off, and each of several answers computes its prompt: the last {scheme.recent} tokens "
            "are exact for the sequence that computed them only"
        )
    return KVCacheChoice(scheme, reason, tuple(notes))
