"""Text that a model writes: exactly as long as asked for, packed, the same for a seed, and drawn from the model."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from calibration.sources import sample_sequences
from compress.common.errors import NumericsError

VOCABULARY = 12


def no_prompts(count: int) -> Tensor:
    return torch.empty(count, 0, dtype=torch.int64)


class Chain:
    """A model whose next token depends on the last one alone: it repeats it or adds one, with known odds."""

    device = torch.device("cpu")
    config = SimpleNamespace(vocab_size=VOCABULARY)

    def __call__(self, tokens: Tensor, use_cache: bool, cache: object = None) -> SimpleNamespace:
        logits = torch.full((*tokens.shape, VOCABULARY), -torch.inf)
        logits.scatter_(-1, tokens.unsqueeze(-1), 0.0)
        logits.scatter_(-1, ((tokens + 1) % VOCABULARY).unsqueeze(-1), torch.log(torch.tensor(3.0)).item())
        return SimpleNamespace(logits=logits.clamp(min=-1e9), cache=cache)


def test_tokens_follow_the_model_at_temperature_1():
    tokens = sample_sequences(Chain(), no_prompts(40), 200, start=0)
    assert tokens.shape == (40, 200)
    assert (tokens[:, 0] == 0).all()
    steps = tokens.diff() % VOCABULARY
    assert set(steps.unique().tolist()) == {0, 1}
    assert steps.float().mean().item() == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("start", [0, None])
def test_a_prompt_is_continued(start: int | None):
    prompts = torch.tensor([[3, 9, 5], [8, 1, 2], [4, 4, 7]])
    tokens = sample_sequences(Chain(), prompts, 40, start=start, ends={7}, batch=2)
    assert tokens.shape == (3, 40)
    known = prompts if start is None else torch.tensor([[0, 3, 9, 5], [0, 8, 1, 2], [0, 4, 4, 0]])
    assert tokens[:, : known.shape[1]].equal(known)
    steps = tokens[:, known.shape[1] - 1 :].diff() % VOCABULARY
    assert set(steps.unique().tolist()) <= {0, 1, VOCABULARY - 6}
    assert len({tuple(row) for row in tokens.tolist()}) == 3


def test_after_an_end_a_new_text_begins():
    tokens = sample_sequences(Chain(), no_prompts(8), 300, start=0, ends={5, 7})
    assert not (tokens == 5).any()
    assert tokens.max() == 4
    assert (tokens == 0).sum() > 8 * 2


def test_seed_decides_and_batches_are_not_alike():
    first, again, other = (
        sample_sequences(Chain(), no_prompts(6), 50, start=0, seed=seed, batch=2) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) == 6


def test_without_a_start_token_the_first_is_any():
    tokens = sample_sequences(Chain(), no_prompts(100), 2, start=None)
    assert set(tokens[:, 0].tolist()) == set(range(VOCABULARY))


def test_progress_goes_up_to_all_tokens():
    seen = []
    sample_sequences(
        Chain(), no_prompts(5), 4, start=0, batch=2, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (20, 20)


def test_a_broken_model_is_refused():
    class Broken(Chain):
        def __call__(self, tokens: Tensor, use_cache: bool, cache: object = None) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.full((*tokens.shape, VOCABULARY), torch.nan), cache=None)

    with pytest.raises(NumericsError, match=r"\bNaN\b.*\bself\b"):
        sample_sequences(Broken(), no_prompts(1), 4, start=0)


def test_a_cache_gives_what_a_model_without_one_would():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).double().eval()

    class Forgetful:
        device, config = torch.device("cpu"), model.config
        seen = torch.empty(3, 0, dtype=torch.int64)

        def __call__(self, tokens: Tensor, use_cache: bool, cache: object = None) -> SimpleNamespace:
            self.seen = torch.cat([self.seen, tokens], dim=1)
            return SimpleNamespace(logits=model(self.seen, use_cache=False).logits, cache=None)

    assert torch.equal(
        sample_sequences(model, no_prompts(3), 20, start=1), sample_sequences(Forgetful(), no_prompts(3), 20, start=1)
    )
