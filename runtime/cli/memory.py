"""`runtime memory`: what a checkpoint needs and what fits, without loading it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from compress.common.cli import read_size, with_groups
from runtime.cli.options import ModelArgument, resolve_model, runtime_config
from runtime.core.config import BatchOptions, ComputeOptions, ContextOptions, KVCacheOptions, KVMemoryOptions


@with_groups
def memory(
    *,
    model: ModelArgument = None,
    memory: Annotated[
        int | None,
        typer.Option("--memory", parser=read_size, metavar="SIZE", help="To fit in; default: what is free here."),
    ] = None,
    compute: ComputeOptions,
    kv: KVCacheOptions,
    context: ContextOptions,
    kv_memory: KVMemoryOptions,
    batching: BatchOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")] = False,
) -> None:
    """Say what serving a checkpoint takes, how many tokens and requests fit, and the cheapest ways to fit more.

    Reads config and headers only. Weights and keys and values are exact; activations and the process are estimates.
    """
    path, _ = resolve_model(model)
    from runtime.cli.serve import describe_scheme
    from runtime.memory.advice import inspect

    config = runtime_config(compute, kv, context, kv_memory, batching)
    report = inspect(path, describe_scheme(path), config, memory)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(*report.lines(), sep="\n")
