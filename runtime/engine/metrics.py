"""Metrics of a running engine: plain numbers, written by the engine's thread and rendered by `prometheus_client`."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from runtime.core.request import FinishReason, Sequence
from runtime.engine.scheduler import Scheduler
from runtime.engine.state_manager import StateManager

PREFIX = "runtime_"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
TOKENS = tuple(float(2**exponent) for exponent in range(21))

VLLM_PREFIX = "vllm:"
SHARED_NAMES = (
    "cache_config_info e2e_request_latency_seconds generation_tokens inter_token_latency_seconds "
    "kv_cache_usage_perc lora_requests_info num_requests_running num_requests_waiting prefix_cache_hits "
    "prefix_cache_queries prompt_tokens request_decode_time_seconds request_generation_tokens "
    "request_inference_time_seconds request_prefill_time_seconds request_prompt_tokens "
    "request_queue_time_seconds request_success request_time_per_output_token_seconds "
    "spec_decode_num_accepted_tokens spec_decode_num_draft_tokens time_to_first_token_seconds"
)
VLLM_NAMES = {name: name for name in SHARED_NAMES.split()} | {"preemptions": "num_preemptions"}
"""vLLM's names, which routers and dashboards read, by the name here."""


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


def _labelled(text: str, *labels: str, kind: str = "counter") -> Counter[Any]:
    return field(default_factory=Counter, metadata={"kind": kind, "help": text, "labels": labels})


def _histogram(text: str, bounds: tuple[float, ...] = SECONDS) -> Histogram:
    return field(default_factory=partial(Histogram, bounds), metadata={"help": text})


@dataclass(slots=True)
class RequestTimes:
    """Times of one request in seconds of the engine's clock."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(eq=False, slots=True)
class Metrics(Collector):
    """Counters, gauges and histograms. `PREFIX` and the name of a field make the name of a metric; names are stable."""

    num_requests_running: float = _gauge("Sequences being computed.")
    num_requests_waiting: float = _gauge("Sequences waiting for memory or a place.")
    num_remote_prefills: float = _gauge("Requests whose prompt another engine computes.")
    kv_cache_usage_perc: float = _gauge("Share of blocks of the KV cache in use, 0 to 1.")
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
    host_blocks_offloaded_total: int = _counter("Blocks of the KV cache saved to host memory on eviction.")
    host_blocks_restored_total: int = _counter("Blocks of the KV cache loaded from host memory, not computed.")
    host_cache_usage_perc: float = _gauge("Share of the host memory for the KV cache in use, 0 to 1.")
    state_slots: float = _gauge("Slots for recurrent states.")
    state_slots_used: float = _gauge("Slots whose state a running sequence reads or writes.")
    state_slots_saved: float = _gauge("Slots whose state a later sequence can continue from.")
    state_hits_total: int = _counter("Sequences that started from a saved state.")
    state_evictions_total: int = _counter("Saved states evicted from their slot.")
    host_states_saved: float = _gauge("Saved states in host memory.")
    host_states_offloaded_total: int = _counter("Saved states copied to host memory on eviction.")
    host_states_restored_total: int = _counter("States copied from host memory to start a sequence.")
    transferred_blocks_total: int = _counter("Blocks of the KV cache that came from, or went to, other engines.")
    remote_prefills_total: Counter[str] = _labelled("Prompts that another engine was asked to compute.", "result")
    broken_invariants_total: int = _counter("Number of rebuilds of inconsistent bookkeeping.")
    request_success_total: Counter[str] = _labelled("Requests ended, by reason.", "finished_reason")
    steps_by_path_total: Counter[str] = _labelled(
        "Steps on a GPU: recorded (CUDA graph), the reason why not, or both.", "path"
    )
    steps_by_overlap_total: Counter[str] = _labelled(
        "Steps whose tokens the device draws: overlapped with the next step, or the reason why not.", "overlap"
    )
    linears_total: Counter[tuple[str, str, str]] = _labelled(
        "Linears of the model, by the kernel that multiplies by them.", "linear", "form", "kernel"
    )
    request_queue_time_seconds: Histogram = _histogram("From arrival to the first step.")
    time_to_first_token_seconds: Histogram = _histogram("From arrival to the first token.")
    inter_token_latency_seconds: Histogram = _histogram("Between two tokens of a request.")
    e2e_request_latency_seconds: Histogram = _histogram("From arrival to the end.")
    request_prefill_time_seconds: Histogram = _histogram("From the first step to the first token.")
    request_decode_time_seconds: Histogram = _histogram("From the first token to the end.")
    request_inference_time_seconds: Histogram = _histogram("From the first step to the end.")
    request_time_per_output_token_seconds: Histogram = _histogram("Mean time of a token after the first, by request.")
    request_prompt_tokens: Histogram = _histogram("Prompt tokens of ended requests.", TOKENS)
    request_generation_tokens: Histogram = _histogram("Tokens generated for ended requests.", TOKENS)
    cache_config_info: Counter[tuple[str, str]] = _labelled(
        "Size of the KV cache.", "block_size", "num_gpu_blocks", kind="gauge"
    )
    lora_requests_info: Counter[tuple[str, str, str]] = _labelled(
        "Adapters in use, and the time of this report in seconds since 1970.",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
        kind="gauge",
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
            times.first_token = now
            self.time_to_first_token_seconds.observe(now - times.arrival)
        else:
            self.inter_token_latency_seconds.observe((now - times.last_token) / count)
        times.last_token = now

    def note_end(self, times: RequestTimes, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """Counts the end of a request."""
        num_tokens = sequence.num_output_tokens
        self.request_success_total[reason.value] += 1
        self.e2e_request_latency_seconds.observe(now - times.arrival)
        self.request_prompt_tokens.observe(sequence.num_prompt_tokens)
        self.request_generation_tokens.observe(num_tokens)
        if times.first_scheduled is not None:
            self.request_inference_time_seconds.observe(now - times.first_scheduled)
        if times.first_token is not None and times.last_token is not None:
            self.request_prefill_time_seconds.observe(times.first_token - (times.first_scheduled or times.arrival))
            self.request_decode_time_seconds.observe(now - times.first_token)
            if num_tokens > 1:
                mean = (times.last_token - times.first_token) / (num_tokens - 1)
                self.request_time_per_output_token_seconds.observe(mean)

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
        self.cache_config_info[str(pool.block_size), str(pool.num_blocks)] = 1
        self.lora_requests_info = Counter({self._adapters(scheduler): int(time.time())})
        self.preemptions_total = stats.num_preemptions
        self.preempted_tokens_total = stats.num_preempted_tokens

    def _adapters(self, scheduler: Scheduler) -> tuple[str, str, str]:
        """Returns the labels of `lora_requests_info`."""
        queues = [list(scheduler.running), list(scheduler.waiting)]  # copies, as the engine's thread changes them
        running, waiting = (",".join(sorted({s.request.options.adapter for s in each} - {""})) for each in queues)
        return str(scheduler.config.max_loras if scheduler.config.serves_adapters else 0), running, waiting

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

    def render(self, model_name: str = "", engine: str = "") -> str:
        """Renders Prometheus' text format, with the names of vLLM for one model.

        Args:
            engine: name of the engine as a label, if there are several.
        """
        names = Labelled(VllmNames(self), {"model_name": model_name, "engine": engine or "0"})
        return render(Labelled(self, engine_label(engine)), names)


def render(*collectors: Collector) -> str:
    """Renders Prometheus' text format 0.0.4 from a separate registry."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


def join(texts: Iterable[str]) -> str:
    """Joins texts in Prometheus' format, whose samples differ in a label, so that those of a metric are together."""
    families: dict[tuple[str, str], str] = {}
    for text in texts:
        for family in re.split("^# HELP ", text, flags=re.MULTILINE)[1:]:
            about, kind, samples = family.split("\n", 2)
            families[about, kind] = families.get((about, kind), "") + samples
    return "".join(f"# HELP {about}\n{kind}\n{samples}" for (about, kind), samples in families.items())


def add_label(text: str, name: str, value: str) -> str:
    """Adds a label to the samples of a text in Prometheus' format that lack it."""
    return render(Labelled(ParsedMetrics(text), {name: value}))


def engine_label(engine: str) -> dict[str, str]:
    """Returns the label of one of several engines, none for a single one."""
    return {"engine": engine} if engine else {}


class Labelled(Collector):
    """The metrics of a collector with further labels."""

    def __init__(self, collector: Collector, labels: Mapping[str, str]) -> None:
        self.collector, self.labels = collector, labels

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics in the order of the collector."""
        for family in self.collector.collect():
            samples = family.samples
            family.samples = [sample._replace(labels={**self.labels, **sample.labels}) for sample in samples]
            yield family


class ParsedMetrics(Collector):
    """The metrics of a text in Prometheus' format."""

    def __init__(self, text: str) -> None:
        self.text = text

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics in the order of the text."""
        yield from text_string_to_metric_families(self.text)


class VllmNames(Collector):
    """The metrics of `VLLM_NAMES` by vLLM's names."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics in the order of the fields."""
        for family in self.metrics.collect():
            ours = family.name
            if name := VLLM_NAMES.get(ours.removeprefix(PREFIX)):
                family.name = VLLM_PREFIX + name
                samples = family.samples
                family.samples = [sample._replace(name=sample.name.replace(ours, family.name, 1)) for sample in samples]
                yield family


def _family(item: Field[Any], value: float | Counter[Any] | Histogram) -> Metric:
    name, text = PREFIX + item.name, item.metadata["help"]
    if isinstance(value, Histogram):
        return HistogramMetricFamily(name, text, buckets=value.cumulative(), sum_value=value.sum)
    kind = GaugeMetricFamily if item.metadata.get("kind") == "gauge" else CounterMetricFamily
    if isinstance(value, Counter):
        family = kind(name, text, labels=item.metadata["labels"])
        for labels, count in sorted(value.items()):
            family.add_metric([labels] if isinstance(labels, str) else labels, count)
        return family
    return kind(name, text, value=value)
