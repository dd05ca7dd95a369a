"""Every field of a configuration class that changes transformers' logits changes the runtime's alike, or is refused."""

from pathlib import Path

import pytest
import torch
from config_changes import Change, changes
from tiny_configs import SIZES, VARIANTS
from tiny_models import load_reference, reference_logits, save_tiny_model
from torch import Tensor

from compress.common.errors import CheckpointError
from compress.models.registry import FAMILIES
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (1, 60), generator=torch.Generator().manual_seed(3))

NEEDED = dict.fromkeys(("granitemoehybrid", "kimi_linear", "lfm2_moe"), ("layer_types",))
"""Fields without which a class makes no model."""
UNDECIDED: tuple[Change, ...] = ({"index_n_heads": 1},)
"""Changes that make scores of many tokens equal: which ones transformers chooses depends on the length of the text."""


def expected_logits(folder: Path, family: str, options: Change) -> Tensor | None:
    """Logits of transformers; None where the options make no model, or one without finite logits."""
    try:
        logits = reference_logits(load_reference(save_tiny_model(folder, family, **options)), TOKENS)
    except Exception:  # of any class: values that make no model fail anywhere
        return None
    return logits if logits.isfinite().all() else None


def found_logits(folder: Path) -> Tensor | None:
    """Logits of the runtime; None where it refuses the checkpoint."""
    try:
        return score(load_model(folder, dtype="float64"), TOKENS)
    except CheckpointError:
        return None


def differing_changes(folder: Path, family: str, options: Change) -> tuple[int, list[Change]]:
    """Number of changes that were compared, and those of other logits."""
    compared, wrong = 0, []
    decided = (change for change in changes(family, SIZES | options) if change not in UNDECIDED)
    for number, change in enumerate(decided):
        case = folder / str(number)
        expected = expected_logits(case, family, options | change)
        found = None if expected is None else found_logits(case)
        if expected is not None and found is not None:
            compared += 1
            close = torch.allclose(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max() + 1))
            wrong += [] if close else [change]
    return compared, wrong


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_features", [True, False])
def test_a_change_of_one_field(family: str, has_features: bool, tmp_path: Path) -> None:
    options = VARIANTS[family]
    if not has_features:
        options = {
            name: value for name, value in options.items() if type(value) is int or name in NEEDED.get(family, ())
        }
    compared, wrong = differing_changes(tmp_path, family, options)
    assert not wrong
    assert compared > len(SIZES)
