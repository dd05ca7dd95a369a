"""`runtime memory`: what a checkpoint needs and what fits, without loading it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from runtime.cli.options import (
    ContextOption,
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    Kernels,
    KernelsOption,
    MemoryOption,
    ModelArgument,
    SinksOption,
    WindowOption,
    parse_size,
    resolve_model,
)
from runtime.config import RuntimeConfig


def memory(
    model: ModelArgument = None,
    memory: Annotated[
        int | None,
        typer.Option("--memory", parser=parse_size, metavar="SIZE", help="To fit in; default: what is free here."),
    ] = None,
    device: DeviceOption = Device.AUTO,
    dtype: DtypeOption = Dtype.AUTO,
    kernels: KernelsOption = Kernels.AUTO,
    max_model_len: ContextOption = None,
    attention_sinks: SinksOption = 0,
    attention_window: WindowOption = None,
    kv_memory: MemoryOption = "512MiB",  # type: ignore[assignment]  # Typer parses defaults too
    max_sequences: Annotated[int, typer.Option("--max-sequences", min=1, help="Computed together at most.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")] = False,
) -> None:
    """Say what serving a checkpoint takes, how many tokens and requests fit, and the cheapest ways to fit more.

    Reads config and headers only. Weights and keys and values are exact; activations and the process are estimates.
    """
    path, _ = resolve_model(model)
    from runtime.capacity.inspect import inspect
    from runtime.cli.describe import describe_scheme

    config = RuntimeConfig(
        device=device.value,
        dtype=dtype.value,
        kernels=kernels.value,
        kv_memory_bytes=kv_memory,
        max_model_len=max_model_len,
        attention_sinks=attention_sinks,
        attention_window=attention_window,
        max_num_sequences=max_sequences,
    )
    report = inspect(path, describe_scheme(path), config, memory)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(*report.lines(), sep="\n")
