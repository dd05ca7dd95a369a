"""A run of one policy, and the highest rate of requests that it serves well. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf, sqrt
from statistics import fmean

from compress.common.errors import ToolkitError
from runtime.bench.figures import Figures, Objective, summarize
from runtime.bench.load import Record
from runtime.core.collector import without_collections
from runtime.core.request import Delta
from runtime.simulate.costs import StepSize
from runtime.simulate.jobs import Job, at_rate
from runtime.simulate.policy import Policy, Setup
from runtime.simulate.worker import Events

COMPLETE = 200
TOO_LONG = 400
MOST_RUNS = 14
PRECISION = 1.03
"""Ratio of the rates between which a search ends."""
LEAST_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run.

    Attributes:
        rate: requests per second that arrived.
        utilization: share of the run in which a device was busy, the mean of all devices.
        steps, preemptions: of all engines.
    """

    policy: str
    rate: float
    figures: Figures
    utilization: float
    steps: int
    preemptions: int

    @property
    def good_share(self) -> float:
        """Share of the requests within all limits."""
        return self.figures.goodput.share if self.figures.goodput else 1.0

    @property
    def goodput(self) -> float:
        """Requests per second within all limits, by the rate of arrivals, not by the time of the last answer."""
        return self.rate * self.good_share


@without_collections()
def simulate(
    policy: type[Policy], setup: Setup, jobs: Sequence[Job], rate: float, objectives: Sequence[Objective]
) -> Outcome:
    """Runs a policy until every request is answered.

    Args:
        jobs: requests, at least one, whose times are scaled to `rate`.
        rate: requests per second.
    """
    events, records = Events(), dict[str, Record]()
    arriving = at_rate(jobs, rate)
    served = policy(setup, events, lambda delta: _note(records[delta.request_id], delta, events.now))
    for job in arriving:
        records[job.name] = Record(job.at, prompt_tokens=job.prompt_tokens)
        if setup.fits(job):
            events.at(job.at + setup.costs.request, partial(served.submit, job))
        else:
            records[job.name].status, records[job.name].end = TOO_LONG, job.at
            records[job.name].error = "longer than the context or the KV cache"
    events.run()
    figures = summarize([*records.values()], _peak(records.values()), objectives)
    busy = sum(worker.busy_seconds * worker.num_devices for worker in served.workers)
    return Outcome(
        policy.name,
        rate,
        figures,
        busy / setup.num_devices / figures.duration_s,
        sum(worker.engine.metrics.steps_total for worker in served.workers),
        sum(worker.engine.scheduler.stats.num_preemptions for worker in served.workers),
    )


def _note(record: Record, delta: Delta, now: float) -> None:
    """Records the tokens that a client gets."""
    if not record.chunk_times:
        record.cached_tokens = delta.num_cached_tokens
    record.chunk_times.append(now)
    record.output_tokens += len(delta.token_ids)
    if delta.finish_reason is not None:
        record.status, record.end = COMPLETE, now


def _peak(records: Iterable[Record]) -> int:
    """Returns the most requests at the same time."""
    changes = sorted(change for record in records for change in ((record.start, 1), (record.end, -1)))
    return max(accumulate(change for _, change in changes))


def best_rate(
    policy: type[Policy], setup: Setup, jobs: Sequence[Job], objectives: Sequence[Objective], good_share: float
) -> Outcome:
    """Returns the run at the highest rate, by bisection, at which a share of the requests is within all limits; without
    one, the run at the lowest rate that was tried."""
    low, high, rate = 0.0, inf, guess_rate(setup, jobs)
    best = outcome = simulate(policy, setup, jobs, rate, objectives)
    for _ in range(MOST_RUNS):
        if outcome.good_share >= good_share:
            best, low = outcome, rate
        else:
            high = rate
        if high / low < PRECISION if low else rate < LEAST_RATE:
            break
        rate = sqrt(low * high) if low and high < inf else rate * 2 if low else rate / 2
        outcome = simulate(policy, setup, jobs, rate, objectives)
    return best if low else outcome


def guess_rate(setup: Setup, jobs: Sequence[Job]) -> float:
    """Returns the requests per second that busy devices would answer with full batches."""
    prompt, output = fmean(job.prompt_tokens for job in jobs), fmean(job.output_tokens for job in jobs)
    batch = setup.config.max_num_seqs
    decode = setup.costs.of_step(StepSize(batch, batch, batch * (prompt + output / 2))) / batch
    return setup.num_devices / (setup.costs.of_step(StepSize(prompt, 1, 0, prompt * prompt / 2, 1)) + output * decode)


def left_out(kinds: Iterable[type[Policy]], setup: Setup) -> dict[str, str]:
    """Returns why policies are not possible, by name."""
    return {
        kind.name: f"needs --devices {kind.least_devices}" for kind in kinds if kind.least_devices > setup.num_devices
    }


def compare(
    kinds: Sequence[type[Policy]],
    setup: Setup,
    jobs: Sequence[Job],
    objectives: Sequence[Objective],
    good_share: float,
    rate: float | None = None,
) -> list[Outcome]:
    """Runs all policies that are possible.

    Args:
        rate: requests per second; None is the best of each policy.

    Raises:
        ToolkitError: no policy is possible, or no request fits into the context.
    """
    if not any(map(setup.fits, jobs)):
        problem = f"no request fits into the context of {setup.costs.max_model_len} tokens"
        raise ToolkitError(problem, "Shorten them: --scale-lengths 0.1")
    possible = [kind for kind in kinds if kind.least_devices <= setup.num_devices]
    if not possible:
        least = min(kind.least_devices for kind in kinds)
        raise ToolkitError(f"no policy works on {setup.num_devices} device", f"Add --devices {least}")
    if rate is None:
        return [best_rate(kind, setup, jobs, objectives, good_share) for kind in possible]
    return [simulate(kind, setup, jobs, rate, objectives) for kind in possible]
