"""The calibration text of a run as tokens; where the recipe asks for it, the source model writes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibration.mixture import pack_parts
from calibration.self_text import sample_sequences
from calibration.sequences import SequenceSet, load_tokenizer, separator_token
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import CheckpointError
from compress.pipeline.memory import return_freed_memory
from compress.pipeline.progress import RunDisplay
from compress.recipe import CalibrationOptions


@dataclass(frozen=True, slots=True)
class SourceModel:
    """The dense model, and where and how it computes."""

    path: Path
    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False


def calibration_sequences(
    options: CalibrationOptions, source: SourceModel, seed: int, dry_run: bool = False
) -> SequenceSet:
    """Packed sequences of the text or mixture that `options` name.

    Args:
        dry_run: leaves text that the model would write unwritten; zeros stand in for it.

    Raises:
        ToolkitError: a text that cannot be used, or no memory for the model that should write it.
    """
    tokenizer = load_tokenizer(source.path)

    def write(count: int, length: int, seed: int) -> Tensor:
        return _write(source, tokenizer, count, length, seed)

    return pack_parts(
        options.parts,
        tokenizer,
        samples=options.samples,
        length=options.length,
        seed=seed,
        sampler=None if dry_run else write,
    )


def _write(source: SourceModel, tokenizer: Any, count: int, length: int, seed: int) -> Tensor:
    """Text sampled from the whole dense model, which is in memory for just that long."""
    _require_memory(source)
    with RunDisplay(1, unit="calibration text") as display:
        display.say(f"sampling {count} sequences of {length} tokens from the model itself")
        model = _load(source)
        tokens = sample_sequences(
            model,
            count,
            length,
            start=separator_token(tokenizer),
            ends=_end_tokens(model, tokenizer),
            seed=seed,
            on_progress=lambda done, total: display.step("sampling", done / total),
        )
        display.finish(f"sampled {tokens.numel()} tokens")
    del model
    return_freed_memory()
    if source.device.type == "cuda":
        torch.cuda.empty_cache()
    return tokens


def _load(source: SourceModel) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with _no_loading_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=source.dtype, trust_remote_code=source.trust_remote_code, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        problem = f"{source.path} cannot be loaded to write its calibration text ({reason})"
        raise CheckpointError(problem, "Calibrate on a text instead of self") from error
    return model.to(source.device).eval()


@contextmanager
def _no_loading_bar() -> Iterator[None]:
    """transformers draws a bar of its own, which would cut through the one of this run."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = generation if isinstance(generation, list) else [generation]
    return {token for token in (*ends, getattr(tokenizer, "eos_token_id", None)) if token is not None}


def _require_memory(source: SourceModel) -> None:
    """Compressing streams; sampling holds the whole dense model. Refused in words rather than killed by the system."""
    from compress.common.device import available_bytes, format_bytes

    files = TensorFiles.open(source.path)
    needed = source.dtype.itemsize * sum(math.prod(files.shape(name)) for name in files.names())
    available = available_bytes(source.device)
    if needed > available:
        raise CheckpointError(
            f"text from the model itself needs the whole model, {format_bytes(needed)}, and {format_bytes(available)} "
            f"are free on {source.device}",
            "Calibrate on a text instead of self, or on a machine with more memory",
        )
