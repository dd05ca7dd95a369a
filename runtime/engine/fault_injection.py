"""Random trouble for tests: preemption, eviction and aborts more often than any load would cause them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from runtime.engine.scheduler import Scheduler


class Chaos:
    """Disturbs an engine before each of its steps; no token of a request that it does not abort may change by that.

    The first running sequence is never preempted, here as otherwise: liveness rests on it. All others may be, and not
    only from the young end. So running sequences need no longer be before all waiting ones, and of the bounds in
    `runtime.engine.scheduler` the one for forks and priorities holds.

    Args:
        seed: of all its decisions.
        preempt: chance of each running sequence but the first to be preempted, per step.
        evict: chance that some blocks that are cached and not in use are evicted, per step.
        abort: chance of each request to be aborted, per step.
    """

    def __init__(self, seed: int, *, preempt: float = 0.1, evict: float = 0.1, abort: float = 0.0) -> None:
        self._preempt, self._evict, self._abort = preempt, evict, abort
        self._random = Random(seed)

    def disturb(self, scheduler: Scheduler) -> None:
        """Preempts and evicts."""
        for sequence in scheduler.running[1:]:
            if self._random.random() < self._preempt:
                scheduler.preempt(sequence)
        if self._random.random() < self._evict:
            scheduler.pool.evict(self._random.randint(1, scheduler.pool.num_blocks))

    def choose_aborts(self, request_ids: Sequence[str]) -> list[str]:
        """Requests to abort now."""
        return [request_id for request_id in request_ids if self._random.random() < self._abort]
