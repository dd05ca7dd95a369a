"""A whole step of one sequence with draft tokens to verify, compared with one without, on the CPU.

Times are processor time of the process, in turns: what the scheduler and the text cost is left out.

    python scripts/bench_serve.py verification --shape 1.1b --context 512 --drafted 0 1 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarking.machine import open_console, take_turns
from benchmarking.models import SHAPES, write_packed_model
from benchmarking.tables import Row, print_with_markdown
from compress.checkpoint.weights import Int
from compress.cpu.binding import set_threads
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams
from runtime.core.request import Sequence as Tokens
from runtime.core.step import ScheduledSequence, StepPlan
from runtime.memory.plan import plan_memory
from runtime.model.loader import load_model
from runtime.runner.runner import ModelRunner

BLOCK_SIZE = 16


def load_runner(folder: Path, context: int) -> ModelRunner:
    blocks = context // BLOCK_SIZE + 2
    config = RuntimeConfig(max_num_seqs=4, num_blocks=blocks, block_size=BLOCK_SIZE, max_model_len=blocks * BLOCK_SIZE)
    decoder = load_model(folder, device="cpu", dtype="bfloat16")
    return ModelRunner(decoder, plan_memory(decoder.config, decoder.nbytes, decoder.dtype.itemsize, config))


def step_plan(runner: ModelRunner, start: int, stop: int, drafted: int) -> StepPlan:
    """A step of tokens `start` to `stop` of a sequence, followed by `drafted` draft tokens."""
    known = torch.randint(1, 1000, (stop + drafted,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = list(range(-(-(stop + drafted) // runner.block_size)))
    request = Request("sequence", tuple(known[:stop]), SamplingParams(64, temperature=0), 0)
    tokens = Tokens(request, known[:stop], block_ids=blocks)
    tokens.draft_token_ids = known[stop:]
    return StepPlan((ScheduledSequence(tokens, start, stop - start + drafted),))


def measure(runner: ModelRunner, context: int, drafted: list[int], threads: int, rounds: int) -> dict[int, float]:
    """Median milliseconds of processor time by drafted tokens."""
    runner.submit(step_plan(runner, 0, context, 0)).result()
    plans = {str(count): step_plan(runner, context, context + 1, count) for count in drafted}
    steps = {name: lambda _turn, plan=plan: runner.submit(plan).result() for name, plan in plans.items()}
    taken = take_turns(steps, rounds=rounds, clock=time.process_time)
    return {count: statistics.median(taken[str(count)]) / threads for count in drafted}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="1.1b", choices=SHAPES)
    parser.add_argument("--context", nargs="+", type=int, default=[512], help="tokens before the step")
    parser.add_argument("--drafted", nargs="+", type=int, default=[0, 1, 3], help="tokens to verify; the first is 1.00")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="of the model, written where it is missing")


def run(options: argparse.Namespace) -> int:
    console = open_console()
    torch.set_num_threads(options.threads)
    set_threads(options.threads)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / options.shape
        if not folder.is_dir():
            write_packed_model(folder, SHAPES[options.shape], Int(4, 128), Int(8, None))
        runner = load_runner(folder, max(options.context))
        for context in options.context:
            found = measure(runner, context, options.drafted, options.threads, options.rounds)
            first = found[options.drafted[0]]
            times = {f"{count} drafted": f"{each:.1f} ms ({each / first:.2f}x)" for count, each in found.items()}
            rows.append({"tokens before": f"{context:,}"} | times)
    print_with_markdown(f"One step, {options.shape} int4, threads: {options.threads}", rows, console)
    return 0
