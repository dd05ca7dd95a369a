"""Decoders that are served without a GPU: builds until the first tokens, of the warm-up, and after it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from jit_without_gpu.builds import Build
from jit_without_gpu.cases import CASES, Case
from jit_without_gpu.decoders import decodes, drafted, make_decoder, make_runner, prompts
from jit_without_gpu.session import DEVICE, H200, Card, gpu_without_hardware
from runtime.backends.triton.fused_linear import SUMS, ActivationLayout
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.core.step import StepPlan
from runtime.runner.runner import ModelRunner
from runtime.runner.warm_up import warm_up

OPTIONS = {"max_num_seqs": 64, "num_blocks": 8192, "max_num_batched_tokens": 2048, "prefill_chunk": 2048}
PROMPTS = ([1], [2], [17], [64], [65], [128], [200], [513], [1024], [1025], [2048], [16] * 8, [17, 33, 1000])
"""Lengths of prompts of one step."""
DECODES = (([2], 1), ([300, 5], 2), ([1000], 3), ([129], 8), ([129], 11), ([700], 24), ([40], 48), ([513], 64))
"""Tokens of sequences that are decoded, in turn, and how many there are."""
DRAFTS = ([], [-1, -1, 0, 1])
"""Parents of drafted tokens: a chain and a tree."""
SAMPLING = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9),
)


@dataclass(frozen=True)
class Served:
    """Builds of one decoder.

    Attributes:
        builds: all of them.
        late: builds of steps after the warm-up, which should have compiled all that they need.
        launches: kernel launches of those steps.
        kernels: how it is computed.
    """

    builds: list[Build]
    late: list[Build]
    launches: int
    kernels: tuple[str, ...]


def serve_first_tokens(name: str) -> tuple[list[Build], int, tuple[int, int]]:
    """Builds and launches for a prompt and a first decode step of a case after the self-test of its products, and how
    many of their launches Triton binds, and passes on, when both are computed again."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.jit import JITFunction

    case = CASES[name]
    with gpu_without_hardware() as gpu:
        runner = _runner(case, RuntimeConfig(**OPTIONS, **case.options))
        tested, launches = len(gpu.builds), gpu.launches
        runner.execute(prompts(runner, [128]))
        runner.execute(decodes(runner, [129]))
        builds, launches = gpu.builds[tested:], gpu.launches - launches
        with _counted(JITFunction, "run") as bind, _counted(CudaLauncher, "__call__") as launch:
            runner.execute(prompts(runner, [128]))
            runner.execute(decodes(runner, [129]))
        return builds, launches, (bind.call_count, launch.call_count)


@dataclass(frozen=True)
class Overlapping:
    """Decode and prompt steps of a case whose kernels overlap.

    Attributes:
        sources: PTX of every kernel that is launched so, by name.
        launches: of kernels that can, and of them those with the attribute; each of a step's layers alone.
    """

    sources: list[tuple[str, str]]
    launches: tuple[int, int]


def serve_overlapping(name: str, without: Collection[str] = ()) -> Overlapping:
    """Computes steps of one token of some sequences, and of a prompt, of a case with kernels that overlap.

    Args:
        without: kernels that do not.
    """
    from runtime.backends.triton.launcher import left_out

    case = CASES[name]
    with gpu_without_hardware() as gpu, left_out(without):
        runner = _runner(case, RuntimeConfig(**OPTIONS, **case.options, programmatic_launch="on"))
        for plan in (*(decodes(runner, [300] * count) for count in (1, 12, 48)), prompts(runner, [128])):
            runner.execute(plan)
        launches, overlapping = gpu.launches, gpu.library.overlapping
        runner.execute(decodes(runner, [300]))
        launches, overlapping = gpu.launches - launches, gpu.library.overlapping - overlapping
        waiting = [build for build in gpu.builds if dict(build.constants).get("WAITS")]
        sources = [(build.kernel, build.cubin.with_suffix(".ptx").read_text()) for build in waiting]
        return Overlapping(sources, (launches, overlapping))


def _counted(owner: type, name: str) -> Any:
    return patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def serve(name: str, card: Card = H200) -> Served:
    """Warms up for a case and computes many steps."""
    case = CASES[name]
    config = RuntimeConfig(**OPTIONS, **case.options, warm_up=True)
    with gpu_without_hardware(card) as gpu:
        runner = _runner(case, config)
        warm_up(runner, config)
        count, launches = len(gpu.builds), gpu.launches
        for plan in _steps(runner):
            runner.execute(plan)
        late, launches = gpu.builds[count:], gpu.launches - launches
        for parents in DRAFTS if case.drafts else ():
            runner.execute(drafted(runner, [300, 40], parents))
        return Served(gpu.builds, late, launches, (*runner.decoder.description, runner.kernels.describe()))


def _runner(case: Case, config: RuntimeConfig) -> ModelRunner:
    return make_runner(make_decoder(case.read_config(), case.scheme, case.head), config)


def _steps(runner: ModelRunner) -> Iterator[StepPlan]:
    for sampling in SAMPLING:
        for lengths in PROMPTS:
            yield prompts(runner, lengths, sampling)
        for lengths, count in DECODES:
            yield decodes(runner, (lengths * count)[:count], sampling)


def launch_with_blocks(blocks: int) -> int:
    """Launches a kernel whose grid has a second dimension of this size; returns the number of launches.

    Raises:
        RuntimeError: what Triton says where the GPU has no such grid.
    """
    with gpu_without_hardware() as gpu:
        from runtime.backends.triton.kernels.norm_act import BLOCK, convert_input

        size = blocks * BLOCK
        convert_input(torch.empty(1, size, dtype=torch.bfloat16, device=DEVICE), ActivationLayout(SUMS, 32, size // 32))
        return gpu.launches
