"""The runner gives transformers' tokens, however prompts are cut, whatever else runs, wherever blocks lie."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from engines import collect, drain, small_engine, tokens_of
from poisoned_memory import poison, poison_states
from tiny_configs import VARIANTS
from tiny_models import load_reference, reference_logits, save_tiny_model

from compress.common.cli import demo_model_path
from compress.cpu.binding import library
from runtime.backends.triton import prepare_attention
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import NO_STATE, BlockCopy, ScheduledSequence, StepPlan
from runtime.model.loader import load_model
from runtime.model.scoring import score
from runtime.runner.runner import ModelRunner, build_runner

GREEDY = SamplingParams(temperature=0, max_tokens=200)
TEXT = [number * 37 % 112 for number in range(50)]


def new_sequence(name: str, tokens: list[int], blocks: list[int], sampling: SamplingParams = GREEDY) -> Sequence:
    return Sequence(Request(name, tuple(tokens), sampling, seed=7), list(tokens), block_ids=blocks)


class LogitsRecorder:
    """A decoder that remembers the logits of the last step."""

    def __init__(self, decoder) -> None:
        self.decoder = decoder
        self.last: torch.Tensor

    def __getattr__(self, name):
        return getattr(self.decoder, name)

    def logits(self, hidden):
        self.last = self.decoder.logits(hidden)
        return self.last


def make_runner(decoder, **options) -> ModelRunner:
    return build_runner(LogitsRecorder(decoder), RuntimeConfig(**({"num_blocks": 64, "block_size": 4} | options)))


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_attention_reads_the_sink_logits(dtype, tmp_path):
    """As far from float64 as plain torch in the same dtype, and far nearer than without sinks.

    All experts are chosen, or a rounded number could choose another one, which is as large an error as no sinks."""
    options = VARIANTS["gpt_oss"] | {"head_dim": 32, "num_experts_per_tok": 8}
    folder = save_tiny_model(tmp_path / "model", "gpt_oss", getattr(torch, dtype), **options)
    exact, plain, compiled = (
        load_model(folder, dtype=number, kernels=kernels)
        for number, kernels in (("float64", "reference"), (dtype, "reference"), (dtype, "auto"))
    )
    for decoder in (exact, plain, compiled):
        set_sinks(decoder, 4.0)
    runner = make_runner(compiled, block_size=16)
    assert "compiled" in runner.kernels.attention_reason
    expected = last_logits(exact)
    rounding = (last_logits(plain) - expected).norm()
    assert (logits_after_steps(runner) - expected).norm() < 2 * rounding
    set_sinks(exact, -100.0)
    assert (last_logits(exact) - expected).norm() > 10 * rounding


def set_sinks(decoder, value: float) -> None:
    for layer in decoder.layers:
        layer.attention.sink_logits.fill_(value)


def last_logits(decoder) -> torch.Tensor:
    """Those of the last token of `TEXT` without pages, in float64."""
    return score(decoder, torch.tensor([TEXT]))[0, -1].double()


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma4_text", {"global_head_dim": 64}),
        pytest.param("gemma2", {}, marks=pytest.mark.full),
        pytest.param("qwen3_next", {}, marks=pytest.mark.full),
        pytest.param("llama4_text", {}, marks=pytest.mark.full),
    ],
)
def test_compiled_attention_computes_what_plain_torch_computes(family, options, tmp_path):
    """A prompt, and drafts after it; as far from float64 as plain torch in bfloat16 is."""
    folder = save_tiny_model(
        tmp_path / "model", family, torch.bfloat16, **VARIANTS[family] | {"head_dim": 32} | options
    )
    found = []
    for dtype, kernels in (("float64", "reference"), ("bfloat16", "reference"), ("bfloat16", "auto")):
        runner = make_runner(load_model(folder, dtype=dtype, kernels=kernels), block_size=16)
        assert ("compiled, reads" in runner.kernels.attention_reason) == (kernels == "auto")
        found.append(logits_after_steps(runner))
    exact, plain, compiled = found
    assert (compiled - exact).norm() < 1.5 * (plain - exact).norm()


def logits_after_steps(runner: ModelRunner) -> torch.Tensor:
    """Those of the last token of `TEXT`, in float64."""
    sequence = new_sequence("A", list(TEXT), [3, 1, 2, 0])
    for begin, end in ((0, 45), (45, 49), (49, 50)):
        count, read = end - begin, 0 if begin else NO_STATE
        runner.execute(StepPlan((ScheduledSequence(sequence, begin, count, read, ((count - 1, 0),)),)))
    return runner.decoder.last[0].double().cpu()


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma2", "gemma4_text", "gpt_oss", "llama4_text"])
def test_triton_attention_computes_what_plain_torch_computes(gpu, family, tmp_path):
    """Soft caps, heads by layer and keys of earlier layers, sink logits, chunks of tokens."""
    options = VARIANTS[family] | {"head_dim": 32} | ({"global_head_dim": 64} if "gemma4" in family else {})
    folder, found = save_tiny_model(tmp_path / "model", family, torch.bfloat16, **options), []
    for dtype, triton in (("float64", False), ("bfloat16", False), ("bfloat16", True)):
        decoder = load_model(folder, dtype=dtype, device=str(gpu), kernels="reference")
        runner = make_runner(decoder, block_size=16)
        if triton:
            kernels = runner.kernels
            step = prepare_attention(runner.decoder, kernels.cache, kernels.windows, runner.memory)
            runner.kernels = replace(kernels, attention=step)
        found.append(logits_after_steps(runner))
    exact, plain, fused = found
    # The interpreter cuts bfloat16 off, which doubles errors of rounding.
    assert (fused - exact).norm() < 2.5 * (plain - exact).norm()


@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_cut_and_any_mixture_gives_the_logits_of_the_whole_text(family, seed, tmp_path):
    folder = save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    decoder = load_model(folder, dtype="float64")
    reference, chance = load_reference(folder), random.Random(seed)
    texts = {name: [chance.randrange(112) for _ in range(chance.randint(3, 40))] for name in "ABCDE"}
    expected = {name: reference_logits(reference, torch.tensor([text]))[0] for name, text in texts.items()}
    runner = make_runner(decoder)
    poison(runner.pages.memory)
    if runner.states is not None:
        poison_states(runner.states)
    blocks = chance.sample(range(64), 64)
    sequences = {name: new_sequence(name, [], [blocks.pop() for _ in range(10)]) for name in texts}
    while any(sequence.num_tokens < len(texts[name]) for name, sequence in sequences.items()):
        entries = []
        for name in chance.sample(sorted(texts), chance.randint(1, 5)):
            sequence, start = sequences[name], sequences[name].num_tokens
            count = min(chance.choice([1, 1, 1, 2, 3, 9, 30]), len(texts[name]) - start)
            if count:
                sequence.token_ids += texts[name][start : start + count]
                slot = sorted(texts).index(name)
                read = slot if start else NO_STATE
                entries.append(ScheduledSequence(sequence, start, count, read, ((count - 1, slot),)))
        if not entries:
            continue
        output = runner.execute(StepPlan(tuple(entries)))
        assert set(output.tokens) == {entry.sequence.id for entry in entries}
        rows = {name: row for row, name in enumerate(output.tokens)}
        for entry in entries:
            name, last = entry.sequence.id, entry.start + entry.num_tokens - 1
            torch.testing.assert_close(runner.decoder.last[rows[name]], expected[name][last], rtol=0, atol=1e-10)


def generate(runner: ModelRunner, sequence: Sequence, num_tokens: int, chunk: int = 1000) -> list[int]:
    computed, wanted = 0, sequence.num_tokens + num_tokens
    while sequence.num_tokens < wanted:
        count = min(chunk, sequence.num_tokens - computed)
        output = runner.execute(StepPlan((ScheduledSequence(sequence, computed, count),)))
        computed += count
        for token in output.tokens.get(sequence.id, []):
            sequence.token_ids.append(token.token_id)
    return sequence.token_ids[-num_tokens:]


@pytest.mark.parametrize("chunk", [pytest.param(1000, marks=pytest.mark.full), 7])
def test_greedy_tokens_of_the_demo_model(chunk):
    """128 tokens in float64, as transformers' own generate gives them."""
    prompt = torch.randint(4, 8192, (1, 45), generator=torch.Generator().manual_seed(1))
    model = load_reference(demo_model_path(), exact=False)
    expected = model.generate(prompt, max_new_tokens=128, do_sample=False, eos_token_id=None, pad_token_id=3)[0, 45:]
    runner = make_runner(load_model(demo_model_path(), dtype="float64"), block_size=16)
    blocks = random.Random(0).sample(range(64), 12)
    assert generate(runner, new_sequence("a", prompt[0].tolist(), blocks), 128, chunk) == expected.tolist()


def test_seeded_tokens_do_not_depend_on_the_batch(tiny):
    sampling = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=20)
    prompt = [5, 17, 80, 3, 3]
    alone = generate(make_runner(tiny), new_sequence("a", prompt, list(range(8)), sampling), 20)
    runner = make_runner(tiny)
    sequence = new_sequence("a", prompt, list(range(8)), sampling)
    other = new_sequence("b", list(range(40)), list(range(20, 40)), SamplingParams(temperature=2.0))
    computed, found = {"a": 0, "b": 0}, []
    while len(found) < 20:
        entries = tuple(
            ScheduledSequence(s, computed[s.id], min(3, s.num_tokens - computed[s.id])) for s in (other, sequence)
        )
        output = runner.execute(StepPlan(entries))
        for entry in entries:
            computed[entry.sequence.id] += entry.num_tokens
            entry.sequence.token_ids += [token.token_id for token in output.tokens.get(entry.sequence.id, [])]
        found = sequence.output_token_ids
    assert found[:20] == alone


def test_copied_blocks_continue_a_shared_prefix(tiny):
    prompt = list(range(10, 21))
    runner = make_runner(tiny)
    poison(runner.pages.memory)
    expected = generate(runner, new_sequence("a", prompt, [0, 1, 2, 3, 4]), 8)
    poison_free = runner.pages.memory.tensors["keys"][:, :3].clone()
    fork = new_sequence("b", prompt, [0, 1, 9, 10, 11])
    plan = StepPlan((ScheduledSequence(fork, 10, 1),), copies=(BlockCopy(source=2, target=9, num_tokens=2),))
    fork.token_ids.append(runner.execute(plan).tokens["b"][0].token_id)
    while fork.num_output_tokens < 8:
        step = StepPlan((ScheduledSequence(fork, fork.num_tokens - 1, 1),))
        fork.token_ids.append(runner.execute(step).tokens["b"][0].token_id)
    assert fork.output_token_ids == expected
    assert torch.equal(runner.pages.memory.tensors["keys"][:, :3], poison_free)


def test_a_sequence_that_is_not_finite_fails_alone(tiny):
    """Its keys and values stay in its blocks; the next owner of a block must not see them."""
    runner = make_runner(tiny)
    good = new_sequence("good", [1, 2, 3], [0, 1])
    expected = runner.execute(StepPlan((ScheduledSequence(good, 0, 3),))).tokens["good"]
    bad = new_sequence("bad", [4, 5, 6, 7, 8], [2, 3])
    runner.execute(StepPlan((ScheduledSequence(bad, 0, 5),)))
    for pages in runner.pages.memory.tensors.values():
        pages[:, 2] = float("nan")
    bad.token_ids.append(9)
    good.token_ids.append(expected[0].token_id)
    fresh = make_runner(tiny)
    fresh.execute(StepPlan((ScheduledSequence(good, 0, 3),)))
    alone = fresh.execute(StepPlan((ScheduledSequence(good, 3, 1),))).tokens["good"]
    both = runner.execute(StepPlan((ScheduledSequence(good, 3, 1), ScheduledSequence(bad, 5, 1))))
    assert both.tokens["good"] == alone
    assert "not finite" in both.tokens["bad"][0].error
    heir = new_sequence("heir", [1, 2], [2])
    assert not runner.execute(StepPlan((ScheduledSequence(heir, 0, 2),))).tokens["heir"][0].error


def test_a_plan_without_entries_only_copies(tiny):
    runner = make_runner(tiny)
    runner.pages.memory.tensors["values"][:, 0] = 3.0
    assert runner.execute(StepPlan((), copies=(BlockCopy(0, 5, 4),))).tokens == {}
    assert (runner.pages.memory.tensors["values"][:, 5] == 3).all()


def test_spans_that_do_not_reach_the_end_give_no_token(tiny):
    sequence = new_sequence("a", list(range(12)), [0, 1, 2])
    assert make_runner(tiny).execute(StepPlan((ScheduledSequence(sequence, 0, 7),))).tokens == {}


def serve(decoder, requests, arrivals=None, **options) -> dict[str, list[int]]:
    """Tokens by request id. `arrivals`: the step before which each request comes in."""
    engine, deltas = small_engine(decoder, **options), {}
    waiting = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    for step in itertools.count():
        while waiting and waiting[0][0] <= step:
            name, prompt, sampling = waiting.pop(0)[1]
            engine.add_request(prompt, sampling, name)
        if not waiting:
            break
        collect(engine, deltas)
    found = drain(engine, deltas)
    assert not any(delta.error for parts in found.values() for delta in parts)
    return {name: tokens_of(parts) for name, parts in found.items()}


def many_requests() -> list[tuple[str, list[int], SamplingParams]]:
    chance = random.Random(4)
    shared = [chance.randrange(112) for _ in range(17)]
    requests = []
    for number in range(9):
        prompt = shared[: chance.choice([0, 8, 17])] + [chance.randrange(112) for _ in range(chance.randint(1, 20))]
        options = {"temperature": chance.choice([0, 0.9]), "max_tokens": chance.randint(1, 25)}
        requests.append((f"r{number}", prompt, SamplingParams(**options, top_p=0.9, seed=number, ignore_eos=True)))
    return requests


@pytest.fixture(scope="module")
def expected(tiny):
    """Each request alone, in one piece, with nothing cached."""
    answers: dict[str, list[int]] = {}
    for request in many_requests():
        answers |= serve(tiny, [request], prefix_caching=False, prefill_chunk=512)
    return answers


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [200, 17])
@pytest.mark.parametrize(("chunk", "budget"), [(5, 12), (64, 512)])
@pytest.mark.parametrize("spread", [0, 7])
def test_tokens_do_not_depend_on_scheduling(prefix_caching, num_blocks, chunk, budget, spread, tiny, expected):
    requests = many_requests()
    options = {"prefix_caching": prefix_caching, "prefill_chunk": chunk, "max_num_batched_tokens": budget}
    arrivals = [number * spread % 23 for number in range(len(requests))]
    assert serve(tiny, requests, arrivals, num_blocks=num_blocks, **options) == expected


@pytest.mark.full
def test_demo_model_equals_transformers_while_others_come_and_go():
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(4, 8192, (length,), generator=generator).tolist() for length in (30, 70, 5, 41)]
    model = load_reference(demo_model_path(), exact=False)
    expected = model.generate(
        torch.tensor([prompts[0]]), max_new_tokens=128, do_sample=False, eos_token_id=None, pad_token_id=3
    )
    greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    requests = [("main", prompts[0], greedy)]
    for number, prompt in enumerate(prompts[1:]):
        requests.append((f"guest {number}", prompt, SamplingParams(temperature=1, seed=number, max_tokens=9)))
    decoder = load_model(demo_model_path(), dtype="float64")
    found = serve(decoder, requests, arrivals=[0, 3, 20, 50], block_size=16, prefill_chunk=16)
    assert found["main"] == expected[0, 30:].tolist()
