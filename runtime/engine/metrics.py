"""Figures of a running engine, and their text for Prometheus. Written by the engine's thread, read by any. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from runtime.core.request import FinishReason
from runtime.engine.scheduler import Scheduler

PREFIX = "runtime_"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Histogram:
    """Counts of observations up to each bound, as Prometheus wants them."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum}"
        yield f"{name}_count {total}"


def _gauge(text: str) -> float:
    return field(default=0, metadata={"kind": "gauge", "help": text})


def _counter(text: str) -> int:
    return field(default=0, metadata={"kind": "counter", "help": text})


@dataclass(slots=True)
class RequestTimes:
    """When what happened to one request, in the engine clock's seconds."""

    arrival: float
    first_scheduled: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class Metrics:
    """Everything counted. Field names are the metric names, `PREFIX` before them; they are stable."""

    num_requests_running: float = _gauge("Sequences being computed.")
    num_requests_waiting: float = _gauge("Sequences waiting for room.")
    kv_cache_usage_perc: float = _gauge("Share of KV blocks in use, 0 to 1.")
    prompt_tokens_total: int = _counter("Prompt tokens of started requests.")
    generation_tokens_total: int = _counter("Tokens generated.")
    prefix_cache_queries_total: int = _counter("Tokens looked up in the prefix cache.")
    prefix_cache_hits_total: int = _counter("Tokens found in the prefix cache.")
    preemptions_total: int = _counter("Sequences preempted.")
    preempted_tokens_total: int = _counter("Computed tokens lost to preemption.")
    spec_decode_num_draft_tokens_total: int = _counter("Draft tokens verified, of a tree all its nodes.")
    spec_decode_num_accepted_tokens_total: int = _counter("Draft tokens accepted.")
    step_errors_total: int = _counter("Steps that failed as a whole.")
    steps_total: int = _counter("Steps.")
    host_blocks_offloaded_total: int = _counter("KV blocks saved in host memory when they were evicted.")
    host_blocks_restored_total: int = _counter("KV blocks filled from host memory instead of being computed.")
    host_cache_usage_perc: float = _gauge("Share of the host memory for KV blocks in use, 0 to 1.")
    broken_invariants_total: int = _counter("Times that broken bookkeeping was found and rebuilt.")
    request_success_total: Counter[str] = field(
        default_factory=Counter,
        metadata={"kind": "labels", "help": "Requests ended, by reason.", "label": "finished_reason"},
    )
    steps_by_path_total: Counter[str] = field(
        default_factory=Counter,
        metadata={"kind": "labels", "help": "Steps on a GPU: recorded, or why not.", "label": "path"},
    )
    request_queue_time_seconds: Histogram = field(
        default_factory=Histogram, metadata={"kind": "histogram", "help": "From arrival to the first step."}
    )
    time_to_first_token_seconds: Histogram = field(
        default_factory=Histogram, metadata={"kind": "histogram", "help": "From arrival to the first token."}
    )
    inter_token_latency_seconds: Histogram = field(
        default_factory=Histogram, metadata={"kind": "histogram", "help": "Between two tokens of a request."}
    )
    e2e_request_latency_seconds: Histogram = field(
        default_factory=Histogram, metadata={"kind": "histogram", "help": "From arrival to the end."}
    )

    def note_scheduled(self, times: RequestTimes, num_prompt_tokens: int, now: float) -> None:
        """A step with this request begins; only its first one counts."""
        if times.first_scheduled is None:
            times.first_scheduled = now
            self.prompt_tokens_total += num_prompt_tokens
            self.request_queue_time_seconds.observe(now - times.arrival)

    def note_tokens(self, times: RequestTimes, count: int, now: float) -> None:
        """A step gave a request new tokens."""
        self.generation_tokens_total += count
        if times.last_token is None:
            self.time_to_first_token_seconds.observe(now - times.arrival)
        else:
            self.inter_token_latency_seconds.observe((now - times.last_token) / count)
        times.last_token = now

    def note_end(self, times: RequestTimes, reason: FinishReason, now: float) -> None:
        """A request ended."""
        self.request_success_total[reason.value] += 1
        self.e2e_request_latency_seconds.observe(now - times.arrival)

    def read_scheduler(self, scheduler: Scheduler) -> None:
        """Takes over what the scheduler knows; it only reads numbers, so any thread may do it."""
        pool, stats = scheduler.pool, scheduler.stats
        self.num_requests_running = len(scheduler.running)
        self.num_requests_waiting = len(scheduler.waiting)
        self.kv_cache_usage_perc = 1 - pool.num_free / pool.num_blocks
        self.prefix_cache_queries_total = stats.num_prefix_queries
        self.prefix_cache_hits_total = stats.num_prefix_hits
        self.host_blocks_offloaded_total = pool.tier.num_offloads
        self.host_blocks_restored_total = pool.tier.num_restores
        self.host_cache_usage_perc = pool.tier.num_used / max(1, pool.tier.num_slots)
        self.preemptions_total = stats.num_preemptions
        self.preempted_tokens_total = stats.num_preempted_tokens

    def render(self) -> str:
        """All figures in Prometheus' text format."""
        return "\n".join(line for item in fields(self) for line in self._lines(item.name, **item.metadata)) + "\n"

    def _lines(self, field_name: str, kind: str, help: str, label: str = "") -> Iterator[str]:
        name, value = PREFIX + field_name, getattr(self, field_name)
        yield f"# HELP {name} {help}"
        yield f"# TYPE {name} {'counter' if kind == 'labels' else kind}"
        match kind:
            case "histogram":
                yield from value.lines(name)
            case "labels":
                yield from (f'{name}{{{label}="{each}"}} {count}' for each, count in sorted(value.items()))
            case _:
                yield f"{name} {value}"
