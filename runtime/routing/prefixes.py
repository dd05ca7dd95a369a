"""Choice of an engine by the prefixes of prompts that it got before, and by its load. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MOST_AHEAD = 8
"""Requests that an engine with the whole prompt in its cache may have more than another one and still get it."""


def rank(shares: Mapping[str, float], loads: Mapping[str, int]) -> list[str]:
    """Returns names in order of preference: the longest cached prefix, unless that engine is too busy; then by load.

    An engine with a share of the prompt may have that share of `MOST_AHEAD` requests more than another one. So a prefix
    that most prompts have, such as the beginning of a chat template, keeps no engine idle.

    Args:
        shares: cached part of the prompt by name, 0 to 1.
        loads: requests that have not ended by name; of equal engines the first is preferred.
    """
    return sorted(loads, key=lambda name: (loads[name] - MOST_AHEAD * shares[name], -shares[name]))


@dataclass(slots=True)
class SentPrefixes:
    """Prefixes that engines were sent, which are therefore in their caches. The least recently used are forgotten.

    Attributes:
        most: keys to remember for each engine.
        keys: keys by name of an engine; the engine that was chosen last is the last one.
    """

    most: int
    keys: dict[str, OrderedDict[bytes, None]] = field(default_factory=dict)

    def choose(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """Returns names in order of preference, see `rank`; of equal engines the one that was chosen least recently.
        Forgets engines that `loads` does not have.

        Args:
            keys: chained hashes of the blocks of a prompt.
        """
        self.keys = {name: known for name, known in self.keys.items() if name in loads}
        places = {name: place for place, name in enumerate(self.keys)}
        oldest_first = sorted(loads, key=lambda name: places.get(name, -1))
        shares = {name: self.count(keys, name) / max(1, len(keys)) for name in loads}
        return rank(shares, {name: loads[name] for name in oldest_first})

    def count(self, keys: Sequence[bytes], name: str) -> int:
        """Returns how many of the first keys an engine was sent. With a key `note` touches all before it, which are
        therefore known as well."""
        known = self.keys.get(name, OrderedDict[bytes, None]())
        return bisect_right(keys, False, key=lambda key: key not in known)

    def note(self, keys: Sequence[bytes], name: str) -> None:
        """Notes that an engine gets a prompt."""
        self.keys[name] = known = self.keys.pop(name, OrderedDict())
        for key in reversed(keys):  # prefixes are forgotten from their end, as caches do
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.most:
            known.popitem(last=False)
