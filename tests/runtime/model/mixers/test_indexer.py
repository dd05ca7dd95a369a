"""Sparse attention: which tokens an indexer chooses, over pages of every form, packed, and what it takes of memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import answer_all, small_engine
from folders import change_config
from runs import foreseen_bytes
from tiny_configs import VARIANTS
from tiny_models import load_reference, pack_model, put_weights, reference_logits, save_tiny_model

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.weights import BlockFp8, Int, Scheme
from compress.common.errors import CheckpointError, ToolkitError
from runtime.backends import indexer
from runtime.backends.fused_layers import indexers_unsupported
from runtime.backends.indexer import ChosenTokens, IndexedTokens, not_highest
from runtime.backends.registry import choose_attention
from runtime.core.model_config import DecoderConfig, parse_config
from runtime.core.request import SamplingParams
from runtime.memory.estimate import index_bytes, kv_token_bytes
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (1, 40), generator=torch.Generator().manual_seed(3))
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HEADS, DIM, CHOSEN = 5, 6, 4


def test_the_highest_scores_are_chosen_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor([[1.0, 3, 2, 3, 0, 3], [0, 0, 1, 0, 0, 0], [2, 1, 0, 0, -torch.inf, -torch.inf]])
    hidden = not_highest(scores, 2)
    assert (~hidden).nonzero().tolist() == [[0, 1], [0, 3], [1, 0], [1, 2], [2, 0], [2, 1]]
    ranks = torch.randn(3, 50).argsort(-1).argsort(-1).float()
    assert torch.equal(~not_highest(ranks, 7), ranks >= 43)


@pytest.mark.parametrize("at_once", [2**26, 2 * HEADS * 9])
def test_tokens_of_several_sequences(at_once: int, monkeypatch) -> None:
    monkeypatch.setattr(indexer, "SCORE_NUMBERS", at_once)
    query, weights, keys = torch.randn(7, HEADS, DIM), torch.randn(7, HEADS), torch.randn(2, 9, DIM)
    rows = slice(1, 7)
    seen = torch.zeros(6, 9).masked_fill(torch.rand(6, 9) < 0.3, float("-inf"))
    tokens = IndexedTokens(query, torch.empty(0), weights, CHOSEN)
    expected = []
    for row in range(6):
        scores = sum(weights[1 + row, h] * (keys[row // 3] @ query[1 + row, h]).relu() for h in range(HEADS))
        chosen = (scores + seen[row]).topk(CHOSEN).indices
        expected.append(torch.ones(9, dtype=torch.bool).index_fill(0, chosen, False))
    found = tokens.hidden(rows, keys, seen)
    visible = seen == 0
    assert torch.equal(found & visible, torch.stack(expected) & visible)


def test_a_layer_sees_what_the_last_indexer_chose() -> None:
    chosen = ChosenTokens((-1, 1, 1, 3))
    assert chosen.of(0) is None
    with pytest.raises(ValueError, match="layer 2"):
        chosen.of(2)
    masks = [torch.zeros(2, 2)]
    chosen.put(1, masks)
    assert chosen.of(1) is chosen.of(2) is masks


DENSE = {"deepseek_v32": "deepseek_v3", "glm_moe_dsa": "glm4_moe_lite"}
"""The same family with dense attention."""


@pytest.mark.parametrize("family", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.full)])
def test_up_to_as_many_tokens_as_are_chosen_attention_is_dense(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    tokens, sparse = TOKENS[:, :20], load_model(folder, dtype="float64")
    dense = load_model(change_config(folder, model_type=DENSE[family]), dtype="float64")
    expected = score(dense, tokens)
    assert not torch.allclose(score(sparse, tokens), expected)
    first = VARIANTS[family]["index_topk"]
    torch.testing.assert_close(score(sparse, tokens)[:, :first], expected[:, :first], rtol=0, atol=1e-12)
    wide = load_model(change_config(folder, model_type=family, index_topk=20), dtype="float64")
    assert torch.equal(score(wide, tokens), expected)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(KVCacheScheme("int8"), marks=pytest.mark.full),
        pytest.param(KVCacheScheme("fp8"), marks=pytest.mark.full),
        pytest.param(KVCacheScheme("int4", rotate=True), marks=pytest.mark.full),
        KVCacheScheme("int4", rotate=True, sinks=3, residual_length=5),
    ],
    ids=str,
)
def test_quantized_pages_give_the_tokens_of_quantized_scoring(scheme: KVCacheScheme, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "glm_moe_dsa", **VARIANTS["glm_moe_dsa"])
    decoder = load_model(folder, dtype="float64")
    options = {"kv_cache": scheme.format, "kv_rotate": scheme.rotate, "kv_sinks": scheme.sinks}
    options |= {"kv_residual_length": scheme.residual_length} if scheme.residual_length else {}
    engine = small_engine(decoder, prefill_chunk=16, **options)
    assert engine.runner.pages.memory.nbytes == 200 * 4 * kv_token_bytes(decoder.config, scheme, 8)
    stores = [store for store in (engine.runner.cache.sinks, engine.runner.cache.residual_window) if store is not None]
    kept = sum(part.nbytes for store in stores for part in (*store.keys, *store.values))
    assert engine.runner.memory.exact.nbytes == kept
    prompts = [TOKENS[0, :length].tolist() for length in (7, 40)]
    found = answer_all(engine, [(str(len(prompt)), prompt, GREEDY) for prompt in prompts])
    for prompt in prompts:
        tokens = found[str(len(prompt)), 0]
        logits = score(decoder, torch.tensor([prompt + tokens]), scheme)[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("scheme", [Int(4, 16), pytest.param(BlockFp8(), marks=pytest.mark.full)], ids=str)
def test_packed_indexers_are_their_dequantized_weights(scheme: Scheme, tmp_path: Path) -> None:
    options = VARIANTS["deepseek_v32"] | {"first_k_dense_replace": 2}
    dense = save_tiny_model(tmp_path / "dense", "deepseek_v32", **options)
    packed = ("q_b_proj", "indexer.wq_b", "indexer.wk")
    weights = pack_model(dense, tmp_path / "packed", lambda module: scheme if module.endswith(packed) else None)
    assert "model.layers.1.self_attn.indexer.wk" in weights
    decoder = load_model(tmp_path / "packed", dtype="float64")
    expected = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    torch.testing.assert_close(score(decoder, TOKENS), expected, rtol=0, atol=1e-9)
    for folder in (dense, tmp_path / "packed"):
        loaded = load_model(folder, kernels="reference", dtype="float32")
        assert foreseen_bytes(folder, torch.float32, "reference") == loaded.nbytes


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 96, "intermediate_size": 64}


def described(**options: object) -> DecoderConfig:
    """Indexers in the shape of GLM-5."""
    return parse_config({**SMALL, "model_type": "glm_moe_dsa", "num_key_value_heads": 4, **options})


@pytest.mark.parametrize(("format", "expected"), [("16bit", 1152), ("int4", 296)])
def test_numbers_of_a_token(format: str, expected: int) -> None:
    """Index keys take 256 bytes in each layer with an indexer, whatever the form of keys and values."""
    shared = described(index_topk_freq=3)
    assert shared.index_sources == (0, 1, 1, 1, 4, 4)
    assert kv_token_bytes(shared, KVCacheScheme(format)) == 6 * expected + 3 * 256
    assert kv_token_bytes(described(), KVCacheScheme(format)) == 6 * (expected + 256)


def test_compiled_attention_leaves_indexers_to_plain_torch(tmp_path: Path) -> None:
    sizes = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32}
    folder = save_tiny_model(tmp_path / "model", "deepseek_v32", torch.bfloat16, **VARIANTS["deepseek_v32"] | sizes)
    sparse = load_model(folder)
    dense = load_model(change_config(folder, model_type="deepseek_v3"))
    backend, _, reason = choose_attention(sparse, small_engine(sparse, block_size=16).runner.memory)
    assert (backend.name, bool(reason)) == ("torch", True)
    assert indexers_unsupported(sparse.config.spec)
    assert not indexers_unsupported(dense.config.spec)


def test_memory_of_a_step_grows_with_ranked_keys_only() -> None:
    """300 rows of 32 heads: scores of `SCORE_NUMBERS`, at most, and eleven bytes of each row and key."""
    assert index_bytes(described(), 300, 2048) == 0
    assert index_bytes(described(index_topk=2047), 300, 2048) == 300 * 2048 * (32 * 4 + 11)
    assert index_bytes(described(), 300, 2**16) == 32 * 32 * 2**16 * 4 + 300 * 2**16 * 11
    assert index_bytes(parse_config({**SMALL, "model_type": "llama"}), 300, 2**16) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"indexer_types": ["full", "shared"] * 3},
        {"index_topk_pattern": "FSFSFS"},
        {"index_topk_pattern": [*["full", "shared"] * 3, "full"]},
    ],
)
def test_which_layers_share(options: dict[str, object]) -> None:
    assert described(**options).index_sources == (0, 0, 2, 2, 4, 4)
    with pytest.raises(ToolkitError, match="ngram"):
        described(**options).keep_layers([0, 2])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("indexer_types", ["full", "other", "full", "full", "full", "full"]),
        ("indexer_types", ["full"]),
        ("indexer_types", ["shared", *["full"] * 5]),
        ("index_topk_pattern", "FFFFFX"),
        ("q_lora_rank", None),
        ("index_topk", 0),
    ],
)
def test_what_is_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        described(**{key: value})


@pytest.mark.full
@pytest.mark.parametrize("speculative_model", ["ngram", "ngram-tree"])
def test_drafts_move_their_index_keys(speculative_model: str, tmp_path: Path) -> None:
    """With five tokens, guesses at random are often right."""
    folder = save_tiny_model(tmp_path / "model", "glm_moe_dsa", **VARIANTS["glm_moe_dsa"] | {"vocab_size": 5})
    decoder, sampling = load_model(folder, dtype="float64"), replace(GREEDY, max_tokens=60)
    requests = [(str(length), (TOKENS[0, :length] % 5).tolist(), sampling) for length in (30, 40)]
    engine = small_engine(decoder, folder, speculative_model=speculative_model)
    found = answer_all(engine, requests)
    assert engine.metrics.spec_decode_num_accepted_tokens_total > 5
    for name, prompt, _ in requests:
        tokens = found[name, 0]
        logits = score(decoder, torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.full
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_blocks_that_went_to_host_memory_bring_their_index_keys_back(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    decoder, chance = load_model(folder, dtype="float64"), torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 112, (60,), generator=chance).tolist() for _ in range(4)]
    engine = small_engine(decoder, num_blocks=24, prefix_caching=True, kv_offload_bytes=2**22)
    expected = [answer_all(small_engine(decoder), [("", prompt, GREEDY)])["", 0] for prompt in prompts]
    for _ in range(2):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert answer_all(engine, [("", prompt, GREEDY)])["", 0] == tokens
    assert engine.scheduler.pool.tier.num_restores > 0
