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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.common.cli import with_groups
from compress.common.errors import ToolkitError
from runtime.cli.options import (
    AdapterOptions,
    AddressOptions,
    ConfigOption,
    LogOptions,
    ModelsArgument,
    StartOptions,
    TlsOptions,
    runtime_config,
    warn_of_readers,
)
from runtime.cli.several_models import SeveralModels, SeveralModelsOptions, plan_models, resolve_models
from runtime.cli.start_display import showing
from runtime.core.collector import without_collections
from runtime.core.config import (
    DataParallelOptions,
    LatencyOptions,
    LimitOptions,
    Limits,
    LoraOptions,
    OffloadOptions,
    SeedOptions,
    SizeOptions,
    SpeculativeOptions,
)
from runtime.core.progress import StartProgress
from runtime.deploy.kv_events import KVEventOptions
from runtime.logs import writing_logs
from runtime.served_engine import EngineSource, Loading, LoadingApart, LoadingHere, ServedEngine
from runtime.transfer.options import TransferOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from runtime.server.keys import ApiKeys

logger = logging.getLogger("runtime.server")

BACKLOG = 2048
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


LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@with_groups
def serve(
    *,
    model: ModelsArgument = None,
    config: ConfigOption = None,
    address: AddressOptions,
    tls: TlsOptions,
    logs: LogOptions,
    sizes: SizeOptions,
    seed: SeedOptions,
    drafts: SpeculativeOptions,
    offload: OffloadOptions,
    latency: LatencyOptions,
    limits: LimitOptions,
    engines: DataParallelOptions,
    transfer: TransferOptions,
    several: SeveralModelsOptions,
    events: KVEventOptions,
    lora: LoraOptions,
    adapters: AdapterOptions,
    start: StartOptions,
) -> None:
    """Serve checkpoints over an OpenAI-compatible HTTP API.

    While the model loads, /health returns the progress with status 503. After Ctrl-C or SIGTERM, running requests
    finish before the server stops, and new ones get a 503; a second signal aborts running requests with an error.
    """
    from runtime.server.native_memory import share_arenas

    check_processes(start, len(model or ()), engines)
    share_arenas()  # before any thread starts
    encryption = tls.checked()
    found = resolve_models(model or (), address.name, sizes.trust_remote_code)
    listener = listen(address.host, address.port)  # before the model loads, to detect a port in use early
    print(*(f"model     {each.where}" for each in found), sep="\n", flush=True)
    settings = runtime_config(sizes, drafts, offload, latency, seed, lora)
    settings = replace(settings, warm_up=start.warm_up, captures_later=start.warm_up)
    apart = transfer.checked(settings, start.api_process)
    names, keys = [each.name for each in found], load_keys(address)
    service = {
        "keys": keys,
        "allowed_hosts": names_of_server(address.host, start.allowed_host or []),
        "adapters": adapters.checked(lora, names),
        "changes_adapters": adapters.allow_runtime_lora_updating,
    }
    named_events = events.named(listener.getsockname()[1], names, engines.data_parallel_size)
    source = EngineSource(found[0].path, settings, start.jit_cache, logs.log_level.upper(), named_events[0])
    together = plan_models(found, source, named_events, engines, apart, several)
    source = source if together is None else together.sources[names[0]]
    progress = StartProgress()
    with (
        LoadingApart.begin(source, engines, apart) if start.api_process else nullcontext(LoadingHere(source)) as loading
    ):
        with writing_logs(source.log_level), without_collections():
            served, app = load_app(loading, progress, listener, encryption, names[0], together, limits, **service)
        print(*served.facts.lines, sep="\n")
        print(f"ready     in {progress.summary()}")
        url, has_chat = url_of(listener, "https" if encryption else "http"), served.tokenizer.chat_template is not None
        announce(url, names, has_chat, needs_key=keys is not None)
        warn_of_open_door(address.host, is_open=keys is None and tls.ssl_ca_certs is None)
        with writing_logs(source.log_level):
            run(app, listener, limits.drain_seconds, limits.client_seconds, **encryption)
        if (health := served.client.check()).has_ended:
            raise ToolkitError(health.reason, "See the log above, and start the server again")
    print("stopped", file=sys.stderr)


def load_app(
    loading: Loading,
    progress: StartProgress,
    listener: socket.socket,
    encryption: Mapping[str, Any],
    name: str,
    together: SeveralModels | None,
    limits: LimitOptions,
    **service: Any,
) -> tuple[ServedEngine, FastAPI]:
    """Loads the engine of the first model and creates the application, while /health returns the progress.

    Args:
        encryption: uvicorn's TLS options.
        together: all models of a server with several.
        service: other arguments of `create_app`.
    """
    from runtime.server.app import create_app
    from runtime.server.routes.registry import ROUTES
    from runtime.server.starting import answering

    with answering(listener, progress, limits.client_seconds, service["allowed_hosts"], **encryption) as starting:
        ROUTES.load()  # while the engine is loaded
        print(f"weights   {loading.describe_weights()}", flush=True)
        with showing(progress):
            served = loading.finish(progress)
        starting.should_exit = True
        if together is not None:
            served = replace(served, client=together.engine(name, served.client))
            service |= together.parts(limits)
        allowed = Limits(**asdict(limits), max_model_len=served.facts.max_model_len)
        return served, create_app(served.client, served.tokenizer, name, allowed, **service)


def check_processes(start: StartOptions, num_models: int, engines: DataParallelOptions) -> None:
    """Raises ToolkitError: several engines are asked for in the process of the API."""
    if not start.api_process and (num_models > 1 or engines.data_parallel_size > 1):
        problem = "--no-api-process does not go with several models or --data-parallel-size: engines in one process "
        problem += "would take turns, and its memory is free only when it ends"
        raise ToolkitError(problem, "Leave out --no-api-process")


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


def warn_of_open_door(host: str, is_open: bool) -> None:
    """Warns about a server that is reachable from other machines without a key."""
    if is_open and host not in LOCAL_HOSTS:
        print(
            f"warning: any client that can connect to {host} may use this server; restrict it with --api-key KEY",
            file=sys.stderr,
        )


def announce(url: str, names: Sequence[str], has_chat: bool, needs_key: bool) -> None:
    """Prints the URL of the server and an example command."""
    message = {"messages": [{"role": "user", "content": "Hello"}]} if has_chat else {"prompt": "Hello"}
    body = json.dumps({"model": names[0], **message, "max_tokens": 32})
    command = ["curl", f"{url}/v1/{'chat/completions' if has_chat else 'completions'}"]
    command += ["-H", "Content-Type: application/json"]
    if needs_key:
        command += ["-H", "Authorization: Bearer KEY"]
    print(
        f"serving   {', '.join(names)} at {url} (Ctrl-C stops)\npage      {url}/ in a browser\n"
        f"try       {shlex.join([*command, '-d', body])}",
        flush=True,
    )


def run(app: FastAPI, listener: socket.socket, drain_seconds: int, client_seconds: float, **encryption: Any) -> None:
    """Serves until SIGINT or SIGTERM, then waits for running requests, at most `drain_seconds` or until a second
    signal.

    Args:
        client_seconds: timeout for a client to send a request head, and to continue reading.
        encryption: uvicorn's TLS options.
    """
    from runtime.server.drain import create_server

    gc.freeze()  # otherwise a full collection visits all objects of the libraries and stops all threads for 0.1 s
    server = create_server(app, drain_seconds, client_seconds, **encryption)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn's own handlers are removed before this command ends
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])
