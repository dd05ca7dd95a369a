"""Where the bundled models live. They are what every command uses when no model is named."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

DEMO_NAME = "bundled demo model"
DEMO_SOURCE = "demo"
"""How `compression_config.source` names it: the folder differs from machine to machine."""


def demo_model_path() -> Path:
    """Folder of the bundled demo model, a dense Hugging Face checkpoint."""
    return Path(str(files("compress") / "demo_model"))


def draft_model_path() -> Path:
    """Folder of the much smaller model with the same tokenizer."""
    return Path(str(files("compress") / "demo_model_draft"))
