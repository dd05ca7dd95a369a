"""Options of the engine and of sampling, grouped as the commands take them. Free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from runtime.cli.options import (
    ContextOption,
    Device,
    DeviceOption,
    DraftMode,
    DraftModeOption,
    DraftTokensOption,
    Dtype,
    DtypeOption,
    HostMemoryOption,
    Kernels,
    KernelsOption,
    KVFormat,
    KVFormatOption,
    KVRecentOption,
    KVRotateOption,
    KVSinksOption,
    MemoryOption,
    MinPOption,
    SequencesOption,
    SinksOption,
    SpeculateOption,
    TopKOption,
    TopPOption,
    WindowOption,
)
from runtime.config import RuntimeConfig


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Where and how to compute."""

    device: DeviceOption = Device.AUTO
    dtype: DtypeOption = Dtype.AUTO
    kernels: KernelsOption = Kernels.AUTO


@dataclass(frozen=True, slots=True)
class KVOptions:
    """Form of keys and values."""

    kv_cache: KVFormatOption = KVFormat.AUTO
    kv_rotate: KVRotateOption = None
    kv_sinks: KVSinksOption = None
    kv_recent: KVRecentOption = None


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What tokens see."""

    max_model_len: ContextOption = None
    attention_sinks: SinksOption = 0
    attention_window: WindowOption = None


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What guesses tokens, and how guesses are verified."""

    speculate: SpeculateOption = ""
    num_draft_tokens: DraftTokensOption = 4
    draft_mode: DraftModeOption = DraftMode.MATCH


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What many requests share."""

    kv_memory_bytes: MemoryOption = None
    host_memory_bytes: HostMemoryOption = "0"  # type: ignore[assignment]  # Typer parses defaults too
    max_num_sequences: SequencesOption = 64


@dataclass(frozen=True, slots=True)
class TruncationOptions:
    """Which tokens may be drawn."""

    top_p: TopPOption = 1
    top_k: TopKOption = 0
    min_p: MinPOption = 0


@dataclass(frozen=True, slots=True)
class PenaltyOptions:
    """What the text so far makes less likely."""

    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Divides the logits of tokens in prompt or text; 1 is off.")
    ] = 1
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Lowers the logits of tokens that are in the text.")
    ] = 0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Lowers them as many times as they are in the text.")
    ] = 0


def runtime_config(
    *groups: ComputeOptions | KVOptions | ContextOptions | DraftOptions | PoolOptions, **others: Any
) -> RuntimeConfig:
    """The configuration that groups and other fields ask for: fields of groups have the names of the configuration."""
    chosen = {name: value for group in groups for name, value in asdict(group).items()}
    return RuntimeConfig(**chosen, **others)
