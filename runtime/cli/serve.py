"""`runtime serve`: the OpenAI-compatible server."""

from __future__ import annotations

import json
import logging
import shlex
import signal
import socket
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.checkpoint.errors import ToolkitError
from compress.checkpoint.option_groups import with_groups
from runtime.cli.listen import listen, url_of
from runtime.cli.option_groups import (
    ComputeOptions,
    ContextOptions,
    DraftOptions,
    KVOptions,
    PoolOptions,
    runtime_config,
)
from runtime.cli.options import ModelArgument, SeedOption, resolve_model
from runtime.cli.serve_options import AddressOptions, LimitOptions
from runtime.cli.served_model import ServedModel, load_served_model, name_of
from runtime.server.limits import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@with_groups
def serve(
    *,
    model: ModelArgument = None,
    address: AddressOptions,
    compute: ComputeOptions,
    seed: SeedOption = None,
    kv: KVOptions,
    context: ContextOptions,
    drafts: DraftOptions,
    pool: PoolOptions,
    limits: LimitOptions,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Name by which clients may call the server, and whose web pages may use it; can be repeated. "
            "A server on 127.0.0.1 answers to its local names only.",
        ),
    ] = None,
    drain_seconds: Annotated[
        int, typer.Option("--drain-seconds", min=0, help="Time that running requests get when the server is stopped.")
    ] = 30,
) -> None:
    """Serve a checkpoint through OpenAI's HTTP API.

    Ctrl-C or SIGTERM lets running requests finish, then stops.
    """
    host, api_key = address.host, address.api_key
    check_key(api_key)
    path, where = resolve_model(model)
    listener = listen(host, address.port)  # before the model loads, so that a taken port costs no time
    print(f"model     {where}", flush=True)
    config = runtime_config(compute, kv, context, drafts, pool, seed=seed or 0)
    describe_weights(path)
    served = load_served_model(
        path,
        address.name or name_of(path),
        config,
        partial(Limits, **asdict(limits)),
        api_key=api_key,
        allowed_hosts=names_of_server(host, allowed_host or []),
    )
    describe_engine(served)
    announce(url_of(listener), served.name, has_chat=served.tokenizer.chat_template is not None, api_key=api_key)
    warn_of_open_door(host, api_key)
    run(served.app, listener, drain_seconds, limits.client_seconds)


def check_key(api_key: str | None) -> None:
    """Raises ToolkitError for an empty key, as an unset variable of a shell gives one: it would guard nothing."""
    if api_key is not None and not api_key.strip():
        raise ToolkitError("--api-key is empty", "Give --api-key KEY, or leave it out to serve without a key")


def names_of_server(host: str, allowed: list[str]) -> list[str]:
    """What clients may call the server: anything when others reach it too, unless names are given."""
    return [*LOCAL_HOSTS, *allowed] if host in LOCAL_HOSTS or allowed else []


def describe_weights(path: Path) -> None:
    """Says how the weights are stored, before the slow part begins."""
    from runtime.cli.describe import describe_scheme

    print(f"weights   {describe_scheme(path)}", flush=True)


def describe_engine(served: ServedModel) -> None:
    """Says what computes, and what room there is for requests."""
    from runtime.cli.describe import (
        describe_attention,
        describe_gpu,
        describe_kernels,
        describe_kv_form,
        describe_memory,
    )

    config = served.engine.config
    print(f"context   {served.engine.runner.max_model_len} tokens")
    print(f"KV cache  {describe_memory(served.engine)}")
    print(f"KV form   {describe_kv_form(served.engine)}")
    for line in describe_kernels(served.engine):
        print(f"kernels   {line}")
    print(f"attention {describe_attention(served.engine)}")
    for line in describe_gpu(served.engine):
        print(line)
    if config.speculate:
        print(f"guesses   {config.speculate}, {config.num_draft_tokens} in a row at most, by {config.draft_mode}")


def warn_of_open_door(host: str, api_key: str | None) -> None:
    """A server that others can reach and that asks for no key deserves a word."""
    if api_key is None and host not in LOCAL_HOSTS:
        print(f"warning: everybody who reaches {host} may use this server; --api-key KEY restricts it", file=sys.stderr)


def announce(url: str, name: str, has_chat: bool, api_key: str | None) -> None:
    """Says where the server is and how to talk to it."""
    message = {"messages": [{"role": "user", "content": "Hello"}]} if has_chat else {"prompt": "Hello"}
    body = json.dumps({"model": name, **message, "max_tokens": 32})
    command = ["curl", f"{url}/v1/{'chat/completions' if has_chat else 'completions'}"]
    command += ["-H", "Content-Type: application/json"]
    if api_key is not None:
        command += ["-H", "Authorization: Bearer KEY"]
    print(
        f"serving   {name} at {url} (Ctrl-C stops)\npage      {url}/ in a browser\n"
        f"try       {shlex.join([*command, '-d', body])}",
        flush=True,
    )


def run(app: FastAPI, listener: socket.socket, drain_seconds: int, client_seconds: float) -> None:
    """Serves until SIGINT or SIGTERM, lets running requests end for at most `drain_seconds`, then returns. Clients have
    `client_seconds` to send the head of a request, and to read on."""
    import uvicorn

    from runtime.server.connection import IDLE_SECONDS, HurriedConnection

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("runtime").setLevel(logging.INFO)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            print(f"stopping: running requests get up to {drain_seconds} s", file=sys.stderr, flush=True)
            await super().shutdown(sockets)

    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn raises the signal again once it has drained; being stopped so is this command's normal end.
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(
        app,
        http=partial(HurriedConnection, client_seconds=client_seconds),  # type: ignore[arg-type]  # any factory will do
        log_level="warning",
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=IDLE_SECONDS,
    )
    Server(config).run(sockets=[listener])
    print("stopped", file=sys.stderr)
