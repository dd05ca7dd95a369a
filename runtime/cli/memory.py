"""`runtime memory`: estimates the memory of a checkpoint without loading it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from compress.common.cli import SIZE_OPTION, with_groups
from runtime.cli.options import ModelArgument, resolve_model, runtime_config
from runtime.core.config import SizeOptions


@with_groups
def memory(
    *,
    model: ModelArgument = None,
    memory: Annotated[
        int | None,
        typer.Option("--memory", **SIZE_OPTION, help="Memory available. Default: free memory of this machine."),
    ] = None,
    sizes: SizeOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with sizes in bytes.")] = False,
) -> None:
    """Estimate the memory for serving a checkpoint, its capacity, and options that increase it.

    Reads config.json and headers only. Sizes of weights and KV cache are exact, those of activations and the process
    are estimates.
    """
    path, _ = resolve_model(model, sizes.trust_remote_code, values=False)
    from runtime.describe import describe_scheme
    from runtime.memory.advice import inspect

    config = runtime_config(sizes)
    report = inspect(path, describe_scheme(path), config, memory)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(*report.lines(), sep="\n")
