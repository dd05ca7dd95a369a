"""Measurement of the costs of steps: the engine answers batches of random prompts of many sizes. Imports torch where it
is called."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from datetime import date
from math import exp, log, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runtime.bench.figures import describe_machine
from runtime.bench.load import Lengths, Load, Workload
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.core.step import StepPlan, SubmittedStep
from runtime.simulate.costs import MeasuredCosts, StepSize, fit, span_size, step_size

if TYPE_CHECKING:
    from compress.models.spec import ModelSpec
    from runtime.engine.engine import Engine
    from runtime.runner.runner import ModelRunner

BATCHES = (1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sequences of each batch; the first one warms up. Those that may not run at once wait."""
ROUNDS = 3
REQUEST_TOKENS = 64
NUM_REQUESTS = 32
OUTPUT_TOKENS = (8, 40)


@dataclass(slots=True)
class MeasuredRunner:
    """A runner that records the sizes of its steps. Everything else is that of `inner`."""

    inner: Any
    sizes: list[StepSize] = field(default_factory=list)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        self.sizes.append(step_size(plan))
        return cast("SubmittedStep", self.inner.submit(plan))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def measure(path: Path, config: RuntimeConfig, name: str, command: str) -> MeasuredCosts:
    """Loads a model and measures the steps of its engine, then requests to its server, for some seconds. Imports torch.

    Args:
        config: without overlap and prefix caching, which would leave tokens out.
        name: name of the model in the file.
        command: as typed.

    Raises:
        CheckpointError: the folder cannot be loaded.
    """
    from torch import get_num_threads

    from runtime.llm import load_engine

    engine, _ = load_engine(path, config)
    runner = cast("ModelRunner", engine.runner)
    sizes, seconds = run_batches(engine, config.max_num_seqs)
    spec, machine = runner.decoder.config.spec, describe_machine()
    knots = [2**power for power in range(engine.config.step_tokens.bit_length()) if 2**power <= max(sizes).tokens]
    curve = fit(sizes, seconds, knots)
    costs = MeasuredCosts(
        model=name,
        machine=", ".join(machine["gpus"][:1]) or f"{machine['processor']}, {get_num_threads()} thread(s)",
        date=date.today().isoformat(),
        command=command,
        tokens=tuple(knots),
        seconds=curve.seconds,
        **dict(zip(("answer", "decode_context", "prompt_pair", "prompt"), curve.rest, strict=True)),
        request=0.0,
        error=curve.error,
        max_model_len=runner.max_model_len,
        kv_tokens=runner.num_blocks * config.block_size,
        kv_bytes=runner.memory.token_bytes,
        hidden_bytes=spec.hidden_size * runner.decoder.dtype.itemsize,
        num_layers=len(spec.blocks),
        mlp_share=mlp_share(spec),
        max_num_batched_tokens=engine.config.step_tokens,
        prefill_chunk=engine.config.max_span_tokens,
    )
    return replace(costs, request=request_seconds(path, costs))


def request_seconds(path: Path, costs: MeasuredCosts) -> float:
    """Returns the median time to the first token over HTTP that is not the engine's, with one request at a time."""
    from runtime.bench.run import Plan, run, run_server

    length = min(REQUEST_TOKENS, costs.max_model_len // 2)
    workload = Workload(Lengths(length, length), Lengths(1, 1), NUM_REQUESTS)
    with run_server(path) as server:
        figures = run(Plan("", workload, Load(concurrency=1), tokenizer_path=path), server.url).figures
    latency = figures.latency_ms["ttft"]
    alone = costs.of_step(span_size(0, length, samples=True))
    return max(0.0, latency.p50 / 1000 - alone) if latency else 0.0


def mlp_share(spec: ModelSpec) -> float:
    """Returns the share of the MLPs in the parameters of the linears of all layers."""
    parts = [(block.linears, block.mlp.linears if block.mlp else ()) for block in spec.blocks]
    whole, mlps = (sum(prod(linear.shape) for part in parts for linear in part[each]) for each in (0, 1))
    return mlps / whole


def run_batches(engine: Engine, max_num_seqs: int) -> tuple[list[StepSize], list[float]]:
    """Returns the sizes of measured steps and their seconds, as the engine's clock sees them."""
    engine.runner = runner = MeasuredRunner(engine.runner)
    generator, sizes, seconds = random.Random(0), [], []
    for number, batch in enumerate(BATCHES[:1] + BATCHES[1:] * ROUNDS):
        if batch > max_num_seqs:
            continue
        runner.sizes.clear()
        for _ in range(batch):
            _add(engine, generator)
        times = list(_step_seconds(engine))
        if number:
            sizes += runner.sizes
            seconds += times
    return sizes, seconds


def _step_seconds(engine: Engine) -> list[float]:
    times = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return times


def _add(engine: Engine, generator: random.Random) -> None:
    """Adds a request of a length whose logarithm is uniform, up to half of the context."""
    length = int(exp(generator.uniform(0, log(engine.runner.max_model_len // 2))))
    prompt = [generator.randrange(engine.runner.vocab_size) for _ in range(length)]
    output = min(generator.randint(*OUTPUT_TOKENS), engine.runner.max_model_len - length)
    engine.add_request(prompt, SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0))
