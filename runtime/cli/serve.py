"""`runtime serve`: the OpenAI-compatible server."""

from __future__ import annotations

import errno
import gc
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from compress.checkpoint.locate.hub import HubModel
from compress.common.cli import BUNDLED, bundled_path, interrupts_held, with_groups
from compress.common.errors import RequestError, ToolkitError
from runtime.cli.options import (
    AddressOptions,
    ConfigOption,
    LogOptions,
    ModelArgument,
    TlsOptions,
    resolve_model,
    runtime_config,
    warn_of_readers,
)
from runtime.cli.start_display import showing
from runtime.cli.warm_up import import_kernels
from runtime.core.collector import without_collections
from runtime.core.config import (
    BatchOptions,
    ComputeOptions,
    ContextOptions,
    KVCacheOptions,
    KVMemoryOptions,
    LatencyOptions,
    LimitOptions,
    Limits,
    OffloadOptions,
    SeedOptions,
    SpeculativeOptions,
    StateOptions,
)
from runtime.core.progress import Report, StartProgress, ignore

if TYPE_CHECKING:
    from fastapi import FastAPI

    from runtime.core.config import RuntimeConfig
    from runtime.engine.engine import Engine
    from runtime.runner.runner import ModelRunner
    from runtime.server.keys import ApiKeys
    from runtime.text.tokenizer import Tokenizer


logger = logging.getLogger("runtime.server")

BACKLOG = 2048
MOST_LINES = 2000
PORTS = range(2**16)
PORTS_TO_TRY = 50


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket; port 0 picks a free one. Clients that connect before the server accepts wait.

    Raises:
        ToolkitError: the port is in use or forbidden, or the address does not belong to this machine.
    """
    if port not in PORTS:
        raise ToolkitError(f"--port {port} is out of range", "Use a number from 0 to 65535")
    try:
        return _listen(host, port)
    except socket.gaierror as error:
        raise ToolkitError(f"--host {host} is unknown: {error.strerror}", "Use --host 127.0.0.1 or 0.0.0.0") from error
    except OSError as error:
        raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> ToolkitError:
    match error.errno:
        case errno.EADDRINUSE:
            remedy = f"Stop the server that uses it, or use --port {_free_port(host, port)}"
            return ToolkitError(f"port {port} on {host} is already in use", remedy)
        case errno.EACCES:
            return ToolkitError(f"this user has no permission to listen on port {port}", "Use a --port of 1024 or more")
        case errno.EADDRNOTAVAIL:
            return ToolkitError(f"--host {host} is not an address of this machine", "Use --host 127.0.0.1 or 0.0.0.0")
        case _:
            return ToolkitError(f"cannot listen on {host}:{port}: {error.strerror}", "Use another --host or --port")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _free_port(host: str, port: int) -> int:
    """Returns the next free port for a remedy; 0 (any) if none nearby is free."""
    for candidate in range(port + 1, min(port + PORTS_TO_TRY, PORTS.stop)):
        try:
            _listen(host, candidate).close()
        except OSError:
            continue
        return candidate
    return 0


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Returns the URL of a socket for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine, its tokenizer, and the HTTP application that serves it as `name`."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    app: FastAPI


def name_of(path: Path) -> str:
    """Returns the default name of a folder's model in the API."""
    if model := HubModel.of_cached(path):
        return model.repo
    return next((name for name in BUNDLED if path == bundled_path(name)), path.resolve().name)


def load_served_model(
    path: Path,
    name: str,
    config: RuntimeConfig,
    limits: Callable[[int], Limits],
    *,
    keys: ApiKeys | None = None,
    allowed_hosts: Collection[str] = (),
    report: Report = ignore,
) -> ServedModel:
    """Loads a checkpoint and wraps it. Imports torch; the engine's thread starts with the application.

    Args:
        limits: function from the context length of the loaded model to the limits of the server.
        keys: API keys; None disables authentication.
        allowed_hosts: host names by which clients may address the server; empty allows any.
        report: progress callback.

    Raises:
        CheckpointError: the folder cannot be loaded.
        ToolkitError: this machine or model does not support the configuration.
    """
    from runtime.engine.engine_thread import EngineThread
    from runtime.llm import load_engine
    from runtime.server.app import create_app

    engine, tokenizer = load_engine(path, config, report)
    if engine.grammars is not None:
        with suppress(RequestError):  # without llguidance every grammar is rejected
            engine.grammars.read_vocabulary()  # loaded before any request needs it
    app = create_app(
        EngineThread(engine, idle_work=cast("ModelRunner", engine.runner).later),
        tokenizer,
        name,
        limits(engine.runner.max_model_len),
        render_metrics=engine.render_metrics,
        keys=keys,
        allowed_hosts=allowed_hosts,
    )
    return ServedModel(name, engine, tokenizer, app)


LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@with_groups
def serve(
    *,
    model: ModelArgument = None,
    config: ConfigOption = None,
    address: AddressOptions,
    tls: TlsOptions,
    logs: LogOptions,
    compute: ComputeOptions,
    seed: SeedOptions,
    kv: KVCacheOptions,
    context: ContextOptions,
    drafts: SpeculativeOptions,
    kv_memory: KVMemoryOptions,
    states: StateOptions,
    offload: OffloadOptions,
    batching: BatchOptions,
    latency: LatencyOptions,
    limits: LimitOptions,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Host name that clients may use for the server, and whose web pages may access it; may be repeated. "
            "Default: any; on 127.0.0.1 local names only.",
        ),
    ] = None,
    warm_up: Annotated[
        bool,
        typer.Option(
            "--warm-up/--no-warm-up",
            help="On a GPU, compile kernels before the first request and capture CUDA graphs of every size, most of "
            "them while the server is idle; else at first use.",
        ),
    ] = True,
    jit_cache: Annotated[
        Path | None,
        typer.Option(
            "--jit-cache",
            metavar="FILE",
            help="Import compiled kernels from this file, written by runtime warm-up --export, into Triton's cache "
            "folder first. Kernels are executable code: use files from trusted sources only.",
        ),
    ] = None,
) -> None:
    """Serve a checkpoint over an OpenAI-compatible HTTP API.

    While the model loads, /health returns the progress with status 503. After Ctrl-C or SIGTERM, running requests
    finish before the server stops, and new ones get a 503; a second signal aborts running requests with an error.
    """
    with without_collections():
        from runtime.server.native_memory import share_arenas
        from runtime.server.starting import answering

    share_arenas()  # before any thread starts
    host, keys, encryption = address.host, load_keys(address), tls.checked()
    path, where = resolve_model(model, compute.trust_remote_code)
    listener = listen(host, address.port)  # before the model loads, to detect a port in use early
    print(f"model     {where}", flush=True)
    settings = runtime_config(compute, kv, context, drafts, kv_memory, states, offload, batching, latency, seed)
    settings = replace(settings, warm_up=warm_up, captures_later=warm_up)
    hosts, progress = names_of_server(host, allowed_host or []), StartProgress()
    level = logs.log_level.upper()
    with (
        writing_logs(level),
        without_collections(),
        answering(listener, progress, limits.client_seconds, hosts, **encryption),
    ):
        print(f"weights   {describe_scheme(path)}", flush=True)
        if jit_cache is not None:
            import_kernels(jit_cache, settings.device)
        with showing(progress):
            served = load_served_model(
                path,
                address.name or name_of(path),
                settings,
                partial(Limits, **asdict(limits)),
                keys=keys,
                allowed_hosts=hosts,
                report=progress,
            )
    print(*describe_engine(served.engine), sep="\n")
    print(f"ready     in {progress.summary()}")
    url, has_chat = url_of(listener, "https" if encryption else "http"), served.tokenizer.chat_template is not None
    announce(url, served.name, has_chat, needs_key=keys is not None)
    warn_of_open_door(host, is_open=keys is None and tls.ssl_ca_certs is None)
    gc.freeze()  # otherwise a full collection visits all objects of the libraries and stops all threads for 0.1 s
    with writing_logs(level):
        run(served.app, listener, limits.drain_seconds, limits.client_seconds, **encryption)
    print("stopped", file=sys.stderr)


def load_keys(address: AddressOptions) -> ApiKeys | None:
    """Returns the API keys from the options, None if there are none. SIGHUP reloads the file.

    Raises:
        ToolkitError: a key is empty, such as an unset shell variable, or the file is invalid.
    """
    if address.api_key is None and address.api_keys is None:
        return None
    from runtime.server.keys import ApiKeys, load_accounts

    keys = ApiKeys(partial(load_accounts, address.api_key, address.api_keys))
    if address.api_keys is not None:
        warn_of_readers(address.api_keys)
        signal.signal(signal.SIGHUP, lambda *_: reload(keys))
    return keys


def reload(keys: ApiKeys) -> None:
    """Reloads API keys; an invalid file is logged and changes nothing."""
    try:
        keys.reload()
        logger.info("%d API keys are valid now", len(keys.accounts))
    except ToolkitError as error:
        logger.error("the API keys were not changed: %s", error)


def names_of_server(host: str, allowed: list[str]) -> list[str]:
    """Returns the allowed host names; empty (any) if the server is reachable from other machines and none are given."""
    return [*LOCAL_HOSTS, *allowed] if host in LOCAL_HOSTS or allowed else []


def describe_engine(engine: Engine) -> Iterator[str]:
    """Describes capacity and kernels, one line each."""
    config, runner = engine.config, cast("ModelRunner", engine.runner)
    yield f"context   {runner.max_model_len} tokens"
    yield f"KV cache  {describe_memory(engine)}"
    yield f"KV form   {runner.memory.kv_choice.describe()}"
    yield from (f"kernels   {line}" for line in join_equal(runner.decoder.description))
    yield f"attention {runner.kernels.describe()}"
    yield from describe_gpu(runner, engine.config)
    if config.speculative_model:
        drafter = HubModel.of_cached(Path(config.speculative_model)) or config.speculative_model
        drafting = f"drafting  {drafter}, up to {config.num_speculative_tokens} tokens"
        yield f"{drafting}, {config.spec_verify}"


def join_equal(lines: Iterable[str]) -> list[str]:
    """Joins the lines `names: form, kernel` that differ in their names only."""
    names: dict[str, list[str]] = {}
    for line in lines:
        name, _, kernel = line.partition(": ")
        names.setdefault(kernel or line, []).append(name)
    return [kernel if kernel in found else f"{', '.join(found)}: {kernel}" for kernel, found in names.items()]


def warn_of_open_door(host: str, is_open: bool) -> None:
    """Warns about a server that is reachable from other machines without a key."""
    if is_open and host not in LOCAL_HOSTS:
        print(
            f"warning: any client that can connect to {host} may use this server; restrict it with --api-key KEY",
            file=sys.stderr,
        )


def announce(url: str, name: str, has_chat: bool, needs_key: bool) -> None:
    """Prints the URL of the server and an example command."""
    message = {"messages": [{"role": "user", "content": "Hello"}]} if has_chat else {"prompt": "Hello"}
    body = json.dumps({"model": name, **message, "max_tokens": 32})
    command = ["curl", f"{url}/v1/{'chat/completions' if has_chat else 'completions'}"]
    command += ["-H", "Content-Type: application/json"]
    if needs_key:
        command += ["-H", "Authorization: Bearer KEY"]
    print(
        f"serving   {name} at {url} (Ctrl-C stops)\npage      {url}/ in a browser\n"
        f"try       {shlex.join([*command, '-d', body])}",
        flush=True,
    )


class LogFormatter(logging.Formatter):
    """Log formatter that escapes control characters: text from a request can neither start a line nor reach the
    terminal.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Indents the lines of a traceback, which may contain text from a request."""
        return "\n".join(f"  {escape(line)}" for line in super().formatException(ei).split("\n"))


def escape(text: str) -> str:
    """Returns a line of printable characters; line breaks become `\\n`."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class LogQueue(QueueHandler):
    """Log handler with a writer thread, which keeps a full pipe from blocking the server.

    Lines are dropped while `MOST_LINES` are unwritten.
    """

    queue: SimpleQueue[logging.LogRecord]  # reentrant, because signal handlers also log and may interrupt at any point

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.queue.qsize() < MOST_LINES:
            self.queue.put_nowait(record)


@contextmanager
def writing_logs(level: str, stream: TextIO | None = None) -> Iterator[None]:
    """Writes logs to `stream`, by default standard error: those of this package from `level` on, those of libraries
    from WARNING on unless `level` is DEBUG."""
    lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler, writer = LogQueue(lines), QueueListener(lines, logging.StreamHandler(stream))
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel("WARNING" if level == "INFO" else level)
    logging.getLogger("runtime").setLevel(level)
    writer.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        writer.stop()


def run(app: FastAPI, listener: socket.socket, drain_seconds: int, client_seconds: float, **encryption: Any) -> None:
    """Serves until SIGINT or SIGTERM, then waits for running requests, at most `drain_seconds` or until a second
    signal.

    Args:
        client_seconds: timeout for a client to send a request head, and to continue reading.
        encryption: uvicorn's TLS options.
    """
    from runtime.server.drain import create_server

    server = create_server(app, drain_seconds, client_seconds, **encryption)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn's own handlers are removed before this command ends
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])


def describe_scheme(path: Path) -> str:
    """Describes the storage of the weights, see `PackedCheckpoint.describe`."""
    with interrupts_held():  # the first import of torch
        from compress.checkpoint.reader import PackedCheckpoint

    return PackedCheckpoint.open(path).describe()


def describe_gpu(runner: ModelRunner, config: RuntimeConfig) -> list[str]:
    """Describes GPU memory, sizes of steps and CUDA graphs; empty on a CPU."""
    from runtime.memory.plan import explain

    if runner.decoder.device.type != "cuda":
        return []
    sizes = f"of at most {config.step_tokens} tokens, {config.max_span_tokens} of one prompt"
    limit = f"{sizes} ({config.step_sizes_reason})"
    steps = f"launched kernel by kernel: {runner.graphs_reason}"
    if runner.graphs is not None:
        sizes = ", ".join(map(str, runner.graphs.sizes))
        drafts = ", ".join(map(str, runner.graphs.draft_sizes[1:]))
        verified = f", with {drafts} draft tokens or none," if drafts else ""
        when = " while the server is idle, or at their first use" if runner.later else " at their first use"
        when = "" if runner.graphs.is_complete else when
        longest = max(runner.graphs.prompt_sizes, default=0)
        prompts = f"; with prompts of up to {longest} tokens as well" if longest else ""
        steps = f"of one token for each of {sizes} sequences{verified} are captured{when} (CUDA graphs){prompts}"
    return [
        *(f"memory    {line}" for line in explain(runner.memory)),
        f"steps     {limit}",
        f"steps     {steps}",
    ]


def describe_memory(engine: Engine) -> str:
    """Describes the capacity of the KV cache: `16384 tokens in 1024 blocks, 8.0 requests of the whole context`."""
    runner, config = engine.runner, engine.config
    needed = runner.attention_window.blocks_for(runner.max_model_len, config.max_span_tokens, config.block_size)
    num_tokens, requests = runner.num_blocks * config.block_size, runner.num_blocks / needed
    room = f"{num_tokens} tokens in {runner.num_blocks} blocks, {requests:.1f} requests of the whole context"
    if runner.num_host_blocks:
        room += f", {runner.num_host_blocks * config.block_size} more tokens in host memory"
    if runner.attention_window.window is None:
        return room
    return f"{room} ({needed} blocks each: tokens see {runner.attention_window})"
