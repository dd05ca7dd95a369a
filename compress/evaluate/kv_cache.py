"""Loss of quality by quantized keys and values: one checkpoint scored with each form and with a 16-bit cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calibration.sequences import check_token_ids, load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.config import read_config
from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.common.errors import ToolkitError
from compress.evaluate.perplexity import (
    BATCH_LOGITS,
    Evaluation,
    Positions,
    Windows,
    compare_positions,
    cut_windows,
    log_probabilities,
)

if TYPE_CHECKING:
    from runtime.model.served import ServedModel


@dataclass(frozen=True, slots=True)
class KVCacheMeasurement:
    """One evaluation for each form, in their order; the baseline is the same checkpoint with a 16-bit cache.

    Attributes:
        exact_token_bytes: keys and values of one token in all layers, in the model's dtype.
        token_bytes: the same for each form.
    """

    windows: Windows
    results: tuple[Evaluation, ...]
    exact_token_bytes: int
    token_bytes: tuple[int, ...]


def check_measurable(config: dict[str, Any], nbytes: int, device: str) -> None:
    """Checks before a run that the runtime serves this model and that it fits into memory.

    Args:
        config: the parsed config.json.
        nbytes: size of the finished weights.

    Raises:
        CheckpointError: it does neither.
    """
    from compress.common.device import require_memory, resolve_device
    from runtime.core.model_config import parse_config

    if not parse_config(config).mixers:
        raise ToolkitError("no layer of this model keeps keys and values", "Leave the kv_cache stage out")
    remedy = "Leave the kv_cache stage out, or run on a machine with more memory"
    require_memory("KV caches are measured with the finished model in memory", nbytes, resolve_device(device), remedy)


def measured_windows(path: Path, *, data: str, tokens: int, length: int) -> Windows:
    """Cuts the text to measure on by the tokenizer in the folder `path`. Raises DataError for either."""
    windows = cut_windows(load_texts(data), load_tokenizer(path), length=length, max_tokens=tokens)
    check_token_ids(windows.tokens, read_config(path), path)
    return windows


def measure_kv_caches(
    path: Path,
    schemes: Sequence[KVCacheScheme],
    *,
    data: str,
    tokens: int,
    length: int,
    device: str = "auto",
    on_progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> KVCacheMeasurement:
    """Scores windows of a text with each form of keys and values.

    Args:
        tokens, length: tokens of the text and of a window; one window at least.
        on_progress: called with (passes done, passes in all): one of each window with 16 bits and with each form.

    Raises:
        ToolkitError: a path or text that cannot be used.
        NumericsError: logits that are not finite.
    """
    from runtime.memory.estimate import kv_token_bytes
    from runtime.model.loader import load_model

    windows = measured_windows(path, data=data, tokens=tokens, length=length)
    decoder = load_model(path, device=device)
    found: list[list[Positions]] = [[] for _ in schemes]
    passes = count(1)
    total = len(windows.tokens) * (len(schemes) + 1)
    for window in windows.tokens:
        scored = _score(decoder, window.unsqueeze(0), schemes, lambda: on_progress(next(passes), total))
        for positions, part in zip(found, scored, strict=True):
            positions.append(part)
    results = tuple(Evaluation.of(Positions(*map(torch.cat, zip(*parts, strict=True))), True) for parts in found)
    size = partial(kv_token_bytes, decoder.config, itemsize=decoder.dtype.itemsize)
    return KVCacheMeasurement(windows, results, size(UNCOMPRESSED), tuple(map(size, schemes)))


@torch.inference_mode()
def _score(
    decoder: ServedModel, tokens: Tensor, schemes: Sequence[KVCacheScheme], on_pass: Callable[[], None]
) -> list[Positions]:
    """Scores one window `[1, T]` with each form, a slice of logits at a time: long windows of large vocabularies would
    not fit otherwise. Calls `on_pass` after each pass over the window."""
    from runtime.model.scoring import hidden_states

    exact = hidden_states(decoder, tokens)
    on_pass()
    size = max(1, BATCH_LOGITS // decoder.config.vocab_size)
    parts: list[list[Positions]] = []
    for scheme in schemes:
        hidden = hidden_states(decoder, tokens, scheme)
        parts.append([])
        for begin in range(0, tokens.shape[1] - 1, size):
            end = min(begin + size, tokens.shape[1] - 1)
            logp, reference = (
                log_probabilities(decoder.logits(states[0, begin:end]).unsqueeze(0), "the model")
                for states in (hidden, exact)
            )
            parts[-1].append(compare_positions(logp, reference, tokens[:, begin : end + 1]))
        on_pass()
    return [Positions(*(torch.cat(each, -1) for each in zip(*slices, strict=True))) for slices in parts]
