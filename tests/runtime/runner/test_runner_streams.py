"""Attention sinks and a window (StreamingLLM): the logits of the definition, however the stream is computed."""

import random
from dataclasses import replace

import pytest
import torch
from covering import covering
from engines import Recorder, answer_all, blocks_held, drain, small_engine
from naive_streams import NaiveStream, naive_logits
from tiny_models import load_reference, save_tiny_model

from compress.common.errors import ToolkitError
from runtime.backends.torch.ops import rotate
from runtime.core.attention_window import AttentionWindow
from runtime.core.model_config import STREAM_LENGTH
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.memory.plan import explain
from runtime.model.loader import load_model
from runtime.model.rotary import Rotary
from runtime.runner.runner import build_runner
from runtime.speculative.draft_model import ModelDrafter
from runtime.speculative.ngram import NgramDrafter
from runtime.speculative.proposer import Speculator

SINKS, WINDOW, BLOCK = 3, 20, 4
ROPE = {"rope_theta": 500.0, "factor": 4.0}
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen2, no shared heads": ("qwen2", {"num_key_value_heads": 4}),
    "mistral, its own window": ("mistral", {"sliding_window": 32}),
    "rope linear": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear"}}),
    "rope yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 16}}),
    "rope llama3": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}
STREAM = [random.Random(5).randrange(112) for _ in range(4 * (SINKS + WINDOW) + 3)]


def save_model(folder, name: str):
    family, options = MODELS[name]
    return save_tiny_model(folder, family, **({"max_position_embeddings": 32} | options))


def make_engine(decoder, **options) -> Engine:
    streams = {"attention_sinks": SINKS, "attention_window": WINDOW, "num_blocks": 100}
    return small_engine(decoder, **streams | options)


@pytest.mark.parametrize(("name", "chunk"), covering(list(MODELS), [1, 7, 64]))
def test_logits_of_a_stream(name, chunk, tmp_path):
    folder = save_model(tmp_path / "model", name)
    expected = naive_logits(load_reference(folder), STREAM, SINKS, WINDOW)
    engine = make_engine(load_model(folder, dtype="float64"), prefill_chunk=chunk)
    recorder = engine.runner.decoder = Recorder(engine.runner.decoder)
    engine.add_request(STREAM, SamplingParams(max_tokens=1))
    drain(engine)
    found = torch.stack([recorder.logits_at[position] for position in range(len(STREAM))])
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("models") / "tiny", "llama")
    return load_model(folder, dtype="float64"), load_reference(folder)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Some share a beginning; every second one is drawn with a seed, the rest are greedy; one has three answers."""
    lengths = [(70, 5), (70, 0), (20, 1), (0, 40), (0, 2), (70, 5)]
    return [
        (
            STREAM[:shared] + [(7 * number + 3 * i) % 112 for i in range(rest)],
            SamplingParams(
                75, temperature=number % 2, seed=number, logprobs=2, n=1 + 2 * (number == 2), ignore_eos=True
            ),
        )
        for number, (shared, rest) in enumerate(lengths)
    ]


def serve(engine: Engine) -> tuple[dict, int]:
    """Tokens and log-probabilities by request and answer, and the most blocks that one sequence held."""
    names = {engine.add_request(prompt, sampling): number for number, (prompt, sampling) in enumerate(requests())}
    answers, held = {}, []
    found = drain(engine, after_step=lambda: held.extend(blocks_held(engine)))
    for delta in (delta for parts in found.values() for delta in parts):
        assert not delta.error
        tokens, logprobs = answers.setdefault((names[delta.request_id], delta.index), ([], []))
        tokens += delta.token_ids
        logprobs += [found.logprob for found in delta.logprobs]
    return answers, max(held)


@pytest.fixture(scope="module")
def expected(tiny):
    """Each answer's tokens as the engine gives them in peace, and their log-probabilities by definition."""
    answers, _ = serve(make_engine(tiny[0], prefix_caching=False))
    assert len(answers) == 8
    logprobs = {}
    for (number, index), (tokens, _) in answers.items():
        prompt, _ = requests()[number]
        assert len(tokens) == 75
        logits = naive_logits(tiny[1], prompt + tokens[:-1], SINKS, WINDOW)[len(prompt) - 1 :]
        logprobs[number, index] = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        if number % 2 == 0 and not index:
            assert tokens == logits.argmax(-1).tolist()
    return answers, logprobs


@pytest.mark.parametrize(("chunk", "num_blocks", "prefix_caching"), covering([1, 7, 64], [100, 30], [True, False]))
def test_streams_beside_others_preempted_forked_and_found_again(chunk, num_blocks, prefix_caching, tiny, expected):
    engine = make_engine(tiny[0], prefill_chunk=chunk, num_blocks=num_blocks, prefix_caching=prefix_caching)
    answers, logprobs = expected
    for _ in range(2):
        found, most = serve(engine)
        for key, (tokens, chances) in found.items():
            assert tokens == answers[key][0]
            torch.testing.assert_close(torch.tensor(chances, dtype=torch.float64), logprobs[key], rtol=0, atol=1e-9)
        assert most <= (SINKS + WINDOW + chunk) // BLOCK + 3
    assert bool(engine.scheduler.stats.num_preemptions) == (num_blocks == 30)
    assert bool(engine.scheduler.stats.num_prefix_hits) == prefix_caching


@pytest.mark.parametrize("itself", [True, False])
def test_guesses_change_nothing(itself, tiny, expected):
    """Those of the model itself, which streams too, are right beyond the context as well."""
    engine = make_engine(tiny[0], prefill_chunk=7, num_blocks=40)
    draft = build_runner(tiny[0], replace(engine.config, num_blocks=400))
    engine.speculator = Speculator(ModelDrafter(draft, engine.config) if itself else NgramDrafter(), 4)
    engine.speculator.gate = None
    found, _ = serve(engine)
    answers, metrics = expected[0], engine.metrics
    assert all(tokens == answers[key][0] for key, (tokens, _) in found.items())
    assert metrics.spec_decode_num_draft_tokens_total
    if itself:
        assert metrics.spec_decode_num_accepted_tokens_total > 0.95 * metrics.spec_decode_num_draft_tokens_total


def test_a_window_without_sinks(tiny):
    engine = make_engine(tiny[0], attention_sinks=0)
    request = ("a", STREAM, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    tokens = answer_all(engine, [request])["a", 0]
    logits = naive_logits(tiny[1], STREAM + tokens[:-1], 0, WINDOW)[len(STREAM) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


def test_a_stream_far_longer_than_pool_and_context(tiny):
    """12 blocks of 4 tokens, a context of 32, and 500 tokens; the last ones by definition still."""
    engine = make_engine(tiny[0], num_blocks=12, prefill_chunk=8)
    assert engine.runner.max_model_len == STREAM_LENGTH
    request = ("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    tokens = answer_all(engine, [request])["a", 0]
    assert len(tokens) == 500
    stream = NaiveStream(tiny[1], SINKS, WINDOW)
    assert tokens == [int(stream.push(token).argmax()) for token in [5, 6, 7, *tokens[:-1]]][2:]


def test_while_all_fits_in_sinks_and_window_nothing_changes(tiny):
    prompt = STREAM[: SINKS + WINDOW]
    ordinary, streaming = Recorder(tiny[0]), Recorder(tiny[0])
    for recorder, options in ((ordinary, {"attention_sinks": 0, "attention_window": None}), (streaming, {})):
        engine = make_engine(tiny[0], **options)
        recorder.decoder, engine.runner.decoder = engine.runner.decoder, recorder
        engine.add_request(prompt, SamplingParams(max_tokens=1))
        drain(engine)
    for position in range(len(prompt)):
        # Angles in float32, as transformers computes them, are what remains.
        torch.testing.assert_close(streaming.logits_at[position], ordinary.logits_at[position], rtol=0, atol=1e-4)


def test_angles_stay_exact_far_out(tiny):
    """The score of a query and a key depends on their distance only, also after a million tokens in float32."""
    config = tiny[0].config
    rotary = Rotary(config.mixer.rope, config.mixer.head_dim, torch.float32, torch.device("cpu")).exact()
    query, key = torch.randn(2, 1, 4, 16, generator=torch.Generator().manual_seed(0))

    def score(position: int) -> torch.Tensor:
        cos, sin = rotary.at(torch.tensor([position, position - 9]))
        return (rotate(query, cos[:1], sin[:1]) * rotate(key, cos[1:], sin[1:])).sum(-1)

    torch.testing.assert_close(score(STREAM_LENGTH), score(9), rtol=0, atol=1e-5)


def test_lengths_and_memory(tiny):
    runner = make_engine(tiny[0], num_blocks=None, max_num_seqs=3, prefill_chunk=8).runner
    assert runner.attention_window == AttentionWindow(WINDOW, SINKS)
    assert runner.num_blocks == 3 * AttentionWindow(WINDOW, SINKS).blocks_for(10**6, 8, BLOCK) == 3 * 9
    lines = explain(runner.memory)
    assert "reach    the first 3 and the last 20 tokens: 9 blocks per sequence at most, whatever its length" in lines
    assert f"longest  {2**20} tokens (the length of streams)" in lines
    assert make_engine(tiny[0], max_model_len=5000).runner.max_model_len == 5000
    with pytest.raises(ToolkitError, match=r"5000 tokens.*9 KV.*8"):
        make_engine(tiny[0], max_model_len=5000, num_blocks=8, prefill_chunk=8)
    assert make_engine(tiny[0], num_blocks=8, prefill_chunk=8).runner.max_model_len == 32
    with pytest.raises(ToolkitError, match=r"3 attention.*30 tokens.*32"):
        make_engine(tiny[0], attention_window=30)
    with pytest.raises(ToolkitError, match=r"max_model_len=33.*--attention-window"):
        make_engine(tiny[0], attention_sinks=0, attention_window=None, max_model_len=33)
