"""Which form keys and values have while serving: what was asked for, or what the checkpoint records. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from compress.checkpoint.kv_cache import AUTO, UNCOMPRESSED, KVCacheScheme
from runtime.config import RuntimeConfig
from runtime.reach import Reach


@dataclass(frozen=True, slots=True)
class KVCacheChoice:
    """A scheme, why it, and what cannot be had with it."""

    scheme: KVCacheScheme = UNCOMPRESSED
    reason: str = "the default"
    notes: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """For people who start a server."""
        yield f"{self.scheme} ({self.reason})"
        yield from self.notes


DEFAULT_CHOICE = KVCacheChoice()


def choose_kv_cache(recorded: KVCacheScheme | None, config: RuntimeConfig, reach: Reach) -> KVCacheChoice:
    """The form of keys and values.

    A wish for the format that the checkpoint records changes only what else is asked for; another format starts from
    its own defaults.

    Args:
        recorded: the checkpoint's default.
        reach: what tokens look at. Sinks that they lose sight of need not be exact, and neither does what lies behind
            their window.

    Raises:
        SchemeError: an unknown format, or options that mean nothing for it.
    """
    if recorded is not None and config.kv_cache in (AUTO, recorded.format):
        scheme, reason = recorded, "the checkpoint's default"
    elif config.kv_cache == AUTO:
        scheme, reason = UNCOMPRESSED, "the default"
    else:
        scheme, reason = KVCacheScheme.named(config.kv_cache), "as asked for"
    wishes: dict[str, Any] = {"rotate": config.kv_rotate, "sinks": config.kv_sinks, "recent": config.kv_recent}
    changes = {name: wish for name, wish in wishes.items() if wish is not None and wish != getattr(scheme, name)}
    reason = "as asked for" if changes else reason
    return _within(replace(scheme, **changes), reach, reason, config.prefix_caching)


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
