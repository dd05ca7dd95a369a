"""Decoders of real sizes without numbers, their runners, and steps for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.reader import PackedCheckpoint, RoundedCheckpoint
from compress.checkpoint.weights import Scheme, Weight
from jit_without_gpu.session import DEVICE
from runtime.backends.base import Target
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import DecoderConfig, parse_config
from runtime.core.request import Request, SamplingParams
from runtime.core.request import Sequence as Tokens
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.memory.plan import plan_memory
from runtime.model.decoder import Decoder
from runtime.model.loader import DecoderLoader
from runtime.model.weight_reader import WeightReader
from runtime.runner.capture import Computation
from runtime.runner.runner import ModelRunner


@dataclass(frozen=True)
class _EmptyFiles:
    """Tensor files of a dense model: every tensor has a shape and no numbers."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    stored: torch.dtype
    notes: tuple[str, ...] = ()

    def names(self) -> list[str]:
        return sorted(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self.stored

    def tensor(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], dtype=self.stored, device=DEVICE)

    def release(self) -> None:
        """Nothing is mapped."""


class EmptyCheckpoint(RoundedCheckpoint):
    """A packed checkpoint without numbers. Equal matrices share one weight."""

    def packed_weight(self, module: str) -> Weight:
        return _rounded(self.schemes[module], self.source.shape(module), self.dtype)


FEW_ROWS = 16


@cache
def _rounded(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    """A weight of this shape: a few rows are rounded, and show which tensors there are."""
    rows, columns = shape
    few = scheme.round(torch.randn(FEW_ROWS, columns, generator=torch.Generator().manual_seed(0)).to(dtype))
    return _with_rows(few, rows)


def _with_rows(few: Any, rows: int) -> Any:
    """A weight of another number of rows, without numbers."""
    changed: dict[str, Any] = {}
    for name in (field.name for field in fields(few)):
        part = getattr(few, name)
        if isinstance(part, Tensor):
            changed[name] = part.new_empty((rows, *part.shape[1:]), device=DEVICE)
        elif isinstance(part, Weight):
            changed[name] = _with_rows(part, rows)
    return replace(few, **changed)


def make_decoder(
    config: Mapping[str, Any], scheme: Scheme | None = None, head: Scheme | None = None, kernels: str = "auto"
) -> Decoder:
    """Prepares a decoder for `DEVICE`.

    Args:
        config: config.json.
        scheme: of the linears of all blocks; None leaves them dense.
        head: of the output head.
    """
    described = parse_config(config)
    checkpoint = _checkpoint(config, described, scheme, head)
    target = Target(DEVICE, getattr(torch, described.dtype))
    return DecoderLoader(described, WeightReader(checkpoint, target, kernels, {})).load()


def _checkpoint(
    config: Mapping[str, Any], described: DecoderConfig, scheme: Scheme | None, head: Scheme | None
) -> PackedCheckpoint:
    spec = described.spec
    schemes = {linear.name: scheme for linear in spec.linears()} | {spec.head.name: head}
    shapes = spec.parameters()
    if spec.tied and head is None:
        del shapes[f"{spec.head.name}.weight"]
    files: Any = _EmptyFiles(Path("empty"), shapes, getattr(torch, described.dtype))
    source = PackedCheckpoint(files.path, dict(config), files, {}, DENSE)
    return EmptyCheckpoint.of(source, {name: each for name, each in schemes.items() if each is not None})


def make_runner(decoder: Decoder, config: RuntimeConfig | None = None) -> ModelRunner:
    """A runner whose steps of one token per sequence go the way of captured ones, and are computed each time."""
    config = config or RuntimeConfig(max_num_seqs=64, num_blocks=8192, max_num_batched_tokens=2048, prefill_chunk=2048)
    plan = plan_memory(decoder.config, decoder.nbytes, decoder.dtype.itemsize, config)
    runner = ModelRunner(decoder, plan, programmatic_launch=config.programmatic_launch)
    if runner.kernels.records:
        runner.capture_steps(run_and_capture_nothing)
    return runner


def run_and_capture_nothing(compute: Computation) -> Computation:
    """A `Capture` that computes once, as libraries need it, and whose recording is the computation itself."""
    compute()
    return compute


def capture_and_replay_nothing(compute: Computation) -> Computation:
    """A `Capture` whose replays take the host no time, as those of a GPU almost do."""
    compute()
    return lambda: None


GREEDY = SamplingParams(temperature=0)


def prompts(runner: ModelRunner, lengths: Sequence[int], sampling: SamplingParams = GREEDY) -> StepPlan:
    """A step that computes whole prompts."""
    return _step(runner, [(0, length) for length in lengths], sampling)


def decodes(runner: ModelRunner, lengths: Sequence[int], sampling: SamplingParams = GREEDY) -> StepPlan:
    """A step of one token for each of some sequences, which have this many tokens with it."""
    return _step(runner, [(length - 1, length) for length in lengths], sampling)


def mixed(runner: ModelRunner, whole: Sequence[int], lengths: Sequence[int]) -> StepPlan:
    """A step of whole prompts, and of one token for each of some sequences."""
    return _step(runner, [(0, each) for each in whole] + [(length - 1, length) for length in lengths], GREEDY)


def drafted(runner: ModelRunner, lengths: Sequence[int], parents: Sequence[int]) -> StepPlan:
    """A step that verifies four draft tokens after each of some sequences; without `parents` they are a chain."""
    plan = _step(runner, [(length - 1, length + NUM_DRAFTED) for length in lengths], GREEDY)
    for entry, length in zip(plan.entries, lengths, strict=True):
        sequence = entry.sequence
        sequence.draft_token_ids, sequence.draft_parents = sequence.token_ids[length:], list(parents)
        del sequence.token_ids[length:]
    return plan


NUM_DRAFTED = 4


def _step(runner: ModelRunner, spans: Sequence[tuple[int, int]], sampling: SamplingParams) -> StepPlan:
    """Spans by start and stop, each the last one of its sequence."""
    free, entries = iter(range(runner.num_blocks)), []
    for index, (start, stop) in enumerate(spans):
        blocks = [next(free) for _ in range(0, stop, runner.block_size)]
        request = Request(f"sequence {index}", (0,) * stop, sampling, 0)
        states = ((stop - start - 1, index),) if runner.num_state_slots else ()
        tokens = Tokens(request, [0] * stop, block_ids=blocks)
        entries.append(ScheduledSequence(tokens, start, stop - start, state_writes=states))
    return StepPlan(tuple(entries))
