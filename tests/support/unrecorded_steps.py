"""Steps that pass for recorded ones and are computed each time, on any device: what a recording is compared with."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.backends.backend import FORBIDDEN, INFINITE, UNDECIDED, Candidates
from runtime.backends.torch.ops import argmax, gumbel_argmax
from runtime.core.batch import SamplingTensors
from runtime.core.config import RuntimeConfig
from runtime.runner.capture import Capture, Computation
from runtime.runner.runner import ModelRunner, build_runner, sample_and_match


def capture_nothing(compute: Computation) -> Computation:
    """A `runtime.runner.capture.Capture` whose recording is the computation itself."""
    return compute


class SkippingPages:
    """Pages that write nothing for rows without a slot, as the GPU's kernels do."""

    def __init__(self, pages: Any) -> None:
        self.pages = pages

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pages, name)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        has_slot = slots >= 0
        self.pages.write(layer, slots[has_slot], key[has_slot], value[has_slot])


class PlainSampling:
    """A `runtime.backends.backend.FusedSampling` in plain torch."""

    def unsupported_reason(self, device: Any, dtype: Any) -> str:
        return ""

    def sample(self, logits: Tensor, scores: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
        is_random, ids = tensors.temperature > 0, torch.arange(scores.shape[-1]).unsqueeze(0)
        tempered = replace(tensors, temperature=tensors.temperature.masked_fill(~is_random, 1)).temper(scores)
        found = gumbel_argmax(tempered, ids, tensors).where(is_random, argmax(scores)[0])
        found = found.masked_fill(scores.amax(-1) == float("-inf"), FORBIDDEN)
        tokens.copy_(found.masked_fill(~argmax(logits)[1], INFINITE))

    def sample_listed(self, listed: Candidates, is_truncated: Tensor, tensors: SamplingTensors, tokens: Tensor) -> None:
        found = gumbel_argmax(listed.scores, listed.ids, tensors).masked_fill(listed.unknown, UNDECIDED)
        tokens.copy_(found.where(is_truncated & (tokens >= 0), tokens))


def runner_on_cpu(decoder: Any, config: RuntimeConfig, capture: Capture | None, *, draws: bool = False) -> ModelRunner:
    """A runner whose steps are recorded where there is a `capture`, drawing tokens within them or not."""
    runner = build_runner(decoder, config)
    for tensor in runner.pages.memory.tensors.values():
        tensor.fill_(9)  # finite: plain torch multiplies all keys that it reads, masked ones by zero
    runner.cache.pages = SkippingPages(runner.cache.pages)
    if draws:
        runner.sampler = replace(runner.sampler, fused=PlainSampling())
        runner.sample = partial(sample_and_match, sampler=runner.sampler)
    if capture is not None:
        runner.capture_steps(capture)
    return runner
