"""`runtime memory`: estimates the memory of a checkpoint without loading it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from compress.common.cli import SIZE_OPTION, with_groups
from runtime.cli.options import ModelArgument, resolve_model, runtime_config
from runtime.core.config import (
    BatchOptions,
    ComputeOptions,
    ContextOptions,
    KVCacheOptions,
    KVMemoryOptions,
    StateOptions,
)


@with_groups
def memory(
    *,
    model: ModelArgument = None,
    memory: Annotated[
        int | None,
        typer.Option("--memory", **SIZE_OPTION, help="Memory to fit in. Default: what is free on this machine."),
    ] = None,
    compute: ComputeOptions,
    kv: KVCacheOptions,
    context: ContextOptions,
    kv_memory: KVMemoryOptions,
    states: StateOptions,
    batching: BatchOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with sizes in bytes.")] = False,
) -> None:
    """Show the memory that serving a checkpoint takes, how much fits, and options that make more fit.

    Reads config.json and headers only. Weights and KV cache are exact; activations and the process are estimates.
    """
    path, _ = resolve_model(model)
    from runtime.cli.serve import describe_scheme
    from runtime.memory.advice import inspect

    config = runtime_config(compute, kv, context, kv_memory, states, batching)
    report = inspect(path, describe_scheme(path), config, memory)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(*report.lines(), sep="\n")
