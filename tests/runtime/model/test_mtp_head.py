"""Heads of multi-token prediction against plain torch, with their block computed by transformers."""

import pytest
import torch
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from tiny_mtp import FAMILIES, PlainHead, save_mtp_model

from compress.common.errors import ToolkitError
from runtime.model.loader import load_model
from runtime.model.mtp import load_head
from runtime.model.scoring import head_states, hidden_states

TOKENS = torch.randint(0, 112, (1, 30), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "qwen3_next" else pytest.mark.full) for name in FAMILIES]
)
@torch.inference_mode()
def test_states_in_float64(family, tmp_path) -> None:
    """The first prediction, and the second one from what the first leaves."""
    folder = save_mtp_model(tmp_path / "model", family)
    plain = PlainHead.load(folder, family)
    target = load_model(folder, dtype="float64")
    head = load_head(folder, target)
    hidden = target.final_norm(hidden_states(target, TOKENS)[0])
    wanted = plain.hidden(TOKENS)
    torch.testing.assert_close(hidden, wanted[0], rtol=0, atol=1e-10)

    for tokens in (TOKENS[:, 1:], TOKENS[:, 2:]):
        length = tokens.shape[1]
        hidden, wanted = hidden[:length], wanted[:, :length]
        found = head_states(head, tokens[0], hidden)
        expected = plain.states(tokens, wanted)
        torch.testing.assert_close(head.decoder.logits(found), plain.logits(expected)[0], rtol=0, atol=1e-10)
        hidden, wanted = head.feedback(found), plain.normed(expected) if head.spec.feeds_normed else expected


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_a_model_without_a_head(family, tmp_path) -> None:
    folder = save_tiny_model(tmp_path / family, family, **VARIANTS[family])
    with pytest.raises(ToolkitError) as caught:
        load_head(folder, load_model(folder, dtype="float64"))
    assert "--speculative-model ngram" in caught.value.remedy
