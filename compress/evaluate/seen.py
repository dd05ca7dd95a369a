"""The text that a checkpoint was calibrated on, as far as it can be had again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibration.mixture import pack_parts
from calibration.parts import Part
from calibration.sequences import SequenceSet
from calibration.sources import NAMED_SOURCES
from compress.checkpoint.errors import DataError

# Larger texts, and datasets that would be fetched again, are not read again: that stays near a second.
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SeenText:
    """What calibration saw.

    Attributes:
        name: the calibration text or mixture as the user wrote it.
        hashes: of the text, and of every part of a mixture.
        tokens: int64 `[N, L]`, the sequences; of a mixture those that are at hand. None where none are.
    """

    name: str
    hashes: frozenset[str]
    tokens: Tensor | None

    @classmethod
    def of(cls, sequences: SequenceSet) -> SeenText:
        """What a run has just calibrated on."""
        hashes = frozenset((sequences.sha256, *(part.sha256 for part in sequences.parts)))
        return cls(sequences.source, hashes, sequences.tokens)

    @classmethod
    def recorded(cls, compression: Mapping[str, Any], tokenizer: Any) -> SeenText | None:
        """What a checkpoint says of its calibration, packed again from that text; None when it says nothing.

        Text that the model wrote, datasets, and text that is gone or has changed cannot be packed again.

        Args:
            compression: `compression_config` of the checkpoint; its `calibration` block names text, samples and seed.
        """
        calibration = compression.get("calibration") or {}
        if not isinstance(calibration.get("source"), str):
            return None
        records = _records(calibration)
        length, seed = calibration.get("length"), compression.get("seed", 0)
        found = list(_packed_again(records, length, seed, tokenizer)) if length else []
        hashes = frozenset(record["sha256"] for record in (calibration, *records) if record.get("sha256"))
        return cls(calibration["source"], hashes, torch.cat(found) if found else None)


def _records(calibration: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Source, hash and number of sequences of every part; of a single text, which has no parts, of itself."""
    single = {key: calibration.get(key) for key in ("source", "sha256")} | {"sequences": calibration.get("samples")}
    return calibration.get("parts") or [single]


def _packed_again(records: list[dict[str, Any]], length: int, seed: int, tokenizer: Any) -> Iterator[Tensor]:
    for record in records:
        if not record.get("sequences") or not _is_at_hand(record["source"]):
            continue
        part = Part(record["source"])
        try:
            again = pack_parts((part,), tokenizer, samples=record["sequences"], length=length, seed=seed)
        except DataError:
            continue  # The text has changed since; nothing can be said about it.
        if again.sha256 == record["sha256"]:
            yield again.tokens


def _is_at_hand(source: str) -> bool:
    path = Path(source).expanduser()
    return source in NAMED_SOURCES or (path.exists() and _size(path) <= _MAX_BYTES)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
