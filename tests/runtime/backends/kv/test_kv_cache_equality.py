"""A quantized KV cache changes answers, but nothing that only makes serving faster changes them further: in float64
tokens are equal whatever the chunks, the batch, the blocks, the prefix cache, host memory and speculation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Tokens as Answers
from engines import answer_all, small_engine
from tiny_models import save_tiny_model

from compress.checkpoint.kv_cache import KVCacheScheme
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.model.scoring import score

SYSTEM = list(range(50, 71))
PROMPTS = [[*SYSTEM, 7, 8, 9], [*SYSTEM, 11], [5, 6] * 9, [3], [*SYSTEM, 12]]
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=9, ignore_eos=True),
]
SCHEMES = {
    "fp8": KVCacheScheme("fp8"),
    "k8v4 rotated with sinks": KVCacheScheme("k8v4", rotate=True, sinks=6),
    "int4": KVCacheScheme("int4"),
    "int4 rotated with all": KVCacheScheme("int4", rotate=True, sinks=3, residual_length=9),
    "int8 with the last": KVCacheScheme("int8", residual_length=1),
}
CELLS: dict[str, dict[str, Any]] = {
    "cache": {"num_blocks": 300},
    "no cache, small chunks": {"num_blocks": 300, "prefill_chunk": 5, "prefix_caching": False},
    "few blocks": {"num_blocks": 17, "prefill_chunk": 5},
    "few blocks and host memory": {"num_blocks": 17, "kv_offload_bytes": 2**22},
    "n-gram": {"num_blocks": 300, "prefill_chunk": 64, "speculative_model": "ngram"},
    "n-gram trees": {"num_blocks": 300, "speculative_model": "ngram-tree", "num_speculative_tokens": 8},
    "draft model": {"num_blocks": 60, "speculative_model": "self:skip", "max_num_seqs": 5},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Heads of 24 numbers: Hadamard matrices of 8."""
    sizes = {"num_hidden_layers": 3, "head_dim": 24}
    path: Path = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", **sizes)
    return load_model(path, device="cpu", dtype="float64")


def build_engine(decoder: Decoder, scheme: KVCacheScheme, **options: Any) -> Engine:
    wishes = {"kv_rotate": scheme.rotate, "kv_sinks": scheme.sinks, "kv_residual_length": scheme.residual_length}
    return small_engine(decoder, dtype="float64", kv_cache=scheme.format, max_model_len=64, **wishes, **options)


def requests() -> list[tuple[str, list[int], SamplingParams]]:
    return [(str(i), prompt, SAMPLINGS[i % 2]) for i, prompt in enumerate(PROMPTS)]


def one_by_one(engine: Engine) -> Answers:
    return {key: tokens for each in requests() for key, tokens in answer_all(engine, [each]).items()}


@pytest.fixture(scope="module", params=SCHEMES)
def served(request: pytest.FixtureRequest, decoder: Decoder) -> tuple[KVCacheScheme, Answers]:
    """A scheme, and the answers of an engine that serves one request at a time, every prompt in one piece."""
    scheme = SCHEMES[request.param]
    return scheme, one_by_one(build_engine(decoder, scheme, num_blocks=300, prefix_caching=False, max_num_seqs=3))


@pytest.mark.parametrize("cell", CELLS)
def test_every_way_of_serving_gives_the_same_tokens(
    decoder: Decoder, served: tuple[KVCacheScheme, Answers], cell: str
) -> None:
    scheme, expected = served
    options = dict(CELLS[cell])
    if cell == "n-gram trees" and (scheme.sinks or scheme.residual_length):
        pytest.skip("trees have no place among exact tokens")
    if scheme.residual_length:
        options.pop("kv_offload_bytes", None)
    engine = build_engine(decoder, scheme, **options)
    assert answer_all(engine, requests()) == expected
    if cell == "cache":
        assert answer_all(engine, requests()) == expected, "once more, with what is cached now"
        assert (engine.scheduler.stats.num_prefix_hits > 0) == (not scheme.residual_length)
    stats = engine.scheduler.stats
    assert (stats.num_preemptions > 0) == (options["num_blocks"] == 17)
    assert (engine.scheduler.pool.tier.num_restores > 0) == ("kv_offload_bytes" in options)
    assert (engine.metrics.spec_decode_num_draft_tokens_total > 0) == ("speculative_model" in options)


@pytest.mark.parametrize("sinks", [0, 6])
def test_windows_and_endless_streams(decoder: Decoder, served: tuple[KVCacheScheme, Answers], sinks: int) -> None:
    scheme, whole = served
    window = {"attention_window": 12, "attention_sinks": sinks}
    alone = build_engine(decoder, scheme, num_blocks=300, prefix_caching=False, max_num_seqs=3, **window)
    expected = one_by_one(alone)
    assert expected != whole
    trees = {} if scheme.sinks or scheme.residual_length else {"speculative_model": "ngram-tree"}
    for options in ({"num_blocks": 20, "prefill_chunk": 5}, {"num_blocks": 300} | trees):
        engine = build_engine(decoder, scheme, **options, **window)
        assert answer_all(engine, requests()) == expected


def test_what_is_scored_is_what_is_served(decoder: Decoder, served: tuple[KVCacheScheme, Answers]) -> None:
    """The scorer has no pages and shares no code with them but the arithmetic of one head."""
    scheme, expected = served
    for number, prompt in enumerate(PROMPTS):
        if SAMPLINGS[number % 2].temperature:
            continue
        output = expected[str(number), 0]
        logits = score(decoder, torch.tensor([prompt + output[:-1]]), scheme)[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output


def test_schemes_change_answers(decoder: Decoder) -> None:
    """Else the tests above would say nothing."""
    tokens = torch.tensor([PROMPTS[0]])
    exact = score(decoder, tokens)
    seen = {0.0}
    for scheme in SCHEMES.values():
        difference = float((score(decoder, tokens, scheme) - exact).abs().max())
        assert difference not in seen
        seen.add(difference)
    everything = replace(SCHEMES["int4"], residual_length=len(PROMPTS[0]))
    assert torch.allclose(score(decoder, tokens, everything), exact, rtol=0, atol=1e-9)
