"""Constraints without a grammar, and how engines without a tokenizer get them."""

from collections.abc import Callable

from exact_sampling import pack_mask

from runtime.core.request import Constraint, Request, Sequence
from runtime.engine.engine import Engine


class NoRepeats:
    """Allows tokens below 100 that leave another remainder by three than the one before."""

    is_complete = is_stuck = is_slow = False

    def __init__(self) -> None:
        self.said = [0]

    def mask(self) -> bytes:
        return pack_mask([token for token in range(100) if self.allows(token)], 100)

    def allows(self, token: int) -> bool:
        return token < 100 and token % 3 != self.said[-1] % 3

    def accept(self, token_ids: list[int]) -> int:
        count = 0
        while count < len(token_ids) and self.allows(token_ids[count]):
            self.said.append(token_ids[count])
            count += 1
        return count

    def prepare(self, token_id: int) -> None:
        pass

    def rollback(self, num_tokens: int) -> None:
        del self.said[len(self.said) - num_tokens :]


def constrain(engine: Engine, constraint: Callable[[], Constraint]) -> None:
    """Gives every other request a constraint."""
    add = engine.scheduler.add

    def constrained(request: Request) -> Sequence:
        sequence = add(request)
        if int(request.id) % 2:
            sequence.constraint = constraint()
        return sequence

    engine.scheduler.add = constrained
