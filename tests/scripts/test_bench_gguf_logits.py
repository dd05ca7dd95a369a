"""The comparison with llama.cpp's logits: importance of inputs, and greedy texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from calibration.sequences import load_tokenizer, pack_sequences
from calibration.sources import load_texts
from compress.common.cli import demo_model_path
from compress.recipe import CalibrationOptions


class FixedTokens:
    """Continues every prompt with the same tokens, and ranks each of these first."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def continue_greedily(self, prompt: list[int], count: int) -> list[int]:
        return [*prompt, *self.tokens[:count]]

    def logits(self, tokens: Tensor) -> Tensor:
        prompt = tokens.shape[1] - len(self.tokens)
        chosen = torch.tensor([0] * (prompt - 1) + self.tokens + [0])
        return torch.nn.functional.one_hot(chosen, 8).float().unsqueeze(0)


@pytest.mark.full
def test_greedy_texts_are_compared_up_to_the_first_different_token() -> None:
    import bench_gguf_logits as bench

    theirs = [1, 2] * (bench.CONTINUED // 2)
    ours = [*theirs[:5], 7, *theirs[6:]]
    prompt = [3] * bench.PROMPT
    same = bench._Text.of(FixedTokens(theirs), FixedTokens(theirs), prompt)
    assert (same.same_tokens, same.is_same) == (bench.CONTINUED, True)
    other = bench._Text.of(FixedTokens(theirs), FixedTokens(ours), prompt)
    assert (other.same_tokens, other.is_same) == (5, False)


@pytest.mark.full
def test_importance_is_the_mean_square_of_each_input() -> None:
    from benchmarking.llama import importance_matrix
    from transformers import AutoModelForCausalLM

    model = demo_model_path()
    found = importance_matrix(model, CalibrationOptions(samples=2, length=32))
    assert torch.equal(found["blk.0.attn_q.weight"], found["blk.0.attn_v.weight"])
    assert "token_embd.weight" not in found
    tokens = pack_sequences(load_texts("bundled"), load_tokenizer(model), samples=2, length=32).tokens
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = reference.model.layers[0].input_layernorm(reference.model.embed_tokens(tokens)).detach()
    torch.testing.assert_close(found["blk.0.attn_q.weight"], inputs.square().mean((0, 1)), rtol=1e-4, atol=1e-6)
    assert found["blk.1.ffn_down.weight"].shape == (reference.config.intermediate_size,)
