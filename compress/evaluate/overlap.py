"""Whether a checkpoint was calibrated on the text it is measured with: such figures flatter it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibration.sequences import overlap, pack_sequences
from calibration.sources import NAMED_SOURCES, load_texts
from compress.checkpoint.errors import DataError
from compress.evaluate.windows import Windows

MAX_SHARE = 0.01
# Larger texts and datasets that would be fetched again are only compared by their hash: the check stays near a second.
_MAX_BYTES = 16 << 20


def calibration_overlap(compression: Mapping[str, Any], windows: Windows, tokenizer: Any) -> tuple[str, ...]:
    """A warning when more than `MAX_SHARE` of the windows' 32-token spans were in the calibration sequences.

    Args:
        compression: `compression_config` of the checkpoint; its `calibration` block names text, samples and seed.
    """
    calibration = compression.get("calibration") or {}
    if calibration.get("sha256") == windows.sha256:
        return (f"{windows.source} is also the calibration text of this checkpoint: the figures flatter it",)
    share = _shared_spans(calibration, compression.get("seed", 0), windows, tokenizer)
    if share <= MAX_SHARE:
        return ()
    return (
        f"{100 * share:.1f} % of {windows.source} was also in the calibration text {calibration['source']}: "
        "the figures flatter this checkpoint",
    )


def _shared_spans(calibration: Mapping[str, Any], seed: int, windows: Windows, tokenizer: Any) -> float:
    """The share of evaluation spans that calibration saw; 0 when its text is not at hand any more."""
    source, samples, length = (calibration.get(key) for key in ("source", "samples", "length"))
    if not (samples and length and isinstance(source, str) and _is_at_hand(source)):
        return 0.0
    try:
        seen = pack_sequences(load_texts(source), tokenizer, samples=samples, length=length, seed=seed)
    except DataError:
        return 0.0  # The text has changed since; nothing can be said about it.
    return overlap(windows.tokens, seen.tokens)


def _is_at_hand(source: str) -> bool:
    return source in NAMED_SOURCES or (Path(source).is_file() and Path(source).stat().st_size <= _MAX_BYTES)
