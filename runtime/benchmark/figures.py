"""From records to figures: percentiles, throughput, goodput. What each of them means stands in `MEANINGS`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from compress.checkpoint.errors import ToolkitError
from runtime.benchmark.client import Record

MEANINGS = {
    "ttft": "time to first token: from sending (open loop: from the due time) to the first text, connecting included",
    "itl": "inter-token latency: every gap between one piece of streamed text and the next, all requests together; a "
    "piece is what one step of the engine brought, several tokens when drafts were accepted",
    "tpot": "time per output token: of each request, (last text - first text) / (output tokens - 1)",
    "e2e": "end to end: from sending (open loop: from when it was due) to the end of the answer",
}
PERCENTILES = (50, 90, 95, 99)
TOO_MANY_REQUESTS = 429
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        """None without values."""
        values = sorted(1e3 * value for value in seconds)
        if not values:
            return None
        return cls(sum(values) / len(values), *(percentile(values, p) for p in PERCENTILES))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, linear between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound that a request meets or misses: `ttft`, `e2e`, `tpot`, or `itl` (its longest gap)."""

    metric: str
    seconds: float

    def is_met(self, record: Record) -> bool:
        """Whether one complete request was quick enough; `itl` bounds its longest gap."""
        match self.metric:
            case "ttft":
                return record.ttft <= self.seconds
            case "e2e":
                return record.e2e <= self.seconds
            case "itl":
                return max(record.gaps, default=0.0) <= self.seconds
            case _:
                return (record.tpot or 0.0) <= self.seconds


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Of `ttft=500ms,itl=50ms,e2e=10s`. Raises ToolkitError for anything else."""
    objectives = []
    for part in text.split(","):
        metric, _, bound = part.strip().partition("=")
        match = DURATION.fullmatch(bound)
        if metric not in MEANINGS or not match:
            names = ", ".join(MEANINGS)
            raise ToolkitError(f"{part!r} is no objective", f"Write --slo ttft=500ms,e2e=10s with any of {names}")
        objectives.append(Objective(metric, float(match[1]) * (1e-3 if match[2] == "ms" else 1)))
    return tuple(objectives)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective; those that failed met none."""

    share: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything about one run. Rates are per second from the first start to the last end.

    Attributes:
        complete, refused, failed: requests answered, refused with 429, and failed in any other way; `errors` says how.
        input_tokens, cached_tokens, output_tokens: of the complete ones; cached are prompt tokens that were not
            computed again.
        pieces: in which the output came, one per step and request; fewer than tokens where guesses were accepted.
        latency_ms: by the names in `MEANINGS`; None where nothing was complete.
    """

    duration_s: float
    complete: int
    refused: int
    failed: int
    errors: dict[str, int]
    peak_concurrency: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    pieces: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    latency_ms: dict[str, Distribution | None]
    goodput: Goodput | None

    def as_json(self) -> dict:
        return asdict(self)


def summarize(records: Sequence[Record], peak_concurrency: int, objectives: Sequence[Objective] = ()) -> Figures:
    """The figures of a run with at least one request."""
    good = [record for record in records if record.is_complete]
    refused = sum(record.status == TOO_MANY_REQUESTS for record in records)
    duration = max(record.end for record in records) - min(record.start for record in records)
    tokens_in, tokens_out = (sum(getattr(r, name) for r in good) for name in ("prompt_tokens", "output_tokens"))
    latencies = {
        "ttft": [record.ttft for record in good],
        "itl": [gap for record in good for gap in record.gaps],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "e2e": [record.e2e for record in good],
    }
    return Figures(
        duration_s=duration,
        complete=len(good),
        refused=refused,
        failed=len(records) - len(good) - refused,
        errors=dict(Counter(record.error for record in records if record.error).most_common(10)),
        peak_concurrency=peak_concurrency,
        input_tokens=tokens_in,
        cached_tokens=sum(record.cached_tokens for record in good),
        output_tokens=tokens_out,
        pieces=sum(len(record.chunk_times) for record in good),
        requests_per_s=len(good) / duration,
        input_tokens_per_s=tokens_in / duration,
        output_tokens_per_s=tokens_out / duration,
        latency_ms={name: Distribution.of(values) for name, values in latencies.items()},
        goodput=_goodput(records, objectives, duration) if objectives else None,
    )


def _goodput(records: Sequence[Record], objectives: Sequence[Objective], duration: float) -> Goodput:
    met = sum(r.is_complete and all(objective.is_met(r) for objective in objectives) for r in records)
    return Goodput(met / len(records), met / duration)
