"""Where a killed run continues from: tensors as safetensors and the rest as JSON, in one atomically renamed folder."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from compress.common.files import sync
from demo_training.optimizer import MuonAdam


@dataclass
class Progress:
    """Progress of a run. The data position follows from `step`."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, mean loss since the last entry)


def save(folder: Path, progress: Progress, settings: dict[str, object], optimizer: MuonAdam) -> None:
    """Write `folder/step-N` whole or not at all, then drop the older ones."""
    final = folder / f"step-{progress.step:08d}"
    if final.exists():
        return
    partial = final.with_suffix(".partial")
    for left_over in folder.glob("*.partial"):
        shutil.rmtree(left_over)
    partial.mkdir(parents=True)
    weights = {f"weight.{name}": p.detach() for name, p in optimizer.params.items()}
    save_file(weights | optimizer.state, partial / "tensors.safetensors")
    (partial / "state.json").write_text(json.dumps({"progress": asdict(progress), "settings": settings}))
    for path in (*partial.iterdir(), partial):
        sync(path)
    os.replace(partial, final)
    for old in _finished(folder)[:-1]:
        shutil.rmtree(old)


def restore(folder: Path, settings: dict[str, object], optimizer: MuonAdam) -> Progress:
    """Load the newest snapshot into the parameters and the optimizer; a fresh `Progress` when there is none."""
    found = _finished(folder)
    if not found:
        return Progress()
    saved = json.loads((found[-1] / "state.json").read_text())
    changed = {k: (saved["settings"].get(k), v) for k, v in settings.items() if saved["settings"].get(k) != v}
    if changed:
        raise ValueError(f"{folder} holds a run with other settings {changed}: use --no-resume or another --out")
    tensors = load_file(found[-1] / "tensors.safetensors")
    with torch.no_grad():
        for name, parameter in optimizer.params.items():
            parameter.copy_(tensors[f"weight.{name}"])
        for name, tensor in optimizer.state.items():
            tensor.copy_(tensors[name])
    return Progress(**saved["progress"])


def _finished(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if p.suffix != ".partial")
