"""An engine without a model, in a process of its own, whose first token of a prompt says what goes wrong."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fake_runner import FakeRunner

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.engine.engine_loop import EngineLoop
from runtime.engine.engine_process import EnginePort, EngineProcess
from runtime.engine.wire import receive, start_process
from runtime.text.tokenizer import Tokenizer

FAILS, PANICS, EXITS, HANGS = 40, 41, 42, 43


class PanicError(BaseException):
    """As of a library in Rust."""


class TroubledRunner(FakeRunner):
    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(0.001)
        trouble = max(entry.sequence.token_ids[0] for entry in plan.entries)
        if trouble == FAILS:
            self.failure = RuntimeError("kernel")
        elif trouble == PANICS:
            raise PanicError("unreachable")
        elif trouble == EXITS:
            os._exit(3)
        elif trouble == HANGS:
            time.sleep(3600)
        return super().execute(plan)


def new_engine(runner: FakeRunner | None = None) -> Engine:
    """An engine whose answers have the text of the demo model's first tokens."""
    runner = runner or TroubledRunner(2000, 4, 1000)
    config = RuntimeConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=16)
    return Engine(runner, Tokenizer.open(demo_model_path()), config)


def run(end: int) -> None:
    """The engine's process."""
    port = EnginePort(end)
    loop = EngineLoop(new_engine(), port.deliver)
    port.loop.set_result(loop)
    port.listen()
    port.send(loop.engine.runner.eos_token_ids)
    loop.run()
    sys.exit(bool(loop.status.failure))


@contextmanager
def engine_process(stall_seconds: float = 60.0) -> Iterator[EngineProcess]:
    """Starts it; `start` of what comes is for the event loop."""
    mine, theirs = socket.socketpair()
    process = start_process("engine_apart:run", theirs)
    try:
        tokenizer = Tokenizer.open(demo_model_path())
        yield EngineProcess(process, mine, tokenizer, receive(mine), stall_seconds)
    finally:
        process.kill()
        process.wait()
        mine.close()
