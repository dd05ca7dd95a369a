"""The engine of a server, loaded in this process or in one of its own.

Imports torch and what else takes time where it is used only: the process of the engine starts before the server imports
anything.
"""

from __future__ import annotations

import gc
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from compress.common.errors import RequestError, ToolkitError
from runtime.core.collector import without_collections
from runtime.core.config import RuntimeConfig
from runtime.core.progress import Report
from runtime.engine.wire import describe_end, leave_signals_to_parent, receive, send, start_process
from runtime.logs import writing_logs
from runtime.server.native_memory import TRIM_SECONDS, Trimmer, share_arenas

if TYPE_CHECKING:
    from runtime.engine.engine import Engine
    from runtime.engine.engine_client import EngineClient
    from runtime.engine.engine_loop import EngineLoop
    from runtime.engine.engine_process import EnginePort
    from runtime.runner.runner import ModelRunner
    from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineSource:
    """Source of an engine.

    Attributes:
        jit_cache: archive of kernels to import first.
        log_level: level of the logs of its process.
    """

    path: Path
    config: RuntimeConfig
    jit_cache: Path | None = None
    log_level: str = "INFO"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of a loaded engine.

    Attributes:
        lines: description of its capacity and kernels.
    """

    max_model_len: int
    eos_token_ids: frozenset[int]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A loaded engine, and what its server needs. The engine starts with the application."""

    client: EngineClient
    tokenizer: Tokenizer
    facts: EngineFacts


class Loading(Protocol):
    """An engine that is being loaded."""

    def describe_weights(self) -> str:
        """Returns how the weights are stored. To be called first."""

    def finish(self, report: Report) -> ServedEngine:
        """Waits for the engine.

        Args:
            report: progress callback.

        Raises:
            CheckpointError: the folder cannot be loaded.
            ToolkitError: this machine or model does not support the configuration.
        """


def load(source: EngineSource, report: Report) -> tuple[Engine, Tokenizer]:
    """Loads the engine. Imports torch. Raises the errors of `Loading.finish`."""
    from runtime.llm import load_engine

    engine, tokenizer = load_engine(source.path, source.config, report)
    if engine.grammars is not None:
        with suppress(RequestError):  # without llguidance every grammar is rejected
            engine.grammars.read_vocabulary()  # loaded before any request needs it
    return engine, tokenizer


def describe_weights(source: EngineSource) -> str:
    """Imports compiled kernels, and returns how the weights are stored. Imports torch."""
    from runtime.describe import describe_scheme

    description = describe_scheme(source.path)
    if source.jit_cache is not None:
        from runtime.cli.warm_up import import_kernels

        import_kernels(source.jit_cache, source.config.device)
    return description


def facts_of(engine: Engine) -> EngineFacts:
    """Returns the facts of an engine."""
    from runtime.describe import describe_engine

    return EngineFacts(engine.runner.max_model_len, engine.runner.eos_token_ids, tuple(describe_engine(engine)))


class LoadingHere(Loading):
    """Loads an engine in this process, whose thread it will share with the server."""

    def __init__(self, source: EngineSource) -> None:
        self.source = source

    def describe_weights(self) -> str:
        return describe_weights(self.source)

    def finish(self, report: Report) -> ServedEngine:
        from runtime.engine.engine_thread import EngineThread

        engine, tokenizer = load(self.source, report)
        client = EngineThread(engine, idle_work=cast("ModelRunner", engine.runner).later)
        return ServedEngine(client, tokenizer, facts_of(engine))


class LoadingApart(Loading):
    """Loads an engine in a process of its own, which `begin` starts.

    Args:
        process: the engine's process.
        connection: this end of the socket to it.
    """

    def __init__(self, source: EngineSource, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.source, self.process, self.connection = source, process, connection

    @classmethod
    @contextmanager
    def begin(cls, source: EngineSource) -> Iterator[LoadingApart]:
        """Starts the process, which is killed at the end of the block if it has not ended."""
        mine, theirs = socket.socketpair()
        with mine:
            process = start_process("runtime.served_engine:main", theirs)
            try:
                with suppress(ConnectionError):  # the first report says how it ended
                    send(mine, source)
                yield cls(source, process, mine)
            finally:
                process.kill()
                process.wait()

    def describe_weights(self) -> str:
        return self.next_report()

    def finish(self, report: Report) -> ServedEngine:
        from runtime.engine.engine_process import EngineProcess

        tokenizer: Future[Tokenizer] = Future()
        threading.Thread(target=open_tokenizer, args=(self.source.path, tokenizer), daemon=True).start()
        while not isinstance(message := self.next_report(), EngineFacts):
            report(*message)
        opened = tokenizer.result()
        return ServedEngine(
            EngineProcess(self.process, self.connection, opened, message.eos_token_ids), opened, message
        )

    def next_report(self) -> Any:
        """Returns what the process says next. Raises the error with which it ended."""
        try:
            message = receive(self.connection)
        except EOFError:
            problem = f"the engine's process {describe_end(self.process)} while it loaded the model"
            raise ToolkitError(problem, "Its messages are above; without any, memory was short") from None
        if isinstance(message, BaseException):
            raise message
        return message


def open_tokenizer(path: Path, opened: Future[Tokenizer]) -> None:
    """Opens the tokenizer of a folder."""
    from runtime.text.tokenizer import Tokenizer

    try:
        opened.set_result(Tokenizer.open(path))
    except Exception as error:
        opened.set_exception(error)


def main(end: int) -> None:
    """Loads and runs an engine until the other end of a socket says so or is closed. Runs in a process of its own.

    Args:
        end: file descriptor of this end.
    """
    leave_signals_to_parent()
    share_arenas()
    from runtime.engine.engine_process import EnginePort

    port = EnginePort(end)
    source = port.receive()
    port.listen()
    with writing_logs(source.log_level):
        loop = load_loop(source, port)
        if loop is not None:
            threading.Thread(target=trim_at_times, args=(loop,), daemon=True).start()
            port.loop.set_result(loop)
            port.send(facts_of(loop.engine))
            loop.run()
    sys.exit(loop is None or bool(loop.status.failure))


@without_collections()
def load_loop(source: EngineSource, port: EnginePort) -> EngineLoop | None:
    """Loads an engine, and sends how far it is. Sends the error if there is one, and returns None."""
    from runtime.engine.engine_loop import EngineLoop

    try:
        port.send(describe_weights(source))
        sys.stdout.flush()
        engine, _ = load(source, lambda *report: port.send(report))
    except Exception as error:
        port.send(sendable(error))
        return None
    gc.freeze()
    return EngineLoop(engine, port.deliver, cast("ModelRunner", engine.runner).later)


def sendable(error: Exception) -> Exception:
    """Returns an error, with its traceback unless it is for the user, in a form that can be sent."""
    if not isinstance(error, ToolkitError):
        error.add_note(traceback.format_exc())
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(traceback.format_exc())


def trim_at_times(loop: EngineLoop) -> None:
    """Returns free memory from time to time."""
    trimmer = Trimmer()
    while True:
        time.sleep(TRIM_SECONDS)
        trimmer.look(is_idle=loop.status.busy_since is None)
