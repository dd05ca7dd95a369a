"""`--backend transformers` computes what `--backend runtime` computes: names it converts, buffers, experts."""

from pathlib import Path

import pytest
import torch
from covering import sample
from tiny_configs import MIXTURES, VARIANTS
from tiny_models import load_reference, pack_model, reference_logits, save_tiny_model

from compress.checkpoint.config import read_config
from compress.checkpoint.weights import Int
from compress.evaluate.scorers import RuntimeScorer, TransformersScorer
from compress.models.registry import FAMILIES
from runtime.core.model_config import parse_config

TOKENS = torch.randint(3, 112, (2, 40), generator=torch.Generator().manual_seed(3))
ORDER = [*sorted(MIXTURES), *sorted(set(FAMILIES) - MIXTURES)]


@pytest.mark.parametrize("family", sample(ORDER, quick=2))
def test_logits_of_a_packed_checkpoint(family: str, tmp_path: Path) -> None:
    dense, packed = save_tiny_model(tmp_path / "dense", family, **VARIANTS[family]), tmp_path / "packed"
    compressed = {linear.name for linear in parse_config(read_config(dense)).spec.linears()}
    assert pack_model(dense, packed, lambda module: Int(4, 16) if module in compressed else None)
    expected = RuntimeScorer(packed, dtype="float64").logits(TOKENS)
    found = TransformersScorer(packed, dtype="float64").logits(TOKENS)
    assert expected.std() > 0.1
    # Norms and routers of transformers are float32 in a float64 model, and so are all logits of some.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3 * float(expected.std()))


@pytest.mark.parametrize("family", sample(ORDER, quick=2))
def test_logits_of_a_dense_checkpoint(family: str, tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", family, **VARIANTS[family])
    found = TransformersScorer(dense, dtype="float64").logits(TOKENS)
    assert torch.equal(found, reference_logits(load_reference(dense, exact=False), TOKENS))
