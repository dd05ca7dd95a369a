"""Latent attention: absorbed and expanded, over pages of every form, packed, and what it takes of memory."""

from pathlib import Path

import pytest
import torch
from engines import answer_all, small_engine
from folders import change_config
from runs import foreseen_bytes
from tiny_configs import VARIANTS
from tiny_models import load_reference, pack_model, put_weights, reference_logits, save_tiny_model
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.weights import BlockFp8, Int, Scheme
from compress.common.errors import CheckpointError, ToolkitError
from runtime.backends import latent
from runtime.backends.latent import LatentHeads, expands
from runtime.core.model_config import DecoderConfig, parse_config
from runtime.core.request import SamplingParams
from runtime.memory.estimate import kv_token_bytes
from runtime.model.loader import load_model
from runtime.model.scoring import score

DEEPSEEK = {"own": 128, "rotated": 64, "value_dim": 128, "rank": 512}
OWN, ROTATED, VALUE, RANK, HEADS = 12, 8, 20, 24, 4
TOKENS = torch.randint(0, 112, (1, 40), generator=torch.Generator().manual_seed(3))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def random_heads(value_dim: int = VALUE) -> LatentHeads:
    key, value = torch.randn(HEADS, OWN, RANK), torch.randn(HEADS, value_dim, RANK)
    return LatentHeads(key.double(), value.double(), (OWN + ROTATED) ** -0.5)


def attended(heads: LatentHeads, query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """Values `[n, heads, V]` of the last n tokens, by the definition."""
    own, value = (torch.einsum("lr,hdr->hld", rows[:, 0], weight) for weight in (heads.key, heads.value))
    keys = torch.cat((own, key.transpose(0, 1).expand(HEADS, -1, -1)), -1)
    scores = torch.einsum("nhd,hld->hnl", query, keys) * heads.scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(key) - len(query))
    return torch.einsum("hnl,hld->nhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize(("num_queries", "is_expanded"), [(3, False), (33, True), (40, True)])
@pytest.mark.parametrize("value_dim", [VALUE, 24])
def test_a_span_by_either_way(num_queries: int, is_expanded: bool, value_dim: int, monkeypatch) -> None:
    monkeypatch.setattr(latent, "EXPANDED_NUMBERS", 3 * 40 * 24)
    heads, key, rows = random_heads(value_dim), torch.randn(40, 1, ROTATED), torch.randn(40, 1, RANK)
    query = torch.randn(num_queries, HEADS, OWN + ROTATED).double()
    assert expands(num_queries, 40, OWN, ROTATED, value_dim, RANK) == is_expanded
    mask = (
        torch.zeros(num_queries, 40)
        .double()
        .masked_fill(torch.ones(num_queries, 40, dtype=torch.bool).triu(41 - num_queries), float("-inf"))
    )
    expected = attended(heads, query, key.double(), rows.double())
    for each in (mask, None)[: 1 + (num_queries == 40)]:
        found = heads.attend_span(query, key.double(), rows.double(), each)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_single_tokens_of_several_sequences() -> None:
    heads, keys, rows = random_heads(), torch.randn(3, 9, 1, ROTATED), torch.randn(3, 9, 1, RANK)
    query = torch.randn(3, HEADS, OWN + ROTATED).double()
    expected = [attended(heads, query[i : i + 1], keys[i].double(), rows[i].double()) for i in range(3)]
    found = heads.attend_tokens(query, keys.double(), rows.double(), None)
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-12)


def test_the_way_with_fewer_multiplications_is_taken() -> None:
    """In the shape of DeepSeek a span of a long text pays its expansion from about 170 tokens on."""
    assert not expands(1, 2, **DEEPSEEK)
    assert not expands(17, 100_000, **DEEPSEEK)
    assert expands(512, 512, **DEEPSEEK)
    assert expands(2048, 100_000, **DEEPSEEK)
    paying = next(count for count in range(1, 1000) if expands(count, 100_000, **DEEPSEEK))
    assert paying == 171
    assert all(expands(count, 100_000, **DEEPSEEK) == (count >= paying) for count in range(1, 1000))


def described(model_type: str = "deepseek_v3", **options: object) -> DecoderConfig:
    sizes = {"hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 3, "vocab_size": 129_280}
    return parse_config({"model_type": model_type, "intermediate_size": 18_432, **sizes, **options})


@pytest.mark.parametrize(("format", "expected"), [("16bit", 1152), ("fp8", 580), ("int8", 584), ("int4", 296)])
def test_numbers_of_a_token(format: str, expected: int) -> None:
    """576 numbers a layer in the shape of DeepSeek, and a scale (and an offset) of the latent and of the key."""
    assert kv_token_bytes(described(), KVCacheScheme(format)) == 3 * expected
    assert described().num_kv_layers == 3


@pytest.mark.parametrize(
    "scheme",
    [
        KVCacheScheme("int8"),
        pytest.param(KVCacheScheme("fp8"), marks=pytest.mark.full),
        pytest.param(KVCacheScheme("int4", rotate=True), marks=pytest.mark.full),
        KVCacheScheme("int4", rotate=True, sinks=3, residual_length=5),
    ],
    ids=str,
)
def test_quantized_pages_give_the_tokens_of_quantized_scoring(scheme: KVCacheScheme, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "youtu", **VARIANTS["youtu"])
    decoder = load_model(folder, dtype="float64")
    options = {"kv_cache": scheme.format, "kv_rotate": scheme.rotate, "kv_sinks": scheme.sinks}
    options |= {"kv_residual_length": scheme.residual_length} if scheme.residual_length else {}
    engine = small_engine(decoder, prefill_chunk=16, **options)
    assert engine.runner.pages.memory.nbytes == 200 * 4 * kv_token_bytes(decoder.config, scheme, 8)
    prompts = [TOKENS[0, :length].tolist() for length in (7, 40)]
    found = answer_all(engine, [(str(len(prompt)), prompt, GREEDY) for prompt in prompts])
    for prompt in prompts:
        tokens = found[str(len(prompt)), 0]
        logits = score(decoder, torch.tensor([prompt + tokens]), scheme)[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("scheme", [Int(4, 16), pytest.param(BlockFp8(), marks=pytest.mark.full)], ids=str)
def test_packed_expansions_are_their_dequantized_weights(scheme: Scheme, tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", "youtu", **VARIANTS["youtu"])
    weights = pack_model(dense, tmp_path / "packed", lambda module: scheme)
    assert "model.layers.1.self_attn.kv_b_proj" in weights
    decoder = load_model(tmp_path / "packed", dtype="float64")
    expected = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    torch.testing.assert_close(score(decoder, TOKENS), expected, rtol=0, atol=1e-9)
    for folder in (dense, tmp_path / "packed"):
        loaded = load_model(folder, kernels="reference", dtype="float32")
        assert foreseen_bytes(folder, torch.float32, "reference") == loaded.nbytes


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "deepseek_v3", **VARIANTS["deepseek_v3"])
    expected = score(load_model(folder), TOKENS)
    assert torch.equal(score(load_model(change_config(folder, model_type="kimi_k2")), TOKENS), expected)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="4 key-value heads for 128"):
        described(num_key_value_heads=4)
    with pytest.raises(CheckpointError, match="topk_method"):
        described("deepseek_v2", topk_method="noaux_tc", num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match=r"3 experts .* the 2 "):
        described(n_group=4, topk_group=1, n_routed_experts=8, num_experts_per_tok=3)
    folder = save_tiny_model(tmp_path / "model", "youtu", **VARIANTS["youtu"])
    with pytest.raises(ToolkitError):
        small_engine(load_model(folder), attention_window=16, attention_sinks=4)
