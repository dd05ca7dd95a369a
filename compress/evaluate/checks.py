"""Checks of an evaluation text against the calibration text: overlap and domain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibration.parts import Part
from calibration.sequences import SequenceSet, load_tokenizer, overlap, pack_parts
from calibration.sources import NAMED_SOURCES
from compress.common.errors import DataError
from compress.common.evaluation import Evaluation
from compress.common.files import in_home
from compress.common.tokenizer_file import TOKENIZER_FILE
from compress.evaluate.perplexity import Windows, evaluate
from compress.evaluate.scorers import Scorer

# Larger texts, and datasets that would be downloaded, are not read again: the check stays near a second.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SeenText:
    """The calibration text of a checkpoint.

    Attributes:
        hashes: of the text, and of every part of a mixture.
        tokens: int64 `[N, L]`, the sequences whose text is available; None where none is.
    """

    name: str
    hashes: frozenset[str]
    tokens: Tensor | None

    @classmethod
    def of(cls, sequences: SequenceSet) -> SeenText:
        """Wraps the sequences of the current run."""
        hashes = frozenset((sequences.sha256, *(part.sha256 for part in sequences.parts)))
        return cls(sequences.source, hashes, sequences.tokens)

    @classmethod
    def recorded(cls, compression: Mapping[str, Any], tokenizer: Any) -> SeenText | None:
        """Packs the text that a checkpoint records again; None when it records none.

        Text that the model wrote, datasets, and text that is missing or has changed are not packed again.
        `compression`: `compression_config` of the checkpoint; its `calibration` block names text, samples and seed.
        """
        calibration = compression.get("calibration") or {}
        if not isinstance(calibration.get("source"), str):
            return None
        single = {key: calibration.get(key) for key in ("source", "sha256")} | {"sequences": calibration.get("samples")}
        records = calibration.get("parts") or [single]
        length, seed = calibration.get("length"), compression.get("seed", 0)
        found = list(_packed_again(records, length, seed, tokenizer)) if length else []
        hashes = frozenset(record["sha256"] for record in (calibration, *records) if record.get("sha256"))
        return cls(calibration["source"], hashes, torch.cat(found) if found else None)


def _packed_again(records: list[dict[str, Any]], length: int, seed: int, tokenizer: Any) -> Iterator[Tensor]:
    for record in records:
        if not record.get("sequences") or not _is_available(record["source"]):
            continue
        part = Part(record["source"])
        try:
            again = pack_parts((part,), tokenizer, samples=record["sequences"], length=length, seed=seed)
        except DataError:
            continue  # The text has changed since.
        if again.sha256 == record["sha256"]:
            yield again.tokens


def _is_available(source: str) -> bool:
    path = in_home(source)
    return source in NAMED_SOURCES or (path.exists() and _size(path) <= _MAX_BYTES)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


MAX_RATIO = 2.5
"""Ordinary texts differ by less than 2 times, gibberish or a foreign script by 3 times or more."""

_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Domain:
    """Loss of one model on two texts, in bits per byte: tokens of different texts have different lengths.

    Attributes:
        calibration: of the first calibration sequences, about 4096 tokens.
        data: of the evaluation text.
    """

    calibration: float
    data: float

    def warnings(self, name: str, data: str) -> tuple[str, ...]:
        """Warns when the calibration text `name` is predicted far worse than the evaluation text `data`."""
        if self.calibration <= MAX_RATIO * self.data:
            return ()
        return (
            f"the dense model needs {self.calibration:.2f} bits per byte for its calibration text {name} and "
            f"{self.data:.2f} for {data}: that text is off the model's domain; calibrate on text like what it will see",
        )


def domain_sample(seen: SeenText | None) -> Windows | None:
    """Takes some of the calibration text; None where it is not available."""
    if seen is None or seen.tokens is None:
        return None
    tokens = seen.tokens[: max(1, _TOKENS // seen.tokens.shape[1])]
    return Windows(tokens, "calibration sequences as they are", seen.name, "")


def compare_domains(scorer: Scorer, sample: Windows, windows: Windows, result: Evaluation, tokenizer: Any) -> Domain:
    """Scores some of the calibration text.

    Args:
        scorer: the baseline, or the model where there is none.
        result: evaluation of the scorer on `windows`.
    """
    measured = result.baseline_perplexity or result.perplexity
    return Domain(
        math.log2(evaluate(scorer, sample).perplexity) / _bytes_per_token(sample.tokens, tokenizer),
        math.log2(measured) / _bytes_per_token(windows.tokens, tokenizer),
    )


def _bytes_per_token(tokens: Tensor, tokenizer: Any) -> float:
    rows = tokens[: max(1, _TOKENS // tokens.shape[1])]
    num_bytes = sum(len(tokenizer.decode(row, skip_special_tokens=True).encode()) for row in rows)
    return max(num_bytes, 1) / rows.numel()


def check_same_tokens(windows: Windows, tokenizer: Any, other: Path) -> None:
    """Raises DataError: tokens of the text mean others to the tokenizer in a folder, if it has one."""
    if not Path(other, TOKENIZER_FILE).exists():
        return
    used = windows.tokens.unique().tolist()
    pairs = zip(*(each.convert_ids_to_tokens(used) for each in (tokenizer, load_tokenizer(other))), strict=True)
    if differing := sum(first != second for first, second in pairs):
        raise DataError(
            f"{differing} of the {len(used)} tokens of the text are others in the vocabulary of {other}",
            "Compare models that have the same tokenizer",
        )


MAX_SHARE = 0.01


def shared_spans(seen: SeenText | None, windows: Windows) -> float | None:
    """Returns the share of the windows' 32-token spans in the calibration sequences; None without sequences."""
    return None if seen is None or seen.tokens is None else overlap(windows.tokens, seen.tokens)


def overlap_warning(share: float | None, seen: SeenText | None, windows: Windows) -> tuple[str, ...]:
    """Warns when both texts are the same, or more than `MAX_SHARE` of the evaluation text was calibrated on."""
    if seen is None:
        return ()
    flatter = "the figures flatter this checkpoint"
    if windows.sha256 in seen.hashes:
        amount = "" if share is None else f" ({100 * share:.1f} % of what is measured was in its sequences)"
        return (f"{windows.source} is also the calibration text of this checkpoint{amount}: {flatter}",)
    if share is None or share <= MAX_SHARE:
        return ()
    return (f"{100 * share:.1f} % of {windows.source} was also in the calibration text {seen.name}: {flatter}",)
