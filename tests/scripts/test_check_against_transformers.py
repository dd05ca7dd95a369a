"""The check of a user's checkpoint: equal logits, a difference that is told, a refusal."""

from pathlib import Path

import pytest
import torch
from folders import change_config
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from compress.common.cli import demo_model_path


def test_the_demo_model_is_computed_alike(capsys: pytest.CaptureFixture[str]) -> None:
    from check_against_transformers import main

    assert main([str(demo_model_path()), "--tokens", "24"]) == 0
    assert "2 layers, 24 tokens, float32" in capsys.readouterr().out


def test_lists_by_layer_are_cut(tmp_path: Path) -> None:
    from check_against_transformers import copy_first_layers, main

    folder = save_tiny_model(tmp_path / "model", "gemma3_text", **VARIANTS["gemma3_text"])
    short = copy_first_layers(folder, tmp_path / "short", 1)
    assert (short / "model.safetensors").stat().st_size < (folder / "model.safetensors").stat().st_size
    assert main([str(folder), "--layers", "1", "--dtype", "float64"]) == 0


def test_a_difference_and_a_refusal_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import check_against_transformers as script

    folder = save_tiny_model(tmp_path / "model")
    scorer = script.open_scorer

    def half(checkpoint: Path, backend: str, **options: str) -> object:
        found = scorer(checkpoint, backend, **options)
        return found if backend == "runtime" else _Half(found)

    monkeypatch.setattr(script, "open_scorer", half)
    assert script.main([str(folder)]) == 1
    assert script.main([str(change_config(folder, hidden_act="tanh"))]) == 2


class _Half:
    def __init__(self, scorer: object) -> None:
        self.scorer = scorer

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scorer.logits(tokens) / 2
