"""Log-probabilities and mean hidden states of prompts equal transformers' in float64, in whatever chunks they come."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from engines import small_engine
from tiny_models import load_reference, save_tiny_model

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, FinishReason, Pooling, RequestOptions, SamplingParams
from runtime.engine.engine import Engine
from runtime.llm import LLM
from runtime.model.loader import load_model
from runtime.runner import prompts

VOCAB = 112
EMBED = RequestOptions(pooling=Pooling.MEAN)
ONLY_SCORES = SamplingParams(max_tokens=0, prompt_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def reference(folder):
    return load_reference(folder)


@pytest.fixture(scope="module")
def decoder(folder):
    return load_model(folder, dtype="float64")


@dataclass
class Served:
    engine: Engine
    deltas: dict[tuple[str, int], list[Delta]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)

    def run(self) -> None:
        while self.engine.has_work:
            for delta in self.engine.step():
                self.deltas.setdefault((delta.request_id, delta.index), []).append(delta)
            self.preempted |= {s.id for s in self.engine.scheduler.waiting if s.num_preemptions}
            self.engine.scheduler.check()


class CountingHead:
    """An output head that notes how many rows it computes at a time."""

    def __init__(self, head) -> None:
        self.head, self.nbytes = head, head.nbytes
        self.rows: list[int] = []

    def __call__(self, hidden):
        self.rows.append(len(hidden))
        return self.head(hidden)


def serve(decoder, **options) -> Served:
    return Served(small_engine(decoder, **options))


def make_prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(length)]


@torch.no_grad()
def expected_logprobs(model, prompt: list[int]) -> torch.Tensor:
    """`[length - 1, V]`: of what follows each token but the last."""
    return model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1)


@torch.no_grad()
def expected_embedding(model, prompt: list[int]) -> torch.Tensor:
    return model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].mean(0)


def check_logprobs(delta: Delta, model, prompt: list[int], num_top: int) -> None:
    expected = expected_logprobs(model, prompt)
    assert len(delta.prompt_logprobs) == len(prompt) - 1
    for row, token_id, found in zip(expected, prompt[1:], delta.prompt_logprobs, strict=True):
        assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-11)
        assert [token for token, _ in found.top] == row.topk(num_top).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-11)


@pytest.mark.parametrize(("chunk", "budget"), [(512, 512), (64, 64), (5, 12), (1, 3)])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_logprobs_equal_transformers(chunk, budget, max_tokens, decoder, reference):
    served = serve(decoder, prefill_chunk=chunk, max_num_batched_tokens=budget)
    prompts = {str(length): make_prompt(length, length) for length in (1, 2, 4, 33, 90)}
    for name, prompt in prompts.items():
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=3, ignore_eos=True)
        served.engine.add_request(prompt, sampling, name)
        served.engine.add_request(prompt[:7], SamplingParams(max_tokens=4, seed=1, ignore_eos=True), f"mate {name}")
    served.run()
    for name, prompt in prompts.items():
        first, *others = served.deltas[name, 0]
        check_logprobs(first, reference, prompt, 3)
        assert not any(delta.prompt_logprobs for delta in others)
        assert sum(len(delta.token_ids) for delta in (first, *others)) == max_tokens
        assert (first, *others)[-1].finish_reason is FinishReason.LENGTH
        assert not any(delta.prompt_logprobs for delta in served.deltas[f"mate {name}", 0])


@pytest.mark.parametrize("chunk", [512, 16, 5, 1])
def test_embeddings_equal_transformers(chunk, decoder, reference):
    served = serve(decoder, prefill_chunk=chunk, max_num_batched_tokens=max(chunk, 24))
    prompts = {str(length): make_prompt(length, length) for length in (1, 2, 33, 90)}
    for name, prompt in prompts.items():
        served.engine.add_request(prompt, SamplingParams(max_tokens=1), name, EMBED)
        served.engine.add_request(prompt[:9], SamplingParams(max_tokens=4, seed=1, ignore_eos=True), f"mate {name}")
    served.run()
    for name, prompt in prompts.items():
        (delta,) = served.deltas[name, 0]
        assert (delta.finish_reason, delta.token_ids, delta.num_prompt_tokens) == (FinishReason.STOP, [], len(prompt))
        expected = expected_embedding(reference, prompt)
        torch.testing.assert_close(torch.tensor(delta.embedding, dtype=torch.float64), expected, rtol=0, atol=1e-11)
        assert all(delta.embedding is None for delta in served.deltas[f"mate {name}", 0])


@pytest.mark.parametrize("chunk", [512, 5])
def test_states_of_last_tokens_equal_transformers(chunk, decoder, reference):
    served = serve(decoder, prefill_chunk=chunk, max_num_batched_tokens=max(chunk, 24))
    options, prompt = RequestOptions(pooling=Pooling.LAST), make_prompt(33, 1)
    served.engine.add_request(prompt, SamplingParams(max_tokens=1), "last", options)
    served.run()
    with torch.no_grad():
        expected = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1].double()
    found = torch.tensor(served.deltas["last", 0][0].embedding, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("num_blocks", "victim"), [(40, "scored"), (46, "embedded")])
def test_preempted_in_the_middle_of_the_prompt(num_blocks, victim, decoder, reference):
    """Older sequences decode and take the blocks of the younger ones, whose prompts come in small chunks."""
    served = serve(decoder, num_blocks=num_blocks, prefill_chunk=2, max_num_batched_tokens=6, max_model_len=120)
    for number in range(3):
        sampling = SamplingParams(max_tokens=36, seed=number, ignore_eos=True)
        served.engine.add_request(make_prompt(8, number), sampling, f"old {number}")
    for _ in range(12):
        served.engine.step()
    prompts = {"scored": make_prompt(50, 7), "embedded": make_prompt(52, 8)}
    served.engine.add_request(prompts["scored"], SamplingParams(max_tokens=2, prompt_logprobs=2), "scored")
    served.engine.add_request(prompts["embedded"], SamplingParams(max_tokens=1), "embedded", EMBED)
    served.run()
    assert served.preempted == {victim}
    check_logprobs(served.deltas["scored", 0][0], reference, prompts["scored"], 2)
    found = torch.tensor(served.deltas["embedded", 0][0].embedding, dtype=torch.float64)
    torch.testing.assert_close(found, expected_embedding(reference, prompts["embedded"]), rtol=0, atol=1e-11)


def test_the_prefix_cache_is_filled_and_not_read(decoder, reference):
    served = serve(decoder)
    prompt = make_prompt(41)
    for name in ("first", "again"):
        served.engine.add_request(prompt, ONLY_SCORES, name)
        served.run()
        (delta,) = served.deltas[name, 0]
        assert delta.num_cached_tokens == 0
        check_logprobs(delta, reference, prompt, 3)
    served.engine.add_request(prompt, SamplingParams(max_tokens=1), "reads")
    served.run()
    assert served.deltas["reads", 0][0].num_cached_tokens == 40
    assert served.engine.scheduler.pool.num_free == served.engine.scheduler.pool.num_blocks


def test_only_the_first_of_several_answers_has_them(decoder, reference):
    served = serve(decoder)
    prompt = make_prompt(10)
    served.engine.add_request(prompt, SamplingParams(max_tokens=2, n=3, seed=1, prompt_logprobs=1), "several")
    served.engine.add_request(prompt, SamplingParams(max_tokens=0, n=3, prompt_logprobs=1), "scores only")
    served.run()
    for name in ("several", "scores only"):
        check_logprobs(served.deltas[name, 0][0], reference, prompt, 1)
        for index in (1, 2):
            assert not any(delta.prompt_logprobs for delta in served.deltas[name, index])
            assert served.deltas[name, index][-1].finish_reason is FinishReason.LENGTH


def test_offline():
    llm = LLM(demo_model_path(), RuntimeConfig(device="cpu", dtype="float64", num_blocks=64, max_model_len=256))
    model = load_reference(demo_model_path())
    prompts = [llm.tokenizer.encode(text) for text in ("The castle was built in the", "Once upon a time")]
    for prompt, found in zip(prompts, llm.embed(prompts), strict=True):
        expected = expected_embedding(model, prompt)
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=1e-10)
    for prompt, answer in zip(prompts, llm.generate(prompts, ONLY_SCORES), strict=True):
        rows = expected_logprobs(model, prompt)
        wanted = [row[token_id].item() for row, token_id in zip(rows, prompt[1:], strict=True)]
        assert [found.logprob for found in answer.prompt_logprobs] == pytest.approx(wanted, abs=1e-10)
        assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.LENGTH)


def test_tokens_are_the_same_with_and_without(decoder):
    served = serve(decoder)
    prompt = make_prompt(30)
    for name, number in (("with", 5), ("without", None)):
        served.engine.add_request(prompt, SamplingParams(max_tokens=20, seed=3, prompt_logprobs=number), name)
    served.run()
    with_scores, without = ([t for d in served.deltas[name, 0] for t in d.token_ids] for name in ("with", "without"))
    assert with_scores == without


def test_few_logits_exist_at_a_time(decoder, reference, monkeypatch):
    monkeypatch.setattr(prompts, "LOGITS_AT_ONCE", 7 * VOCAB)
    head = CountingHead(decoder.head)
    monkeypatch.setattr(decoder, "head", head)
    served = serve(decoder)
    prompt = make_prompt(60)
    served.engine.add_request(prompt, ONLY_SCORES, "long")
    served.run()
    assert max(head.rows) == 7
    assert sum(head.rows) == 59
    check_logprobs(served.deltas["long", 0][0], reference, prompt, 3)


def test_a_prompt_as_long_as_the_context_can_be_scored(decoder):
    served = serve(decoder, max_model_len=64)
    served.engine.add_request(make_prompt(64), ONLY_SCORES, "full")
    served.run()
    assert len(served.deltas["full", 0][0].prompt_logprobs) == 63


@pytest.mark.parametrize("options", [RequestOptions(), EMBED])
def test_numbers_that_are_not_finite_are_an_error(options, decoder):
    served = serve(decoder)
    decoder.norm.weight[3], kept = float("nan"), decoder.norm.weight[3].item()
    try:
        served.engine.add_request(make_prompt(9), ONLY_SCORES, "bad", options)
        served.run()
    finally:
        decoder.norm.weight[3] = kept
    (delta,) = served.deltas["bad", 0]
    assert delta.finish_reason is FinishReason.ERROR
    assert "not finite" in delta.error


def test_aborted_and_failed_requests_leave_every_block_free(decoder):
    served = serve(decoder, prefill_chunk=4, max_num_batched_tokens=8)
    served.engine.add_request(make_prompt(40), ONLY_SCORES, "aborted")
    served.engine.add_request(make_prompt(40, 1), SamplingParams(max_tokens=1), "late", EMBED)
    served.engine.step()
    served.engine.abort("aborted")
    served.engine.abort_all()
    assert not served.engine.has_work
    assert served.engine.scheduler.pool.num_free == served.engine.scheduler.pool.num_blocks
