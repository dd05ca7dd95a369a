"""`runtime bench`: measures latency and throughput of a server under load."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.common.cli import with_groups
from compress.common.errors import ToolkitError
from runtime.bench.load import Load, Workload
from runtime.cli.options import ModelArgument, ServerOptions, check_targets, resolve_model

if TYPE_CHECKING:
    from runtime.bench.figures import Run


@with_groups
def bench(
    *,
    model: ModelArgument = None,
    target: ServerOptions,
    load: Load,
    workload: Workload,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help='JSON lines file of prompts: {"prompt": ...} or {"messages": [...]}. Default: the Python manual.',
        ),
    ] = None,
    warmup: Annotated[
        int, typer.Option("--num-warmups", min=0, help="Number of warm-up requests, which are not measured.")
    ] = 4,
    slo: Annotated[
        str | None,
        typer.Option("--slo", help="Service level objectives for goodput, e.g. ttft=500ms,itl=50ms,tpot=40ms,e2e=10s."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Timeout of one request in seconds.")] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Plot latencies and throughput to this SVG file.")] = None,
) -> None:
    """Measure latency and throughput of a server under load.

    Prompts are pieces of the Python manual with exact token counts; answers ignore end tokens. Each request is a
    streamed HTTP request. ttft: from sending (with --request-rate: from the due time) to the first text. itl: each gap
    between two chunks of streamed text, one chunk per engine step. tpot: per request, (last text - first text) /
    (output tokens - 1). e2e: to the end of the answer. Goodput: requests within all objectives of --slo, where itl
    bounds the longest gap.
    """
    from runtime.bench.figures import parse_objectives
    from runtime.bench.load import read_prompts
    from runtime.bench.plot import check_plots
    from runtime.bench.run import Plan, run

    objectives = parse_objectives(slo) if slo else ()
    path = resolve_model(model)[0] if target.url is None or model is not None else None
    plan = Plan(
        command=shlex.join(["runtime", *hide_key(sys.argv[1:], target.api_key)]),
        workload=workload,
        load=load,
        prompts=read_prompts(prompts) if prompts else None,
        tokenizer_path=path,
        num_warm_up=warmup,
        objectives=objectives,
        timeout=timeout,
    )
    check_targets(json_file, plot)
    if plot:
        check_plots()
    with server(target, path) as address:
        result = run(plan, address, target.api_key)
    write(result, json_file, plot)


def hide_key(arguments: list[str], key: str | None) -> list[str]:
    """Returns the arguments with the API key hidden, for reports."""
    hidden = {key: "KEY", f"--api-key={key}": "--api-key=KEY"}
    return [hidden.get(part, part) for part in arguments]


def split_options(text: str) -> list[str]:
    """Splits a command line as a shell does. Raises typer.BadParameter for unclosed quotes."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"--serve {text!r}: {error}") from error


@contextmanager
def server(target: ServerOptions, path: Path | None) -> Iterator[str]:
    """Yields the given URL, or that of a server that runs for the duration of the block."""
    from runtime.bench.run import run_server

    if target.url is not None or path is None:
        if target.serve_options:
            raise ToolkitError("--serve and --url exclude each other: --url names a running server", "Use one of them")
        yield target.url or ""
        return
    options = split_options(target.serve_options)
    print("starting", shlex.join(["runtime", "serve", str(path), *options]), file=sys.stderr, flush=True)
    with run_server(path, options) as own:
        yield own.url


def write(result: Run, json_file: Path | None, plot: Path | None) -> None:
    """Prints the table and writes the files. Raises ToolkitError if no request completed."""
    from runtime.bench.figures import print_run
    from runtime.bench.plot import draw

    print_run(result)
    if json_file:
        json_file.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
        print(f"json        {json_file}")
    if plot:
        plot.write_text(draw(result), encoding="utf-8")
        print(f"plot        {plot}")
    if not result.figures.complete:
        raise ToolkitError("no request completed", "See the errors above")
