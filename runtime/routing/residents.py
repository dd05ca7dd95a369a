"""Choice of the loaded models that make room for another one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Resident:
    """A model in memory.

    Attributes:
        num_bytes: memory of its engines, as planned.
        last_used: time of its last request in seconds.
        is_idle: whether it may be unloaded: it is loaded, and has no requests.
    """

    num_bytes: int
    last_used: float = 0.0
    is_idle: bool = False


def choose_unloads(residents: Mapping[str, Resident], num_bytes: int, limit: int) -> list[str] | None:
    """Returns the names of models to unload, least recently used first, until another one fits. None if it fits only
    after a model that is not idle has gone.

    Args:
        residents: models in memory by name.
        num_bytes: memory of the other model.
        limit: memory of all models together.
    """
    room = limit - sum(resident.num_bytes for resident in residents.values())
    idle = [name for name, resident in residents.items() if resident.is_idle]
    unloads: list[str] = []
    for name in sorted(idle, key=lambda name: residents[name].last_used):
        if room >= num_bytes:
            break
        room += residents[name].num_bytes
        unloads.append(name)
    return unloads if room >= num_bytes else None
