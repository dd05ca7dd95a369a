"""Random preemption, eviction and aborts before a step, more often than any load would cause them."""

from random import Random

from runtime.core.request import Delta
from runtime.engine.engine import Engine


class FaultInjection:
    """A `before_step` hook of an engine. It changes no token of a request that it does not abort.

    The first running sequence is never preempted, here as otherwise: liveness rests on it. Any of the others may be, so
    running sequences need not precede all waiting ones, and of the bounds in `runtime.engine.scheduler` the one for
    forks and priorities holds.

    Args:
        seed: of all its decisions.
        preempt: probability per step that a running sequence other than the first is preempted.
        evict: probability per step that pages which are cached but not in use are evicted.
        abort: probability per step that a request is aborted.
    """

    def __init__(self, seed: int, *, preempt: float = 0.1, evict: float = 0.1, abort: float = 0.0) -> None:
        self._preempt, self._evict, self._abort = preempt, evict, abort
        self._random = Random(seed)

    def __call__(self, engine: Engine) -> list[Delta]:
        """Preempts, evicts and aborts; returns the last deltas of the aborted requests."""
        scheduler = engine.scheduler
        for sequence in scheduler.running[1:]:
            if self._random.random() < self._preempt:
                scheduler.preempt(sequence)
        if self._random.random() < self._evict:
            scheduler.pool.evict(self._random.randint(1, scheduler.pool.num_blocks))
            if scheduler.states is not None and scheduler.states.pool.num_free:
                scheduler.states.pool.release(scheduler.states.pool.allocate())
        aborted = [name for name in engine.output_processor.ids() if self._random.random() < self._abort]
        return [delta for name in aborted for delta in engine.abort(name)]
