"""`runtime memory`: what a checkpoint needs and what fits, without loading it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from compress.common.cli import with_groups
from runtime.cli.options import (
    ComputeOptions,
    ContextOptions,
    KVOptions,
    MemoryOption,
    ModelArgument,
    SequencesOption,
    parse_size,
    resolve_model,
    runtime_config,
)


@with_groups
def memory(
    *,
    model: ModelArgument = None,
    memory: Annotated[
        int | None,
        typer.Option("--memory", parser=parse_size, metavar="SIZE", help="To fit in; default: what is free here."),
    ] = None,
    compute: ComputeOptions,
    kv: KVOptions,
    context: ContextOptions,
    kv_memory: MemoryOption = None,
    max_sequences: SequencesOption = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")] = False,
) -> None:
    """Say what serving a checkpoint takes, how many tokens and requests fit, and the cheapest ways to fit more.

    Reads config and headers only. Weights and keys and values are exact; activations and the process are estimates.
    """
    path, _ = resolve_model(model)
    from runtime.cli.serve import describe_scheme
    from runtime.memory.advice import inspect

    config = runtime_config(compute, kv, context, kv_memory_bytes=kv_memory, max_num_seqs=max_sequences)
    report = inspect(path, describe_scheme(path), config, memory)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(*report.lines(), sep="\n")
