"""`runtime simulate`: compares ways to serve on any number of devices, from measured costs of steps."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.common.cli import option, with_groups
from compress.common.errors import ToolkitError
from runtime.bench.load import RequestLengths
from runtime.cli.options import check_targets, resolve_model
from runtime.core.config import LatencyOptions, RuntimeConfig, StepOptions

if TYPE_CHECKING:
    from runtime.bench.figures import Objective
    from runtime.simulate.costs import MeasuredCosts
    from runtime.simulate.jobs import Job
    from runtime.simulate.policy import Setup


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Devices, and links between them."""

    num_devices: int = option("--devices", default=1, min=1, help="Number of devices with the measured costs.")
    router: str = option(
        default="least-loaded",
        choices=("round-robin", "least-loaded", "prefix"),
        help="Which engine gets a request. prefix: the one that has the start of its prompt, as runtime deploy ray.",
    )
    bandwidth: float = option(
        default=25.0, min=1e-3, metavar="GB/S", help="Bandwidth of a device's link to others in 10^9 bytes per second."
    )
    prefill_devices: int | None = option(
        default=None, min=1, help="Devices of the policy 'apart' that compute prompts. Default: half of them."
    )
    prediction_error: float = option(
        default=0.5,
        min=0,
        help="Error of predicted output lengths in the policy 'reserved': standard deviation of the logarithm of "
        "predicted over true length.",
    )

    def setup(self, costs: MeasuredCosts, config: RuntimeConfig, objectives: Sequence[Objective], seed: int) -> Setup:
        """Returns what policies are compared on. `config`: of each engine."""
        from runtime.simulate.policy import Setup

        return Setup(
            costs,
            config,
            self.num_devices,
            self.router,
            min((each.seconds for each in objectives if each.metric in ("tpot", "itl")), default=None),
            self.bandwidth * 1e9,
            self.prefill_devices,
            self.prediction_error,
            seed,
        )


@dataclass(frozen=True, kw_only=True)
class RequestSource(RequestLengths):
    """Requests: their lengths and times."""

    trace: str | None = option(
        default=None,
        metavar="NAME|FILE",
        help="Lengths and burstiness of a published trace (azure-code, azure-conversation, mooncake-conversation), or "
        "a file: JSON lines with timestamp (ms), input_length, output_length and optional hash_ids, or the CSV files "
        "of Azure's or BurstGPT's traces. Default: uniform lengths.",
    )
    scale: float = option(
        "--scale-lengths", default=1.0, min=1e-6, help="Factor on all lengths, for models of a shorter context."
    )
    num_requests: int = option(
        "--num-prompts", "-n", default=1000, min=1, help="Number of requests, at most those of a file."
    )
    rate: float | None = option(
        "--request-rate",
        "-r",
        default=None,
        min=1e-6,
        help="Requests per second. Default: the highest rate at which each policy keeps --good-share.",
    )
    burstiness: float | None = option(
        default=None,
        min=1e-3,
        help="Shape of the gamma distribution of the times between requests: 1 is a Poisson process, less are bursts. "
        "Default: that of the published trace, else 1.",
    )

    @property
    def file(self) -> Path | None:
        """The trace file, if there is one."""
        from runtime.simulate.jobs import TRACES

        return None if self.trace is None or self.trace in TRACES else Path(self.trace)

    def jobs(self) -> list[Job]:
        """Returns the requests. Raises DataError for a file that is not a trace."""
        from runtime.simulate.jobs import TRACES, Workload, make_jobs, read_trace

        if self.file is not None:
            return read_trace(self.file, self.scale)[: self.num_requests]
        statistics = TRACES[self.trace] if self.trace else None
        workload = Workload(
            statistics.input if statistics else self.input,
            statistics.output if statistics else self.output,
            self.num_requests,
            self.shared_prefix,
            self.burstiness or (statistics.burstiness if statistics else 1.0),
            self.scale,
            self.seed,
        )
        return make_jobs(workload)


@with_groups
def simulate(
    *,
    costs: Annotated[
        str, typer.Option("--costs", metavar="NAME|FILE", help="Measured costs of steps: demo, or a file of --measure.")
    ] = "demo",
    measured: Annotated[
        Path | None,
        typer.Option("--measure", metavar="MODEL", help="Measure this model on this machine, write --costs, and end."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="A policy to run; may be repeated. Default: all of them."),
    ] = None,
    devices: DeviceOptions,
    requests: RequestSource,
    slo: Annotated[
        str, typer.Option("--slo", help="Service level objectives for goodput, as in runtime bench.")
    ] = "ttft=500ms,tpot=50ms",
    good_share: Annotated[
        float, typer.Option("--good-share", min=0.01, max=1, help="Share of requests within all objectives.")
    ] = 0.9,
    steps: StepOptions,
    latency: LatencyOptions,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this JSON file.")] = None,
) -> None:
    """Compare ways to serve on any number of devices, from measured costs of steps.

    Each engine is that of runtime serve with its scheduler, KV cache and token budget, in virtual time: a step takes
    what steps of its size took when they were measured. Every policy answers the same requests. The policies are listed
    in docs/simulate.md.
    """
    check_targets(json_file)
    if measured is not None:
        measure_costs(measured, Path(costs), steps)
        return
    from runtime.bench.figures import parse_objectives
    from runtime.simulate.costs import read_costs
    from runtime.simulate.jobs import native_rate
    from runtime.simulate.policy import POLICIES
    from runtime.simulate.report import Report
    from runtime.simulate.run import compare, left_out

    read, jobs, objectives = read_costs(costs), requests.jobs(), parse_objectives(slo)
    config = engine_config(read, steps, latency, shares_prefixes=any(job.pieces for job in jobs))
    setup = devices.setup(read, config, objectives, requests.seed)
    kinds = [POLICIES.find(name) for name in policy or POLICIES]
    outcomes = compare(kinds, setup, jobs, objectives, good_share, requests.rate)
    command, rate = shlex.join(["runtime", *sys.argv[1:]]), native_rate(jobs) if requests.file else None
    report = Report(command, setup, objectives, outcomes, rate, left_out(kinds, setup))
    report.show()
    if json_file:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
        print(f"json        {json_file}")


def engine_config(
    costs: MeasuredCosts, steps: StepOptions, latency: LatencyOptions, *, shares_prefixes: bool
) -> RuntimeConfig:
    """Returns the configuration of each engine, with the default sizes of steps on the measured device."""
    return RuntimeConfig(
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens or costs.max_num_batched_tokens,
        prefill_chunk=steps.prefill_chunk or costs.prefill_chunk,
        max_itl_ms=latency.max_itl_ms,
        prefix_caching=shares_prefixes,
    )


def measure_costs(model: Path, file: Path, steps: StepOptions) -> None:
    """Measures a model and writes its costs. Imports torch."""
    from runtime.simulate.measure import measure

    if file.suffix != ".json":
        raise ToolkitError(f"--costs {file} is not a JSON file", "Name the file to write: --costs costs.json")
    check_targets(file)
    path, _ = resolve_model(model)
    config = RuntimeConfig(
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        prefill_chunk=steps.prefill_chunk,
        overlap=False,
        prefix_caching=False,
    )
    found = measure(path, config, str(model), shlex.join(["runtime", *sys.argv[1:]]))
    found.save(file)
    print(f"costs       {file}: {found.model} on {found.machine}, median difference of the model {found.error:.1%}")
