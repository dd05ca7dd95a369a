"""Loss of quality by quantized keys and values: one checkpoint scored with each form and with a 16-bit cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from calibration.sequences import check_token_ids, load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.config import read_config
from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.common.errors import ToolkitError
from compress.common.evaluation import Evaluation
from compress.evaluate.perplexity import Windows, cut_windows, score_positions
from compress.evaluate.positions import summarize
from compress.evaluate.scorers import RuntimeScorer


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
    """Checks before a run that the runtime serves this model and that it fits into memory. Raises CheckpointError: it
    does neither."""
    from compress.common.device import require_memory, resolve_device
    from runtime.core.model_config import parse_config

    if not parse_config(config).spec.attentions:
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
    """Scores windows of a text with each form of keys and values. Raises ToolkitError: a path or text that cannot be
    used; NumericsError: logits that are not finite.

    Args:
        tokens, length: tokens of the text and of a window; one window at least.
        on_progress: called with (windows done, windows in all).
    """
    from runtime.memory.estimate import kv_token_bytes

    windows = measured_windows(path, data=data, tokens=tokens, length=length)
    exact = RuntimeScorer(path, device=device)
    scored = score_positions(list(map(exact.reading, schemes)), windows, exact, on_progress)
    results = tuple(summarize(positions, True) for positions in scored)
    size = partial(kv_token_bytes, exact.decoder.config, itemsize=exact.decoder.dtype.itemsize)
    return KVCacheMeasurement(windows, results, size(UNCOMPRESSED), tuple(map(size, schemes)))
