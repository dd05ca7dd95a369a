"""Where a killed run continues from: one file with the state of model and optimizers, written whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn import Module
from torch.optim import Optimizer

from compress.common.files import atomic_file


@dataclass
class Progress:
    """Progress of a run. The data position follows from `step`."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, mean loss since the last entry)


Parts = Sequence[Module | Optimizer]


def save(folder: Path, progress: Progress, settings: dict[str, object], parts: Parts) -> None:
    """Writes `folder/step-N.pt`, then drops the older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    states = [part.state_dict() for part in parts]
    with atomic_file(folder / f"step-{progress.step:08d}.pt") as stream:
        torch.save({"progress": asdict(progress), "settings": settings, "states": states}, stream)
    for old in _finished(folder)[:-1]:
        old.unlink()


def restore(folder: Path, settings: dict[str, object], parts: Parts) -> Progress:
    """Loads the newest snapshot into model and optimizers; a fresh `Progress` when there is none."""
    found = _finished(folder)
    if not found:
        return Progress()
    saved = torch.load(found[-1], weights_only=True)
    changed = {k: (saved["settings"].get(k), v) for k, v in settings.items() if saved["settings"].get(k) != v}
    if changed:
        raise ValueError(f"{folder} holds a run with other settings {changed}: use --no-resume or another --out")
    for part, state in zip(parts, saved["states"], strict=True):
        part.load_state_dict(state)
    return Progress(**saved["progress"])


def _finished(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))
