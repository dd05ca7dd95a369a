"""Metrics of a running engine: plain numbers, written by the engine's thread and rendered by `prometheus_client`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.core.request import FinishReason
from runtime.engine.scheduler import Scheduler
from runtime.engine.state_manager import StateManager

PREFIX = "runtime_"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Histogram:
    """Histogram without locks: the engine's thread adds one observation per token."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Adds one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns upper bound and cumulative count of each bucket."""
        return list(zip((*map(str, self.bounds), "+Inf"), map(float, accumulate(self.counts)), strict=True))


def _gauge(text: str) -> float:
    return field(default=0, metadata={"kind": "gauge", "help": text})


def _counter(text: str) -> int:
    return field(default=0, metadata={"kind": "counter", "help": text})


@dataclass(slots=True)
class RequestTimes:
    """Times of one request in seconds of the engine's clock."""

    arrival: float
    first_scheduled: float | None = None
    last_token: float | None = None


@dataclass(eq=False, slots=True)
class Metrics(Collector):
    """Counters, gauges and histograms. `PREFIX` and the name of a field make the name of a metric; names are stable."""

    num_requests_running: float = _gauge("Sequences being computed.")
    num_requests_waiting: float = _gauge("Sequences waiting for memory or a place.")
    kv_cache_usage_perc: float = _gauge("Share of KV blocks in use, 0 to 1.")
    prompt_tokens_total: int = _counter("Prompt tokens of started requests.")
    generation_tokens_total: int = _counter("Tokens generated.")
    prefix_cache_queries_total: int = _counter("Tokens looked up in the prefix cache.")
    prefix_cache_hits_total: int = _counter("Tokens found in the prefix cache.")
    expert_cache_queries_total: int = _counter("Experts of a layer looked up in the cache of experts.")
    expert_cache_hits_total: int = _counter("Experts of a layer found in the cache of experts.")
    preemptions_total: int = _counter("Sequences preempted.")
    preempted_tokens_total: int = _counter("Computed tokens lost to preemption.")
    spec_decode_num_draft_tokens_total: int = _counter("Draft tokens verified; for trees, all nodes.")
    spec_decode_num_accepted_tokens_total: int = _counter("Draft tokens accepted.")
    step_errors_total: int = _counter("Failed steps.")
    steps_total: int = _counter("Steps.")
    host_blocks_offloaded_total: int = _counter("KV blocks saved to host memory on eviction.")
    host_blocks_restored_total: int = _counter("KV blocks loaded from host memory instead of being computed.")
    host_cache_usage_perc: float = _gauge("Share of the host memory for KV blocks in use, 0 to 1.")
    state_slots: float = _gauge("Slots for recurrent states.")
    state_slots_used: float = _gauge("Slots whose state a running sequence reads or writes.")
    state_slots_saved: float = _gauge("Slots whose state a later sequence can continue from.")
    state_hits_total: int = _counter("Sequences that started from a saved state.")
    state_evictions_total: int = _counter("Saved states evicted from their slot.")
    host_states_saved: float = _gauge("Saved states in host memory.")
    host_states_offloaded_total: int = _counter("Saved states copied to host memory on eviction.")
    host_states_restored_total: int = _counter("States copied from host memory to start a sequence.")
    broken_invariants_total: int = _counter("Number of rebuilds of inconsistent bookkeeping.")
    request_success_total: Counter[str] = field(
        default_factory=Counter, metadata={"help": "Requests ended, by reason.", "labels": ("finished_reason",)}
    )
    steps_by_path_total: Counter[str] = field(
        default_factory=Counter,
        metadata={"help": "Steps on a GPU: recorded (CUDA graph), the reason why not, or both.", "labels": ("path",)},
    )
    steps_by_overlap_total: Counter[str] = field(
        default_factory=Counter,
        metadata={
            "help": "Steps whose tokens the device draws: overlapped with the next step, or the reason why not.",
            "labels": ("overlap",),
        },
    )
    linears_total: Counter[tuple[str, str, str]] = field(
        default_factory=Counter,
        metadata={
            "help": "Linears of the model, by the kernel that multiplies by them.",
            "labels": ("linear", "form", "kernel"),
        },
    )
    request_queue_time_seconds: Histogram = field(
        default_factory=Histogram, metadata={"help": "From arrival to the first step."}
    )
    time_to_first_token_seconds: Histogram = field(
        default_factory=Histogram, metadata={"help": "From arrival to the first token."}
    )
    inter_token_latency_seconds: Histogram = field(
        default_factory=Histogram, metadata={"help": "Between two tokens of a request."}
    )
    e2e_request_latency_seconds: Histogram = field(
        default_factory=Histogram, metadata={"help": "From arrival to the end."}
    )

    def note_scheduled(self, times: RequestTimes, num_prompt_tokens: int, now: float) -> None:
        """Counts the first step of a request; later calls have no effect."""
        if times.first_scheduled is None:
            times.first_scheduled = now
            self.prompt_tokens_total += num_prompt_tokens
            self.request_queue_time_seconds.observe(now - times.arrival)

    def note_tokens(self, times: RequestTimes, count: int, now: float) -> None:
        """Counts the tokens that a step added to a request."""
        self.generation_tokens_total += count
        if times.last_token is None:
            self.time_to_first_token_seconds.observe(now - times.arrival)
        else:
            self.inter_token_latency_seconds.observe((now - times.last_token) / count)
        times.last_token = now

    def note_end(self, times: RequestTimes, reason: FinishReason, now: float) -> None:
        """Counts the end of a request."""
        self.request_success_total[reason.value] += 1
        self.e2e_request_latency_seconds.observe(now - times.arrival)

    def read_scheduler(self, scheduler: Scheduler) -> None:
        """Copies the scheduler's statistics. Reads only, so any thread may call it."""
        pool, stats = scheduler.pool, scheduler.stats
        self.num_requests_running = len(scheduler.running)
        self.num_requests_waiting = len(scheduler.waiting)
        self.kv_cache_usage_perc = 1 - pool.num_free / pool.num_blocks
        self.prefix_cache_queries_total = stats.num_prefix_queries
        self.prefix_cache_hits_total = stats.num_prefix_hits
        self.host_blocks_offloaded_total = pool.tier.num_offloads
        self.host_blocks_restored_total = pool.tier.num_restores
        self.host_cache_usage_perc = pool.tier.num_used / max(1, pool.tier.num_slots)
        if scheduler.states is not None:
            self._read_states(scheduler.states)
        self.preemptions_total = stats.num_preemptions
        self.preempted_tokens_total = stats.num_preempted_tokens

    def _read_states(self, states: StateManager) -> None:
        pool = states.pool
        self.state_slots, self.state_slots_saved = pool.num_slots, pool.num_findable
        self.state_slots_used = pool.num_slots - pool.num_free
        self.state_hits_total, self.state_evictions_total = states.num_hits, pool.num_evictions
        self.host_states_saved = pool.tier.num_used
        self.host_states_offloaded_total = pool.tier.num_offloads
        self.host_states_restored_total = pool.tier.num_restores

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics in the order of the fields."""
        return (_family(item, getattr(self, item.name)) for item in fields(self))

    def render(self) -> str:
        """Renders Prometheus' text format 0.0.4 from a separate registry."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()


def _family(item: Field, value: float | Counter[Any] | Histogram) -> Metric:
    name, text = PREFIX + item.name, item.metadata["help"]
    if isinstance(value, Histogram):
        return HistogramMetricFamily(name, text, buckets=value.cumulative(), sum_value=value.sum)
    if isinstance(value, Counter):
        family = CounterMetricFamily(name, text, labels=item.metadata["labels"])
        for labels, count in sorted(value.items()):
            family.add_metric([labels] if isinstance(labels, str) else labels, count)
        return family
    kind = GaugeMetricFamily if item.metadata["kind"] == "gauge" else CounterMetricFamily
    return kind(name, text, value=value)
