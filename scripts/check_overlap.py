"""Checks kernels that overlap on a GPU: a thousand captured decode steps must give the same logits, bit by bit, and
those of kernels that wait for each other, whose steps are repeated and timed as well. Where steps differ, they are
repeated with one kernel after the other left out of the overlap.

The row that it writes is the record of the card: put into `runtime/backends/triton/checked`, it turns
`--programmatic-launch auto` on for cards of the same compute capability. On a CPU, where nothing overlaps, the same
steps are rehearsed.

    python scripts/check_overlap.py --shape 8b --rows rows.jsonl
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarking.machine import Stopwatch, environment, leave_with
from benchmarking.models import SHAPES, write_packed_model
from benchmarking.tables import Rows
from torch import Tensor

from compress.checkpoint.weights import Int
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams
from runtime.core.request import Sequence as Tokens
from runtime.core.step import SampledToken, ScheduledSequence, StepPlan
from runtime.memory.plan import plan_memory
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.runner.runner import ModelRunner, RowSampler
from runtime.sampling.sampler import Drawn

SIZES, CONTEXT = (1, 8, 64), 300
"""Sequences that are decoded together, and tokens of each: enough for its keys to be split."""
MOST_DIFFERENCE = 0.05
"""Largest distance of log-probabilities from those of kernels that do not overlap, whose roundings may differ."""


@dataclass
class Replays:
    """Logits of a step that is replayed, compared bit by bit with those of the first time; a `RowSampler`.

    Attributes:
        sample: the sampler in whose place it stands.
        first: logits `[n, V]` of the first time.
        count: replays so far, the first time left out.
        different: how many of them differ.
        first_different: number of the first one that differs, from 1; 0 if none does.
        elements: logits that differ there.
    """

    sample: RowSampler
    first: Tensor | None = None
    count: int = 0
    different: int = 0
    first_different: int = 0
    elements: int = 0

    def __call__(
        self, entries: Sequence[ScheduledSequence], logits: Tensor, drawn: Drawn | None
    ) -> dict[str, list[SampledToken]]:
        if self.first is None:
            self.first = logits.clone()
        else:
            self.count += 1
            # Of numbers that are none, the bits are compared.
            if not torch.equal(bits(logits), bits(self.first)):
                self.different += 1
                self.first_different = self.first_different or self.count
                self.elements = self.elements or int((bits(logits) != bits(self.first)).sum())
        return self.sample(entries, logits, drawn)

    def distance(self, other: Replays) -> float:
        """Finds the largest difference of log-probabilities; infinite where one is NaN."""
        pair = [each.first.double().log_softmax(-1) for each in (self, other) if each.first is not None]
        return (pair[0] - pair[1]).abs().nan_to_num(float("inf")).max().item()


def bits(logits: Tensor) -> Tensor:
    return logits.view(INTEGERS[logits.element_size()])


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def make_runner(decoder: Decoder, programmatic_launch: str) -> ModelRunner:
    blocks = -(-CONTEXT // 16) * max(SIZES)
    config = RuntimeConfig(max_num_seqs=max(SIZES), num_blocks=blocks, max_model_len=CONTEXT + 16)
    memory = plan_memory(decoder.config, decoder.nbytes, decoder.dtype.itemsize, config)
    return ModelRunner(decoder, memory, programmatic_launch=programmatic_launch)


def spans(runner: ModelRunner, count: int, start: int, stop: int) -> StepPlan:
    """Makes a step of tokens `start` to `stop` of some sequences, which are drawn from the best."""
    each, random = -(-CONTEXT // runner.block_size), torch.Generator().manual_seed(0)
    entries = []
    for index in range(count):
        known = torch.randint(1, 1000, (CONTEXT,), generator=random).tolist()[:stop]
        request = Request(f"sequence {index}", tuple(known), SamplingParams(4, temperature=0), 0)
        tokens = Tokens(request, known, block_ids=list(range(index * each, index * each + each)))
        entries.append(ScheduledSequence(tokens, start, stop - start))
    return StepPlan(tuple(entries))


def repeat(decoder: Decoder, count: int, launch: str, replays: int) -> tuple[Replays, float]:
    """Replays a decode step of `count` sequences; also returns the seconds of one."""
    runner = make_runner(decoder, launch)
    for index in range(CONTEXT // 100):
        runner.execute(spans(runner, count, 100 * index, min(100 * (index + 1), CONTEXT - 1)))
    plan = spans(runner, count, CONTEXT - 1, CONTEXT)
    runner.sample = found = Replays(runner.sample)
    runner.execute(plan)
    watch = Stopwatch()
    for _ in range(replays):
        runner.execute(plan)
    return found, watch.read()[0] / replays


def overlapping_kernels() -> list[str]:
    """Names of the kernels that are loaded and can overlap."""
    from runtime.backends.triton.launcher import Launcher, can_overlap

    modules = [module for name, module in sys.modules.items() if name.startswith(KERNELS)]
    functions = [each.function for module in modules for each in vars(module).values() if isinstance(each, Launcher)]
    return sorted({function.fn.__name__ for function in functions if can_overlap(function)})


KERNELS = "runtime.backends.triton.kernels."


def blame(decoder: Decoder, count: int, replays: int, rows: Rows) -> list[str]:
    """Replays the step with one kernel after the other left out of the overlap, and writes how many replays differ.

    Returns:
        The kernels without which none differs.
    """
    from runtime.backends.triton.launcher import left_out

    suspects = []
    for name in overlapping_kernels():
        with left_out((name,)):
            found, _ = repeat(decoder, count, "on", replays)
        rows.add(what="overlap without", kernel=name, sequences=count, replays=replays, **summary(found))
        suspects += [] if found.different else [name]
    return suspects


def summary(found: Replays) -> dict[str, int]:
    return {"different": found.different, "first_different": found.first_different, "elements": found.elements}


def check(decoder: Decoder, replays: int, rows: Rows) -> None:
    """Compares steps of all sizes, and writes what came of each. Raises ToolkitError: replays differ from each other,
    or from kernels that do not overlap."""
    on_gpu = decoder.device.type == "cuda"
    for count in SIZES:
        expected, plain_seconds = repeat(decoder, count, "off", replays)
        rows.add(what="one after the other", sequences=count, replays=replays, **summary(expected))
        found, seconds = repeat(decoder, count, "on" if on_gpu else "auto", replays)
        apart = found.distance(expected)
        times = {"x": plain_seconds / seconds, "seconds": seconds}
        rows.add(what="overlap", sequences=count, replays=replays, difference=apart, **summary(found), **times)
        if expected.different:
            raise ToolkitError(
                f"of {replays} replays of {count} sequences {expected.different} differ without any overlap, the first "
                f"of them in {expected.elements} logits",
                "Ask for other kernels by --linear-backend, and report these",
            )
        if found.different or apart > MOST_DIFFERENCE:
            suspects = blame(decoder, count, max(1, replays // 5), rows) if on_gpu and found.different else []
            raise ToolkitError(
                f"of {replays} replays of {count} sequences {found.different} differ with overlap, the first of them "
                f"in {found.elements} logits; the first of all is {apart:.3g} from kernels one after the other; "
                f"kernels without whose overlap none differs: {', '.join(suspects) or 'none'}",
                "Leave --programmatic-launch off, and look at these kernels with compute-sanitizer",
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--replays", type=int, default=1000, help="of every number of sequences")
    parser.add_argument("--rows", type=Path, help="append figures to this file")
    options = parser.parse_args(arguments)
    rows = Rows(options.rows)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_packed_model(model, SHAPES[options.shape], Int(4, 128), Int(8, 64), options.device)
        check(load_model(model, device=options.device, dtype="bfloat16"), options.replays, rows)
    if options.device == "cuda":
        card = {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        rows.add(**card, replays=options.replays, sequences=SIZES, shape=options.shape, **environment())
    return 0


if __name__ == "__main__":
    leave_with(main)
