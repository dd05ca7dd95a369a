"""Checks kernels that overlap on a GPU: a thousand captured decode steps must give the same numbers, and those of
kernels one behind the other.

The row that it writes is the record of the card: put into `runtime/backends/triton/checked`, it turns
`--programmatic-launch auto` on for cards of the same compute capability. On a CPU, where nothing overlaps, the same
steps are rehearsed.

    python scripts/check_overlap.py --shape 8b --rows rows.jsonl
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from benchmarking.machine import environment, leave_with
from benchmarking.models import SHAPES, write_packed_model
from benchmarking.tables import Rows

from compress.checkpoint.weights import Int
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams
from runtime.core.request import Sequence as Tokens
from runtime.core.step import SampledToken, ScheduledSequence, StepPlan
from runtime.memory.plan import plan_memory
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.runner.runner import ModelRunner

SIZES, CONTEXT = (1, 8, 64), 300
"""Sequences that are decoded together, and tokens of each: enough for its keys to be split."""
MOST_DIFFERENCE = 0.05
"""Largest distance of log-probabilities from those of kernels that do not overlap, whose roundings may differ."""
Answers = list[SampledToken]


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
        request = Request(f"sequence {index}", tuple(known), SamplingParams(4, temperature=0, logprobs=5), 0)
        tokens = Tokens(request, known, block_ids=list(range(index * each, index * each + each)))
        entries.append(ScheduledSequence(tokens, start, stop - start))
    return StepPlan(tuple(entries))


def answers(runner: ModelRunner, plan: StepPlan) -> Answers:
    """Computes a step; its first tokens in the order of the entries."""
    tokens = runner.execute(plan).tokens
    return [tokens[entry.sequence.id][0] for entry in plan.entries]


def difference(found: Answers, expected: Answers) -> float:
    """Finds the largest difference of log-probabilities of the sampled tokens; infinite where those differ."""
    pairs = list(zip(found, expected, strict=True))
    if any(one.error or other.error or one.token_id != other.token_id for one, other in pairs):
        return float("inf")
    return max(abs(one.logprobs.logprob - other.logprobs.logprob) for one, other in pairs)  # type: ignore[union-attr]


def check(decoder: Decoder, replays: int, rows: Rows) -> None:
    """Compares steps of all sizes, and writes what came of each.

    Raises:
        ToolkitError: replays differ from each other, or from kernels that do not overlap.
    """
    asked = "on" if decoder.device.type == "cuda" else "auto"
    plain, overlapping = make_runner(decoder, "off"), make_runner(decoder, asked)
    for count in SIZES:
        for runner in (plain, overlapping):
            for index in range(CONTEXT // 100):
                runner.execute(spans(runner, count, 100 * index, min(100 * (index + 1), CONTEXT - 1)))
        plan = spans(overlapping, count, CONTEXT - 1, CONTEXT)
        expected, first = answers(plain, plan), answers(overlapping, plan)
        different = sum(answers(overlapping, plan) != first for _ in range(replays))
        apart = difference(first, expected)
        rows.add(what="overlap", sequences=count, replays=replays, different=different, difference=apart)
        if different or apart > MOST_DIFFERENCE:
            raise ToolkitError(
                f"{different} of {replays} replays of {count} sequences differ, and the first by {apart:.3g} from "
                "kernels that do not overlap",
                "Leave --programmatic-launch off, and look at the kernels with compute-sanitizer",
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
