"""Time of the host for a step of an 8B decoder on a GPU, measured without one.

Steps run through Triton's real path onto a driver that runs nothing, with tensors that have no memory: what is left is
the time in which the host prepares and launches kernels. Compare figures of one machine only. All steps are
launched kernel by kernel, as when they are captured; only where gaps between steps are measured, they are replayed.

    python scripts/bench_kernels.py gpu-host
    python scripts/bench_kernels.py gpu-host --forms int4 --rounds 30 --json host.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import thread_time
from typing import Any

from rich.console import Console

from benchmarking.tables import Row, print_with_markdown, write_json
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.core.step import StepOutput, StepPlan, SubmittedStep
from runtime.engine.engine import Engine

sys.path.append(str(Path(__file__).parents[3] / "tests/support"))

STEPS = {
    "prompt of 128": ((128,), 0),
    "prompt of 2,048": ((2048,), 0),
    "16 prompts of 128, decode of 48": ((128,) * 16, 48),
    "decode of 1": ((), 1),
    "decode of 8": ((), 8),
    "decode of 64": ((), 64),
}
"""Tokens of prompts, and number of sequences that are decoded; all of them are launched, none replayed."""
CONTEXT = 256
"""Tokens of each sequence that is decoded."""
PROMPTS_IN_TURN, ANSWER = (128, 1024), 40
"""Tokens of the prompts that come one with each step, and of their answers."""


@dataclass(frozen=True)
class HostTime:
    """Times of one kind of step, in milliseconds of the processor: others on the machine do not count.

    Attributes:
        launches: of a step, and of its layers alone.
        best, median: of the step.
        layers_best, layers_median: of its layers: launches and little else.
    """

    form: str
    step: str
    launches: int
    layer_launches: int
    best: float
    median: float
    layers_best: float
    layers_median: float

    @property
    def row(self) -> Row:
        return {
            "form": self.form,
            "step": self.step,
            "launches": str(self.launches),
            "step, ms, best": f"{self.best:.2f}",
            "median": f"{self.median:.2f}",
            "layers, ms, best": f"{self.layers_best:.2f}",
            "median of layers": f"{self.layers_median:.2f}",
            "µs a launch, best": f"{1000 * self.layers_best / self.layer_launches:.1f}",
        }


class _Stopwatch:
    """Times of the calls of a function, and launches of the last one."""

    def __init__(self, function: Callable[..., Any], count: Callable[[], int]) -> None:
        self.function, self.count = function, count
        self.times: list[float] = []
        self.launches = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        launches, started = self.count(), thread_time()
        result = self.function(*args, **options)
        self.times.append((thread_time() - started) * 1000)
        self.launches = self.count() - launches
        return result


def measure(form: str, rounds: int) -> list[HostTime]:
    """Times of all kinds of steps of a decoder, in this process."""
    from jit_without_gpu.cases import FORMS
    from jit_without_gpu.decoders import make_decoder, make_runner, mixed, run_and_capture_nothing
    from jit_without_gpu.session import gpu_without_hardware

    found = []
    with gpu_without_hardware() as gpu:
        case = FORMS[form]
        runner = make_runner(make_decoder(case.read_config(), case.scheme, case.head))
        kernels, runner.memory = runner.kernels, replace(runner.memory, prompt_rows=0)
        for name, (lengths, num_decodes) in STEPS.items():
            plan = mixed(runner, lengths, [CONTEXT] * num_decodes)
            runner.capture_steps(run_and_capture_nothing)
            runner.execute(plan)
            step = _Stopwatch(runner.execute, lambda: gpu.launches)
            layers = _Stopwatch(kernels.layers, lambda: gpu.launches)
            runner.kernels = replace(kernels, layers=layers)
            for _ in range(rounds):
                step(plan)
            times = (f(each.times) for each in (step, layers) for f in (min, statistics.median))
            found.append(HostTime(form, name, step.launches, layers.launches, *times))
    return found


class _Gaps:
    """Times in which a runner's device has nothing to do: from the output of its last step to the next submission."""

    def __init__(self, runner: Any) -> None:
        self.submit, self.latest, self.read = runner.submit, 0, 0.0
        self.times: list[float] = []
        runner.submit = self._submit

    def _submit(self, plan: StepPlan) -> SubmittedStep:
        step = self.submit(plan)
        self.times.append((thread_time() - self.read) * 1000 if self.read else 0.0)
        self.latest, self.read = self.latest + 1, 0.0
        return _TimedStep(self, step, self.latest)


@dataclass(frozen=True)
class _TimedStep:
    gaps: _Gaps
    step: SubmittedStep
    number: int

    @property
    def feeds_next(self) -> bool:
        return self.step.feeds_next

    def result(self) -> StepOutput:
        output = self.step.result()
        if self.number == self.gaps.latest:
            self.gaps.read = thread_time()
        return output


def measure_gaps(form: str, rounds: int) -> list[Row]:
    """Milliseconds of the host between steps of up to `ANSWER` decodes and a prompt, which a new request brings to
    each: eager steps, with the last one read first, then steps as they are served."""
    from jit_without_gpu.cases import FORMS
    from jit_without_gpu.decoders import capture_and_replay_nothing, make_decoder, make_runner
    from jit_without_gpu.session import gpu_without_hardware

    found = []
    with gpu_without_hardware():
        case = FORMS[form]
        runner = make_runner(make_decoder(case.read_config(), case.scheme, case.head))
        submit, memory = runner.submit, runner.memory
        for length, overlap in product(PROMPTS_IN_TURN, (False, True)):
            runner.memory = memory if overlap else replace(memory, prompt_rows=0)
            runner.capture_steps(capture_and_replay_nothing)
            runner.submit = submit
            config = RuntimeConfig(max_num_seqs=64, overlap=overlap, prefix_caching=False)
            engine, gaps = Engine(runner, None, config.with_step_sizes(80 * 2**30)), _Gaps(runner)
            for _ in range(ANSWER + rounds):
                engine.add_request([0] * length, SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True))
                engine.step()
            times = sorted(gaps.times[ANSWER:])
            path = "replayed" if length + ANSWER <= runner.memory.prompt_rows else "eager"
            found.append(
                {
                    "form": form,
                    "prompt": str(length),
                    "steps": f"{path}, {'overlapped' if overlap else 'read first'}",
                    "gap, ms, median": f"{statistics.median(times):.2f}",
                    "90 %": f"{times[len(times) * 9 // 10]:.2f}",
                }
            )
    return found


def measure_launch(rounds: int) -> Row:
    """Microseconds of one launch, the best of many: through Triton, looked up by constants and arguments, and with
    constants bound."""
    import torch
    from jit_without_gpu.session import DEVICE, gpu_without_hardware

    from runtime.backends.triton.fused_linear import SUMS, ActivationLayout
    from runtime.backends.triton.kernels.norm_act import convert_input_kernel, form_constants

    constants = form_constants(ActivationLayout(SUMS, 128, 32), 1024)
    sizes = {"K": 4096, "num_sums": constants.pop("num_sums")}
    with gpu_without_hardware():
        x, out = (torch.empty(1, 4096, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        sums = torch.empty(32, 1, dtype=torch.float32, device=DEVICE)
        arguments = x, out, sums, 1
        bound = convert_input_kernel.bind(**sizes, **constants)
        by = {
            "through Triton": lambda: convert_input_kernel.function[1, 4](*arguments, *sizes.values(), **constants),
            "looked up": lambda: convert_input_kernel[1, 4](*arguments, *sizes.values(), **constants),
            "bound": lambda: bound((1, 4), *arguments),
        }
        return {name: f"{_best(launch, rounds):.1f}" for name, launch in by.items()}


def _best(call: Callable[[], None], rounds: int, calls: int = 100) -> float:
    """Microseconds of a call, in the best of rounds."""
    call()
    times = []
    for _ in range(rounds):
        started = thread_time()
        for _ in range(calls):
            call()
        times.append((thread_time() - started) * 1e6 / calls)
    return min(times)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forms", nargs="+", default=["int4", "int8", "fp8", "16 bits"], help="of weights")
    parser.add_argument("--rounds", type=int, default=20, help="of every step")
    parser.add_argument("--json", type=Path, help="write the figures here")


def run(options: argparse.Namespace) -> int:
    console = Console(width=160, highlight=False)
    found = [each for form in options.forms for each in measure(form, options.rounds)]
    print_with_markdown("Host time without a GPU", [each.row for each in found], console)
    gaps = [row for form in options.forms[:1] for row in measure_gaps(form, options.rounds)]
    print_with_markdown("Gaps between steps with prompts", gaps, console)
    print_with_markdown("Microseconds of one launch", [measure_launch(options.rounds)], console)
    if options.json:
        write_json(options.json, {"rows": [asdict(each) for each in found], "gaps": gaps})
    return 0
