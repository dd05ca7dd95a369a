"""Through the whole engine in float64: greedy tokens equal transformers', alone and in a crowd, on few blocks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from covering import sample
from engines import answer_all
from tiny_models import load_reference, pack_model, put_weights, save_tiny_model

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.core.config import RuntimeConfig
from runtime.core.request import FinishReason, SamplingParams
from runtime.engine.engine import Engine
from runtime.llm import LLM, Completion
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

PROMPTS = (
    "The history of the city begins",
    "def add(a, b):",
    "The history of the city begins with a small settlement on the river, which the Romans",
    "In 1998, the band released",
)
NUM_TOKENS = 72
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def config(**options: object) -> RuntimeConfig:
    return RuntimeConfig(**({"device": "cpu", "dtype": "float64", "num_blocks": 256, "max_model_len": 512} | options))


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[int]]:
    """Greedy tokens of transformers for each prompt, each alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float64)
    tokens = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=3)
        tokens[prompt] = output[0, ids["input_ids"].shape[1] :].tolist()
        assert len(tokens[prompt]) == NUM_TOKENS
    return tokens


def churn(llm: LLM, prompts: tuple[str, ...]) -> dict[str, list[int]]:
    """Greedy tokens of the prompts while sampled requests arrive, end early and are aborted around them."""
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(llm.tokenizer.encode(prompt), GREEDY, prompt)
        tokens[prompt] = []
        stranger = SamplingParams(max_tokens=10 + 7 * number, temperature=1.5, seed=number)
        llm.engine.add_request(llm.tokenizer.encode(prompt)[: number + 2] * 3, stranger, f"stranger {number}")
    step = 0
    while llm.engine.has_work:
        for delta in llm.engine.step():
            assert delta.finish_reason is not FinishReason.ERROR, delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        step += 1
        if step % 10 == 0 and step < 150:
            llm.engine.add_request([step % 97, 5, 6, 7] * 5, SamplingParams(max_tokens=40, seed=step), f"guest {step}")
        if step % 20 == 5:
            llm.engine.abort(f"guest {step - 5}")
        llm.engine.scheduler.check()
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    return {prompt: tokens[prompt] for prompt in prompts}


def test_greedy_tokens_alone_equal_transformers(wanted: dict[str, list[int]]) -> None:
    llm = LLM(demo_model_path(), config())
    for prompt in PROMPTS:
        (completion,) = llm.generate([prompt], GREEDY)
        assert completion.token_ids == wanted[prompt]
        assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "options",
    sample(
        [
            {"num_blocks": 38, "max_model_len": 152, "block_size": 4, "prefill_chunk": 7, "max_num_batched_tokens": 16},
            {"prefix_caching": False, "prefill_chunk": 3, "max_num_batched_tokens": 11},
            {},
        ]
    ),
    ids=["few small blocks", "small chunks without prefix cache", "ample"],
)
def test_greedy_tokens_in_a_crowd_equal_transformers(wanted: dict[str, list[int]], options: dict[str, int]) -> None:
    llm = LLM(demo_model_path(), config(**options))
    assert churn(llm, PROMPTS) == wanted
    if "num_blocks" in options:
        assert llm.engine.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_packed_weights_and_windows_in_a_crowd_equal_transformers(family: str, tmp_path: Path) -> None:
    """Random int4 weights; transformers gets their dequantized values. Mistral's window is shorter than the text."""
    options = {"sliding_window": 16} if family == "mistral" else {}
    dense = save_tiny_model(tmp_path / "dense", family, **options)
    weights = pack_model(dense, tmp_path / "packed", lambda module: Int(bits=4, group_size=32))
    model = put_weights(load_reference(dense), weights)
    num_blocks = 9 if options else 24  # blocks out of the window's reach go back
    settings = config(num_blocks=num_blocks, block_size=4, max_model_len=96, prefill_chunk=5)
    runner = build_runner(load_model(tmp_path / "packed", dtype="float64"), settings)
    engine = Engine(runner, None, settings)
    prompts = [[(7 * i + k) % 112 for i in range(4 + 9 * k)] for k in range(4)]
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    found = answer_all(engine, [(str(k), prompt, params) for k, prompt in enumerate(prompts)])
    assert engine.scheduler.stats.num_preemptions > 0
    for k, prompt in enumerate(prompts):
        tokens = found[str(k), 0]
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # without it transformers takes token 0 for padding
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=50, eos_token_id=None)
        assert tokens == output[0, len(prompt) :].tolist()


@pytest.mark.full
def test_a_seed_gives_the_same_tokens_in_every_crowd() -> None:
    params = [SamplingParams(max_tokens=48, temperature=0.9, top_p=0.95, seed=seed) for seed in (1, 1, 2, 3)]
    ample = LLM(demo_model_path(), config())
    together = ample.generate(PROMPTS, params)
    alone = [ample.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    scarce = LLM(demo_model_path(), config(num_blocks=16, max_model_len=128, prefill_chunk=4, block_size=8))
    squeezed = scarce.generate(PROMPTS, params)
    assert scarce.engine.scheduler.stats.num_preemptions > 0
    for a, b, c in zip(together, alone, squeezed, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.text == b.text == c.text
    assert len({tuple(completion.token_ids) for completion in together}) == 4


def test_several_answers_equal_themselves_whatever_they_share() -> None:
    ample = LLM(demo_model_path(), config())
    scarce = LLM(demo_model_path(), config(num_blocks=16, max_model_len=64, block_size=4, prefix_caching=False))
    params = SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True)
    (single,) = ample.generate([PROMPTS[2]], params)
    first = ample.generate(PROMPTS[:3], replace(params, n=3))
    second = scarce.generate(PROMPTS[:3], replace(params, n=3))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert [c.index for c in first] == [0, 1, 2] * 3
    assert first[6].token_ids == single.token_ids
    assert len({tuple(completion.token_ids) for completion in first}) == 9
    assert ample.engine.scheduler.stats.num_copies > 0
    assert scarce.engine.scheduler.stats.num_preemptions > 0


def test_completions_tell_text_logprobs_and_cached_tokens() -> None:
    llm = LLM(demo_model_path(), config(block_size=4))
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    first, second = (llm.generate([PROMPTS[2]], params)[0] for _ in range(2))
    assert first.text == second.text == llm.tokenizer.decode(first.token_ids)
    assert len(first.logprobs) == 12
    assert all(entry.logprob == entry.top[0][1] for entry in first.logprobs), "greedy tokens are the most likely"
    assert [e.logprob for e in second.logprobs] == pytest.approx([e.logprob for e in first.logprobs], abs=1e-12)
    assert (first.num_cached_tokens, second.num_cached_tokens > 0) == (0, True)


def test_chat_ends_at_the_end_of_the_message() -> None:
    llm = LLM(demo_model_path(), config())
    (answer,) = llm.chat([[{"role": "user", "content": "Hello"}]], SamplingParams(max_tokens=64, temperature=0))
    assert isinstance(answer, Completion)
    assert "<|im_" not in answer.text
    assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_one_bad_prompt_refuses_the_call_before_anything_runs() -> None:
    llm = LLM(demo_model_path(), config())
    with pytest.raises(RequestError, match="512"):
        llm.generate(["fine", "too long"], [GREEDY, SamplingParams(max_tokens=512)])
    with pytest.raises(RequestError, match=r"^prompts "):
        llm.generate("one string", GREEDY)
    assert not llm.engine.has_work
