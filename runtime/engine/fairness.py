"""Fair sharing of the engine between clients: places among the running sequences, and tokens of a step. Pure; no torch.

A client is a name in `RequestOptions.client`. Places are shared by max-min fairness in round-robin turns, and tokens
likewise:

* The next place goes to the client that holds the fewest; among equals, to the client whose last turn is longest ago. A
  new client's turn is after all others. Among the sequences of one client their order decides.
* A client that holds at least two places fewer than another does not wait for a free one: it takes the last place of
  the client that holds the most, one sequence per step and only when its other prompts are computed. A client that
  loses a place still holds at least as many as the one that gains it: no displacement undoes another, and recomputation
  is at the expense of clients above their share.
* What decodes leave of a step is divided between the clients that have prompts to compute, so that decodes and prompts
  together become as equal as possible: seconds in steps with decodes (`runtime.engine.step_costs`), tokens in others.
  What a client cannot use goes to the others.

Let T be the token budget of a step, S the most running sequences and C the number of clients, with C <= S and
S + C <= T, and let the pool hold S blocks more than C whole contexts. Then, independent of other clients' requests, the
first running sequence of a client computes at least one token in each step, and a request of a client that has no other
begins with the next step and computes at least `min(prefill_chunk, (T - S) // C)` tokens of its prompt per step, or in
steps with decodes what fits in a C-th of the time that these leave, and one at least. No step is longer than T tokens.

Source: Y. Sheng et al., "Fairness in serving large language models" (2024). A counter of served tokens is not needed,
because every client is served in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from runtime.core.request import Sequence


@dataclass(slots=True)
class Client:
    """Client with unfinished sequences.

    Attributes:
        turn: number of its last turn; the lowest is next among clients that hold equally many places.
        num_sequences: number of running and waiting sequences.
    """

    turn: int
    num_sequences: int = 0


@dataclass(slots=True)
class Clients:
    """Clients with unfinished sequences by name, and the number of turns so far."""

    by_name: dict[str, Client] = field(default_factory=dict)
    num_turns: int = 0

    @property
    def are_several(self) -> bool:
        return len(self.by_name) > 1

    def join(self, name: str) -> None:
        """Adds a sequence; a new client's turn is after all others."""
        if name not in self.by_name:
            self.by_name[name] = Client(self._turn())
        self.by_name[name].num_sequences += 1

    def leave(self, name: str) -> None:
        """Removes a sequence, and its client with the last one."""
        client = self.by_name[name]
        client.num_sequences -= 1
        if not client.num_sequences:
            del self.by_name[name]

    def note_place(self, name: str) -> None:
        """Records that a client got a place: its next turn is after all others."""
        self.by_name[name].turn = self._turn()

    def _turn(self) -> int:
        self.num_turns += 1
        return self.num_turns


def count_places(running: Iterable[Sequence]) -> Counter[str]:
    """Returns the number of running sequences by client."""
    return Counter(sequence.client for sequence in running)


def in_prompt(running: Iterable[Sequence]) -> set[str]:
    """Returns the clients that have a prompt in progress."""
    return {s.client for s in running if s.num_tokens - s.num_computed_tokens > 1}


def first_of_each(waiting: Iterable[Sequence]) -> list[Sequence]:
    """Returns the first waiting sequence of each client."""
    first: dict[str, Sequence] = {}
    for sequence in waiting:
        first.setdefault(sequence.client, sequence)
    return list(first.values())


def in_turns(running: Iterable[Sequence]) -> list[Sequence]:
    """Returns running sequences in turns: the first of every client, then the second of every client, and so on. The
    last one belongs to a client with the most places."""
    by_client: dict[str, list[Sequence]] = {}
    for sequence in running:
        by_client.setdefault(sequence.client, []).append(sequence)
    return [sequence for turn in zip_longest(*by_client.values()) for sequence in turn if sequence is not None]


def divide_cost(
    budget: float, decodes: Mapping[str, float], least: Mapping[str, float], asking: set[str]
) -> dict[str, float]:
    """Divides the cost of the prompts of a step, in tokens or in seconds.

    Args:
        budget: cost that decodes leave; at least the sum of `least`.
        decodes: cost of decodes by client.
        least: cost of one token of each client that has a prompt in progress; each gets at least this.
        asking: clients that have a prompt in progress or a waiting one.

    Returns:
        Maximum cost of prompts by client; their sum is at most `budget`.
    """
    used = {name: decodes.get(name, 0) + least.get(name, 0) for name in asking}
    level = _water_level(budget - sum(least.values()), sorted(used.values()))
    return {name: max(0, level - used[name]) + least.get(name, 0) for name in asking}


def _water_level(amount: float, ground: list[float]) -> float:
    """Returns the level to which `amount` fills places of ascending heights."""
    level, total = 0.0, amount
    for count, height in enumerate(ground, start=1):
        if count > 1 and level <= height:
            break
        total += height
        level = total / count
    return level
