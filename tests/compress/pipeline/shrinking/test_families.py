"""Models that are left compute the same here and in transformers, or the run is refused."""

from pathlib import Path

import pytest
import torch
from runs import compress
from tiny_configs import MIXTURES
from tiny_models import load_reference, reference_logits

from compress.common.errors import ToolkitError
from compress.models.registry import FAMILIES
from compress.stages.shrink import ShrinkStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

STAGES = {
    "blocks": ShrinkStage(blocks=1, block_score="influence"),
    "heads": ShrinkStage(heads=1),
    "channels": ShrinkStage(channels=0.25, channel_multiple=32),
    "experts": ShrinkStage(experts=4),
}
REFUSED = {
    # Keys shared by layers, selected tokens, and decays or scales that depend on the number of the layer.
    "blocks": {"gemma4_text", "glm_moe_dsa", "minicpm3", "minimax"},
    # Norms over all heads at once, several head counts, no attention, and sizes that transformers refuses.
    "heads": {
        "deepseek_v2",
        "gemma4_text",
        "mamba2",
        "minicpm3",
        "minimax",
        "minimax_m2",
        "olmo2",
        "olmo3",
        "olmoe",
    },
    # Mixtures alone, sizes that experts share, and those that config.json does not say.
    "channels": {
        "gemma4_text",
        "gpt_oss",
        "granitemoe",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "mamba2",
        "minimax",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen3_5_moe_text",
        "qwen3_moe",
    },
    "experts": set(),
}
GROUPED = {
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "kimi_linear",
    "mistral4",
    "nemotron_h",
}
"""Families with groups of experts, all of which keep as many."""
QUICK = {("llama", "heads"), ("gemma2", "blocks"), ("qwen3_moe", "experts"), ("deepseek_v3", "heads")}
CASES = [
    pytest.param(family, kind, marks=[pytest.mark.full] * ((family, kind) not in QUICK))
    for kind in STAGES
    for family in sorted(FAMILIES)
    if kind != "experts" or family in MIXTURES
]
FIRST = 10
"""First token whose logits are compared: transformers zeros the row of the pad token in some models."""
TOKENS = torch.randint(FIRST, 8000, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_are_those_of_transformers_or_it_is_refused(tiny_model, tmp_path: Path, family: str, kind: str) -> None:
    more = {"n_routed_experts": 16, "num_experts": 16} if kind == "experts" and family in GROUPED else {}
    source, out = tiny_model(family, torch.float32, **more), tmp_path / "out"
    if family in REFUSED[kind]:
        with pytest.raises(ToolkitError):
            compress(source, out, STAGES[kind])
        assert not [*tmp_path.iterdir()]
        return
    assert compress(source, out, STAGES[kind]).structure.ok
    expected = reference_logits(load_reference(out), TOKENS)[..., FIRST:]
    served = score(load_model(out, dtype="float64"), TOKENS)[..., FIRST:]
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-9 * float(expected.std() + 1))
