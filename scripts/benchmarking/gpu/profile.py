"""Profile of steps with both prompts and decodes: wall time, time of kernels, and which kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarking.contenders import equal_jobs
from benchmarking.machine import Stopwatch
from benchmarking.tables import Rows
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine

MOST_KERNELS, NAME_LENGTH, DECODED_TOKENS = 24, 100, 512


def profile_mixed_steps(engine: Engine, rows: Rows, sequences: int, length: int) -> None:
    """Writes a row for the steps in which a quarter of some sequences arrive while the others decode, until each has
    its first token, and one for each of the kernels that take most.

    Seconds of the steps are without the profiler, which sees the same steps once more.
    """
    prompts = max(1, sequences // 4)
    sizes = engine, sequences - prompts, prompts, length
    mixed_steps(*sizes)
    steps, seconds = mixed_steps(*sizes)
    on_gpu = torch.cuda.is_available()
    with_kernels = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    mixed_steps(*sizes, with_kernels)
    kernels = kernel_times(with_kernels, on_gpu)
    work = f"{prompts} prompts of {length} with {sequences - prompts} decodes"
    busy, launches = (sum(column) for column in zip(*kernels.values(), strict=True))
    rows.add(what=work, steps=steps, seconds=seconds, kernel_seconds=busy, launches=launches)
    for name, (taken, calls) in sorted(kernels.items(), key=lambda each: -each[1][0])[:MOST_KERNELS]:
        rows.add(what="kernel", kernel=name, seconds=taken, launches=calls)


def mixed_steps(
    engine: Engine, decodes: int, prompts: int, length: int, watched: AbstractContextManager[object] | None = None
) -> tuple[int, float]:
    """Returns the number of steps from the arrival of prompts to the first token of the last, and their seconds."""
    sampling = SamplingParams(DECODED_TOKENS, temperature=0, ignore_eos=True)
    jobs = equal_jobs(decodes + prompts, length, 1)
    waiting = {engine.add_request(job.prompt, sampling) for job in jobs[:decodes]}
    while waiting:
        waiting -= {delta.request_id for delta in engine.step()}
    waiting, steps = {engine.add_request(job.prompt, sampling) for job in jobs[decodes:]}, 0
    with watched or nullcontext():
        watch = Stopwatch()
        while waiting:
            waiting -= {delta.request_id for delta in engine.step()}
            steps += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = watch.read()[0]
    engine.abort_all()
    while engine.has_work:
        engine.step()
    return steps, seconds


def kernel_times(found: profile, on_gpu: bool) -> dict[str, tuple[float, int]]:
    """Returns seconds and number of launches by kernel; of operators where there is no GPU."""
    times: dict[str, tuple[float, int]] = {}
    for event in found.events():
        if on_gpu == (event.device_type == DeviceType.CUDA):
            taken = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            seconds, launches = times.get(name := event.name[:NAME_LENGTH], (0.0, 0))
            times[name] = seconds + taken / 1e6, launches + 1
    return times
