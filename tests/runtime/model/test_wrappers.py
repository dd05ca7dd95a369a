"""Text models of multimodal checkpoints: served as they are published, under the names of both layouts."""

from pathlib import Path

import pytest
import torch
from folders import change_tensors
from tiny_models import compute_in_float64, reference_logits
from tiny_wrappers import WRAPPERS, load_wrapper, save_tiny_wrapper

from compress.checkpoint.reader import PackedCheckpoint
from compress.models.registry import known_wrappers
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(3, 112, (2, 40), generator=torch.Generator().manual_seed(3))


def test_every_wrapper_has_a_tiny_model() -> None:
    assert set(known_wrappers()) == set(WRAPPERS)


def exchange_layout(folder: Path) -> None:
    """Stores the text model under the names that transformers before 4.52 wrote, or those since."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        old, new = "language_model.model.", "model.language_model."
        is_old = any(name.startswith(old) for name in tensors)
        for name in list(tensors):
            before, after = (old, new) if is_old else (new, old)
            renamed = name.replace(before, after) if name.startswith(before) else name
            renamed = renamed.removeprefix("language_model.") if is_old and "lm_head" in name else renamed
            renamed = f"language_model.{name}" if not is_old and name.startswith("lm_head") else renamed
            tensors[renamed] = tensors.pop(name)

    change_tensors(folder, rename)


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_logits_in_float64(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny_wrapper(tmp_path / "model", model_type)
    expected = reference_logits(compute_in_float64(load_wrapper(folder, torch.float64)), TOKENS)
    assert expected.std() > 0.5
    for _ in range(2):
        found = score(load_model(folder, dtype="float64"), TOKENS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        others = PackedCheckpoint.open(folder).files.other_parts
        assert others
        assert all("vi" in name or "projector" in name for name in others), others
        exchange_layout(folder)
