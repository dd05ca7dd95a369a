"""The engine of a server, loaded in this process, or one or more in a process of their own each.

Imports torch and what else takes time where it is used only: the process of the engine starts before the server imports
anything.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, cast

from compress.common.errors import RequestError, ToolkitError
from compress.cpu.binding import available_threads
from runtime.core.collector import without_collections
from runtime.core.config import DataParallelOptions, RuntimeConfig
from runtime.core.progress import Report, ignore
from runtime.deploy.kv_events import KVEventOptions, KVEventPublisher
from runtime.engine.wire import describe_end, leave_signals_to_parent, receive, send, start_process
from runtime.logs import writing_logs
from runtime.server.native_memory import TRIM_SECONDS, Trimmer, share_arenas
from runtime.transfer.options import ALONE, BOTH, PREFILL, TransferOptions, TransferPart

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
        kv_events: where to publish events of the KV cache; None publishes none.
        index, count: number of this engine, and of all engines of the server.
        transfer: pages that it exchanges with other engines.
    """

    path: Path
    config: RuntimeConfig
    jit_cache: Path | None = None
    log_level: str = "INFO"
    kv_events: KVEventOptions | None = None
    index: int = 0
    count: int = 1
    transfer: TransferPart = ALONE


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of a loaded engine.

    Attributes:
        num_blocks: blocks of its KV cache, those in host memory included.
        lines: description of its capacity and kernels.
    """

    max_model_len: int
    num_blocks: int
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
    if source.kv_events is not None:
        engine.scheduler.pool.watcher = KVEventPublisher(source.kv_events, source.config.block_size, source.index)
    if engine.grammars is not None:
        with suppress(RequestError):  # without llguidance every grammar is rejected
            engine.grammars.read_vocabulary()  # loaded before any request needs it
    return engine, tokenizer


def device_type(source: EngineSource) -> str:
    """Returns `cpu` or `cuda`, for comparison with other engines; without any, an empty string.

    Raises:
        ToolkitError: the device does not exist.
    """
    if source.count == 1:
        return ""  # a GPU takes some tenths of a second to get ready, during which weights can be read
    from compress.common.device import resolve_device

    return resolve_device(source.config.device).type


def import_kernels(archive: Path, device: str) -> None:
    """Unpacks an archive of kernels into Triton's cache folder.

    Args:
        device: value of `--device`.

    Raises:
        ToolkitError: the file is not such an archive or is for other machines, or this machine has no GPU.
    """
    from compress.common.device import resolve_device
    from runtime.backends.triton.kernel_cache import cache_folder, kernel_facts, unpack_kernels

    if not archive.is_file():
        raise ToolkitError(f"there is no file {archive}", "Create it with runtime warm-up MODEL --export FILE")
    number = unpack_kernels(archive, cache_folder(), kernel_facts(resolve_device(device)))
    print(f"kernels   {number} of {archive} are in {cache_folder()}")


def describe_weights(source: EngineSource) -> str:
    """Imports compiled kernels, and returns how the weights are stored. Imports torch."""
    from runtime.describe import describe_scheme

    description = describe_scheme(source.path)
    if source.jit_cache is not None:
        import_kernels(source.jit_cache, source.config.device)
    return description


def facts_of(engine: Engine) -> EngineFacts:
    """Returns the facts of an engine."""
    from runtime.describe import describe_engine

    runner, lines = engine.runner, tuple(describe_engine(engine))
    return EngineFacts(runner.max_model_len, runner.num_blocks + runner.num_host_blocks, runner.eos_token_ids, lines)


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


@dataclass(frozen=True, slots=True)
class LoadingProcess:
    """A process that loads an engine, and this end of the socket to it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    @classmethod
    @contextmanager
    def begin(cls, source: EngineSource) -> Iterator[LoadingProcess]:
        """Starts the process, which is killed at the end of the block if it has not ended."""
        mine, theirs = socket.socketpair()
        with mine:
            process = start_process("runtime.served_engine:main", theirs)
            try:
                with suppress(ConnectionError):  # the first report says how it ended
                    send(mine, source)
                yield cls(process, mine)
            finally:
                process.kill()
                process.wait()

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


def wait_for_all(processes: Sequence[LoadingProcess], report: Report) -> list[EngineFacts]:
    """Waits for engines; the first one that is not ready reports. Raises at once the error of any of them."""
    found = dict[int, EngineFacts]()
    with DefaultSelector() as selector:
        for index, process in enumerate(processes):
            selector.register(process.connection, EVENT_READ, index)
        while len(found) < len(processes):
            for key, _ in selector.select():
                message = processes[key.data].next_report()
                if isinstance(message, EngineFacts):
                    found[key.data] = message
                    selector.unregister(key.fileobj)
                elif all(index in found for index in range(key.data)):
                    report(*message)
    return [found[index] for index in range(len(processes))]


class LoadingApart(Loading):
    """Loads engines in a process of their own each, which `begin` starts.

    Args:
        source: source of each of them.
        processes: their processes.
        prefix_routing: whether several engines are chosen by cached prefixes.
        num_prefill: how many of them, the last ones, only compute prompts.
    """

    def __init__(
        self, source: EngineSource, processes: Sequence[LoadingProcess], prefix_routing: bool, num_prefill: int = 0
    ) -> None:
        self.source, self.processes, self.prefix_routing = source, processes, prefix_routing
        self.num_prefill = num_prefill

    @classmethod
    @contextmanager
    def begin(
        cls, source: EngineSource, engines: DataParallelOptions, transfer: TransferOptions
    ) -> Iterator[LoadingApart]:
        """Starts the processes, which are killed at the end of the block if they have not ended."""
        with ExitStack() as stack:
            # A server that is killed leaves its folder: only what needs sockets makes one.
            needed = TemporaryDirectory(prefix="engines-") if transfer.prefill_engines else nullcontext("")
            roles = transfer.parts(engines.data_parallel_size, Path(stack.enter_context(needed)))
            parts = [part_of(source, index, len(roles), role) for index, role in enumerate(roles)]
            processes = [stack.enter_context(LoadingProcess.begin(part)) for part in parts]
            yield cls(source, processes, engines.prefix_routing, transfer.prefill_engines)

    def describe_weights(self) -> str:
        """Returns how the weights are stored.

        Raises:
            ToolkitError: an engine has no GPU and another one has.
        """
        first, *others = [each.next_report() for each in self.processes]
        for index, (_, device) in enumerate(others, start=1):
            if device != first[1]:
                problem = f"engine {index} would run on the device {device}, engine 0 on {first[1]}"
                raise ToolkitError(problem, f"Use --data-parallel-size {index}, or --device cpu")
        return str(first[0])

    def finish(self, report: Report) -> ServedEngine:
        from runtime.engine.engine_process import EngineProcess
        from runtime.routing.engine_group import EngineGroup
        from runtime.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.open_in_thread(self.source.path)
        found = wait_for_all(self.processes, report)
        opened, facts = tokenizer.result(), found[0]
        clients = [EngineProcess(each.process, each.connection, opened, facts.eos_token_ids) for each in self.processes]
        if len(clients) == 1:
            return ServedEngine(clients[0], opened, facts)
        most_blocks = min(each.num_blocks for each in found) if self.prefix_routing else 0
        count = len(clients) - self.num_prefill
        group = EngineGroup(clients[:count], self.source.config.block_size, most_blocks, clients[count:])
        apart = f" generate, {self.num_prefill} compute prompts" if self.num_prefill else ""
        lines = (*facts.lines, f"engines   {count}{apart}, each as above")
        facts = replace(facts, max_model_len=min(each.max_model_len for each in found), lines=lines)
        return ServedEngine(group, opened, facts)


def part_of(source: EngineSource, index: int, count: int, role: TransferPart) -> EngineSource:
    """Returns the source of one of `count` engines."""
    is_prefill = role.role == PREFILL and count > 1
    kv_events = None if is_prefill else source.kv_events  # routers choose among engines that generate
    config = role.adapt(source.config)
    return replace(source, index=index, count=count, transfer=role, config=config, kv_events=kv_events)


def load_apart(
    source: EngineSource, engines: DataParallelOptions, transfer: TransferOptions, stack: ExitStack
) -> ServedEngine:
    """Loads engines in a process of their own each, which the end of the stack kills. Raises the errors of
    `Loading.finish`."""
    loading = stack.enter_context(LoadingApart.begin(source, engines, transfer))
    loading.describe_weights()
    return loading.finish(ignore)


def share_of_machine(source: EngineSource, environment: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Returns the environment variables of one of several engines: its GPUs, and its share of the cores.

    Args:
        environment: variables of the server.
        num_threads: threads for all engines together.
    """
    if source.count == 1:
        return {}
    size = source.config.num_ranks
    first, given = source.index * size, environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(first, first + size)] if given is None else given.split(",")[first:][:size]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OMP_NUM_THREADS": str(max(1, num_threads // source.count))}


def main(end: int) -> None:
    """Loads and runs an engine until the other end of a socket says so or is closed. Runs in a process of its own.

    Args:
        end: file descriptor of this end.
    """
    leave_signals_to_parent()
    share_arenas()
    from runtime.engine.engine_process import EnginePort

    port = EnginePort(end)
    source: EngineSource = port.receive()
    source = replace(source, config=replace(source.config, ends_with_ranks=True))
    os.environ |= share_of_machine(source, os.environ, available_threads())  # before torch reads it
    port.listen()
    with writing_logs(source.log_level):
        loop = load_loop(source, port)
        if loop is not None:
            threading.Thread(target=trim_at_times, args=(loop,), daemon=True).start()
            port.loop.set_result(loop)
            port.send(facts_of(loop.engine))
            loop.run()
            if isinstance(publisher := loop.engine.scheduler.pool.watcher, KVEventPublisher):
                publisher.close()
    sys.exit(loop is None or bool(loop.status.failure))


@without_collections()
def load_loop(source: EngineSource, port: EnginePort) -> EngineLoop | None:
    """Loads an engine, and sends how far it is. Sends the error if there is one, and returns None."""
    from runtime.engine.engine_loop import EngineLoop

    try:
        port.send((describe_weights(source), device_type(source)))
        sys.stdout.flush()
        engine, _ = load(source, lambda *report: port.send(report))
        runner = cast("ModelRunner", engine.runner)
        loop = EngineLoop(engine, port.deliver, runner.later)
        if source.transfer.role != BOTH:
            from runtime.transfer.join import join

            join(loop, runner, source.path, source.transfer)
    except Exception as error:
        port.send(sendable(error))
        return None
    gc.freeze()
    return loop


def sendable(error: Exception) -> Exception:
    """Returns an error, with its traceback unless it is for the user, in a form that can be sent."""
    if not isinstance(error, ToolkitError):
        error.add_note(traceback.format_exc())
    try:
        return cast(Exception, pickle.loads(pickle.dumps(error)))
    except Exception:
        return RuntimeError(traceback.format_exc())


def trim_at_times(loop: EngineLoop) -> None:
    """Returns free memory from time to time."""
    trimmer = Trimmer()
    while True:
        time.sleep(TRIM_SECONDS)
        trimmer.look(is_idle=loop.status.busy_since is None)
