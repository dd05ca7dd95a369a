import itertools

import pytest
from engines import drain as run
from engines import tokens_of as tokens
from fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, FinishReason, RequestOptions, SamplingParams
from runtime.engine.engine import Engine
from runtime.text.tokenizer import Tokenizer


def make_engine(runner: FakeRunner | None = None, tokenizer: Tokenizer | None = None, **options: object) -> Engine:
    runner = runner or FakeRunner()
    config = RuntimeConfig(**({"block_size": runner.block_size, "max_num_batched_tokens": 64} | options))
    return Engine(runner, tokenizer, config)


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def prompts() -> list[list[int]]:
    """Equal prefixes of many lengths, whole equal prompts, and strangers."""
    base = [(7 * i) % VOCAB_SIZE for i in range(40)]
    return [base[:n] for n in (1, 3, 4, 8, 8, 17, 24, 40, 8)] + [[i, *base[:9]] for i in range(3)]


CONFIGS = list(
    itertools.product((True, False), (1, 3, 64), (20, 200), (4, 64))
)  # prefix caching, chunk, blocks, token budget


@pytest.mark.parametrize(("prefix_caching", "prefill_chunk", "num_blocks", "budget"), CONFIGS)
def test_tokens_do_not_depend_on_caching_chunks_blocks_or_budget(
    prefix_caching: bool, prefill_chunk: int, num_blocks: int, budget: int
) -> None:
    options = {"prefix_caching": prefix_caching, "prefill_chunk": prefill_chunk, "max_num_batched_tokens": budget}
    engine = make_engine(FakeRunner(num_blocks=num_blocks), **options)
    for index, prompt in enumerate(prompts()):
        engine.add_request(prompt, SamplingParams(max_tokens=25, seed=index % 2), str(index))
        engine.step()
    deltas = run(engine)
    # The first request may have ended before `run`; everybody else is compared as a whole.
    for index, prompt in list(enumerate(prompts()))[1:]:
        wanted = expected_tokens(prompt, 25, index % 2)
        assert wanted[-len(tokens(deltas[str(index)])) :] == tokens(deltas[str(index)])
        assert deltas[str(index)][-1].num_output_tokens == 25
        assert deltas[str(index)][-1].finish_reason is FinishReason.LENGTH
    if num_blocks == 20 and budget == 64:
        assert engine.scheduler.stats.num_preemptions > 0
    if prefix_caching:
        assert engine.scheduler.stats.num_prefix_hits > 0


def test_requests_are_answered_in_order_of_arrival() -> None:
    engine = make_engine(max_num_seqs=2)
    for index in range(6):
        engine.add_request([index, 1, 2], SamplingParams(max_tokens=4), str(index))
    ends = [d.request_id for _ in range(40) for d in engine.step() if d.finish_reason]
    assert ends == [str(index) for index in range(6)]


def test_end_tokens_end_and_can_be_ignored() -> None:
    prompt = [1, 2, 3]
    tenth = expected_tokens(prompt, 10)[-1]
    first = expected_tokens(prompt, 10).index(tenth) + 1
    runner = FakeRunner(eos_token_ids=frozenset({tenth}))
    engine = make_engine(runner)
    engine.add_request(prompt, SamplingParams(max_tokens=20, seed=0), "eos")
    engine.add_request(prompt, SamplingParams(max_tokens=20, seed=0, ignore_eos=True), "ignore")
    engine.add_request(
        prompt, SamplingParams(max_tokens=20, seed=0, ignore_eos=True, stop_token_ids=(tenth,)), "stop id"
    )
    engine.add_request(prompt, SamplingParams(max_tokens=first, seed=0), "both at once")
    deltas = run(engine)
    for name, count, reason in (
        ("eos", first, FinishReason.STOP),
        ("ignore", 20, FinishReason.LENGTH),
        ("stop id", first, FinishReason.STOP),
        ("both at once", first, FinishReason.STOP),
    ):
        assert (len(tokens(deltas[name])), deltas[name][-1].finish_reason) == (count, reason), name
        assert [d.finish_reason for d in deltas[name][:-1]] == [None] * (len(deltas[name]) - 1)


def test_a_delta_tells_the_numbers() -> None:
    engine = make_engine()
    prompt = list(range(10))
    for name in ("first", "second"):
        engine.add_request(prompt, SamplingParams(max_tokens=3, logprobs=1), name)
        deltas = run(engine)[name]
        last = deltas[-1]
        assert [d.num_output_tokens for d in deltas] == [1, 2, 3]
        assert all(len(d.logprobs) == len(d.token_ids) == 1 for d in deltas)
        assert (last.num_prompt_tokens, last.num_cached_tokens) == (10, 0 if name == "first" else 8)


def test_salts_keep_tenants_apart() -> None:
    engine = make_engine()
    for salt, cached in (("a", 0), ("b", 0), ("a", 8)):
        request_id = engine.add_request(
            list(range(10)), SamplingParams(max_tokens=1), options=RequestOptions(cache_salt=salt)
        )
        assert run(engine)[request_id][-1].num_cached_tokens == cached


@pytest.mark.parametrize(
    ("prefix_caching", "num_blocks", "num_sequences"), [(True, 99, 8), (False, 99, 8), (True, 9, 2), (False, 9, 3)]
)
@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_several_answers_share_a_prompt_and_nothing_else(
    prefix_caching: bool, num_blocks: int, num_sequences: int, length: int
) -> None:
    runner = FakeRunner(num_blocks=num_blocks)
    engine = make_engine(runner, prefix_caching=prefix_caching, max_num_seqs=num_sequences)
    prompt = list(range(length))
    for n, name in ((3, "three"), (1, "one"), (4, "four")):
        engine.add_request(prompt, SamplingParams(max_tokens=20, seed=5, n=n), name)
    deltas = run(engine)
    one, three, four = (
        [tokens(deltas[name], i) for i in range(n)] for name, n in (("one", 1), ("three", 3), ("four", 4))
    )
    assert one == three[:1] == [expected_tokens(prompt, 20, 5)]
    assert three == four[:3]
    assert len(set(map(tuple, four))) == 4
    assert sum(delta.finish_reason is FinishReason.LENGTH for delta in deltas["four"]) == 4
    if num_blocks == 99 and length == 7:
        assert engine.scheduler.stats.num_copies > 0
        computed = sum(sum(plan.values()) for plan in runner.plans)
        assert computed == 3 * length + 5 + 8 * 19, "each prompt once, one token of it per fork"


@pytest.mark.parametrize("started", [False, True])
def test_aborting_and_failing_take_all_answers(started: bool) -> None:
    engine = make_engine(prefill_chunk=4)
    for name in ("abort", "bad", "rest"):
        engine.add_request(list(range(9)), SamplingParams(max_tokens=9, n=3), name)
    for _ in range(3 if not started else 8):
        early = engine.step()
    assert bool({d.index for d in early if d.request_id == "abort"} - {0}) == started
    engine.abort("abort")
    engine.runner.broken_ids |= {"bad", "bad/1", "bad/2"}
    deltas = run(engine)
    assert "abort" not in deltas
    assert {d.index for d in deltas["bad"] if d.finish_reason is FinishReason.ERROR} == {0, 1, 2}
    assert {d.index for d in deltas["rest"] if d.finish_reason is FinishReason.LENGTH} == {0, 1, 2}
    assert not engine.output_processor._requests
    assert not engine.output_processor._times


def test_urgent_requests_are_answered_first() -> None:
    engine = make_engine(max_num_seqs=1)
    for index, priority in enumerate((0, 2, 0, -1)):
        options = RequestOptions(priority=priority)
        engine.add_request([index], SamplingParams(max_tokens=3), str(index), options)
    ends = [d.request_id for _ in range(12) for d in engine.step() if d.finish_reason]
    assert ends == ["3", "0", "2", "1"]
    with pytest.raises(RequestError, match="priority=101"):
        RequestOptions(priority=101)


def test_a_time_limit_ends_running_and_waiting_requests_with_what_they_have() -> None:
    now = 0.0
    engine = Engine(FakeRunner(), None, RuntimeConfig(block_size=4, max_num_seqs=2), clock=lambda: now)
    for name, limit in (("runs", 2.5), ("endless", None), ("waits", 2.5)):
        sampling = SamplingParams(max_tokens=5, seed=0, n=2 if name == "waits" else 1)
        engine.add_request([1, 2], sampling, name, RequestOptions(time_limit=limit))
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
        now += 1
    ends = {(d.request_id, d.index): (d.finish_reason, d.num_output_tokens) for d in deltas if d.finish_reason}
    assert ends == {
        ("runs", 0): (FinishReason.TIMEOUT, 3),
        ("endless", 0): (FinishReason.LENGTH, 5),
        ("waits", 0): (FinishReason.TIMEOUT, 0),
        ("waits", 1): (FinishReason.TIMEOUT, 0),
    }
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    with pytest.raises(RequestError, match="time_limit=0"):
        RequestOptions(time_limit=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(demo_model_path())


def scripted(tokenizer: Tokenizer, script: list[int]) -> FakeRunner:
    runner = FakeRunner(eos_token_ids=frozenset({0}))
    runner.vocab_size = tokenizer.vocab_size
    runner.script = script
    return runner


@pytest.mark.parametrize("stop", ["fox", "ick brown", "😀 j", "r the"])
def test_stop_strings_are_found_across_tokens_and_never_shown(tokenizer: Tokenizer, stop: str) -> None:
    whole = "The quick brown fox 😀 jumps over the lazy dog"
    script = tokenizer.encode(whole)
    engine = make_engine(scripted(tokenizer, script), tokenizer)
    engine.add_request([5], SamplingParams(max_tokens=len(script), stop=(stop, "never")), "a")
    deltas = run(engine)["a"]
    assert text(deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert len(tokens(deltas)) < len(script)


def test_text_held_for_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("one two thr")
    engine = make_engine(scripted(tokenizer, script), tokenizer)
    engine.add_request([5], SamplingParams(max_tokens=len(script), stop=("two three",)), "a")
    deltas = run(engine)["a"]
    assert text(deltas) == "one two thr"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_text_held_back_comes_out_when_time_is_over(tokenizer: Tokenizer) -> None:
    now, script = 0.0, tokenizer.encode("one two three")
    config = RuntimeConfig(block_size=4, max_num_seqs=1)
    engine = Engine(scripted(tokenizer, script), tokenizer, config, clock=lambda: now)
    sampling = SamplingParams(max_tokens=len(script), stop=("two three four",))
    engine.add_request([5], sampling, "a", RequestOptions(time_limit=1))
    engine.add_request(tokenizer.encode("😀")[:1], sampling, "b", RequestOptions(time_limit=1))
    deltas = [delta for _ in script[1:] for delta in engine.step()]
    assert text(deltas).strip() == "one"
    now = 2.0
    *_, first, second = [*deltas, *engine.step()]
    assert (first.text.strip(), first.finish_reason) == ("two", FinishReason.TIMEOUT)
    assert (second.text, second.finish_reason) == ("", FinishReason.TIMEOUT), "half of its prompt is not its own"


def test_end_tokens_have_no_text_and_half_characters_are_flushed(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("😀")
    assert len(smile) > 1
    engine = make_engine(scripted(tokenizer, [*tokenizer.encode("ab"), smile[0], 0]), tokenizer)
    engine.add_request([5], SamplingParams(max_tokens=20), "a")
    deltas = run(engine)["a"]
    assert text(deltas) == "ab\ufffd"
    assert deltas[-1].token_ids == [0]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_impossible_requests_are_refused_before_they_are_queued() -> None:
    engine = make_engine(FakeRunner(num_blocks=4, max_model_len=12))
    for prompt, sampling, message in (
        ([], SamplingParams(), r"^\D+$"),
        ([1, VOCAB_SIZE], SamplingParams(max_tokens=1), f"token id {VOCAB_SIZE}.*0 to {VOCAB_SIZE - 1}"),
        ([-1], SamplingParams(max_tokens=1), "token id -1"),
        ([1] * 12, SamplingParams(max_tokens=1), r" 12 .* 12\. .* 11 "),
        ([1] * 10, SamplingParams(max_tokens=3), r"max_tokens=3 .* 12\. "),
        ([1], SamplingParams(max_tokens=1, stop=("x",)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt, sampling)
    assert not engine.has_work
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(5, -1))


def test_an_id_is_used_once_at_a_time() -> None:
    engine = make_engine()
    engine.add_request([1], SamplingParams(max_tokens=1), "a")
    with pytest.raises(RequestError, match="'a'"):
        engine.add_request([1], SamplingParams(max_tokens=1), "a")
    run(engine)
    engine.add_request([1], SamplingParams(max_tokens=1), "a")


def test_ids_of_answers_that_have_not_begun_are_in_use_too() -> None:
    engine, prompt = make_engine(), [1, 2, 3]
    engine.add_request(prompt, SamplingParams(max_tokens=4, n=3, seed=0), "a")
    with pytest.raises(RequestError, match="'a/1'"):
        engine.add_request(prompt, SamplingParams(max_tokens=4, seed=0), "a/1")
    engine.add_request(prompt, SamplingParams(max_tokens=4, seed=0), "a/b")
    ends = [(d.request_id, d.index) for deltas in run(engine).values() for d in deltas if d.finish_reason]
    assert sorted(ends) == [("a", 0), ("a", 1), ("a", 2), ("a/b", 0)]


def test_a_row_that_is_not_finite_fails_alone_and_poisons_nobody() -> None:
    engine = make_engine()
    engine.runner.broken_ids.add("bad")
    prompt = list(range(12))
    engine.add_request(prompt, SamplingParams(max_tokens=5, seed=0), "bad")
    engine.add_request([3, *prompt], SamplingParams(max_tokens=5, seed=0), "good")
    deltas = run(engine)
    assert deltas["bad"][-1].finish_reason is FinishReason.ERROR
    assert deltas["bad"][-1].error == "logits are not finite"
    assert tokens(deltas["good"]) == expected_tokens([3, *prompt], 5)
    engine.add_request(prompt, SamplingParams(max_tokens=5, seed=0), "again")
    deltas = run(engine)
    assert deltas["again"][-1].num_cached_tokens == 0
    assert tokens(deltas["again"]) == expected_tokens(prompt, 5)


def test_a_runner_that_raises_fails_its_step_and_the_engine_goes_on() -> None:
    engine = make_engine(max_num_seqs=2)
    for index in range(3):
        engine.add_request([index, 1], SamplingParams(max_tokens=4, seed=0), str(index))
    engine.step()
    engine.runner.failure = MemoryError("no room")
    failed = engine.step()
    assert {(d.request_id, d.finish_reason) for d in failed} == {("0", FinishReason.ERROR), ("1", FinishReason.ERROR)}
    assert all("MemoryError: no room" in delta.error for delta in failed)
    assert tokens(run(engine)["2"]) == expected_tokens([2, 1], 4)
    assert engine.healthy
    assert engine.metrics.step_errors_total == 1


def test_failures_in_a_row_make_it_unhealthy_until_a_step_is_good() -> None:
    engine = make_engine()
    for _ in range(3):
        assert engine.healthy
        engine.add_request([1], SamplingParams(max_tokens=1))
        engine.runner.failure = RuntimeError("device lost")
        engine.step()
    assert not engine.healthy
    engine.add_request([1], SamplingParams(max_tokens=1))
    run(engine)
    assert engine.healthy


def test_aborting_frees_at_once_is_idempotent_and_leaves_others_alone() -> None:
    engine = make_engine()
    for name in ("a", "b", "queued"):
        engine.add_request([4] * 9, SamplingParams(max_tokens=9, seed=0), name)
    engine.step()
    for _ in range(2):
        engine.abort("a")
        engine.abort("queued")
        engine.abort("unknown")
    engine.scheduler.check()
    assert len(engine.scheduler.running) == 1
    rest = run(engine)
    assert set(rest) == {"b"}
    assert tokens(rest["b"]) == expected_tokens([4] * 9, 9)[-len(tokens(rest["b"])) :]
    assert engine.metrics.request_success_total == {"abort": 2, "length": 1}


def test_seeds_left_out_are_chosen_reproducibly_and_differ() -> None:
    def outputs(seed: int) -> list[list[int]]:
        engine = make_engine(seed=seed)
        for name in "abc":
            engine.add_request([1, 2], SamplingParams(max_tokens=8), name)
        return [tokens(deltas) for _, deltas in sorted(run(engine).items())]

    assert outputs(1) == outputs(1) != outputs(2)
    assert len(set(map(tuple, outputs(1)))) == 3


def test_metrics_count_what_happened() -> None:
    now = itertools.count()
    engine = Engine(FakeRunner(), None, RuntimeConfig(block_size=4), clock=lambda: float(next(now)))
    for _ in range(2):
        engine.add_request(list(range(9)), SamplingParams(max_tokens=3))
        run(engine)
    lines = [line.rsplit(" ", 1) for line in engine.render_metrics().splitlines() if line[0] != "#"]
    figures = {name.removeprefix("runtime_"): float(value) for name, value in lines}
    expected = {
        "prompt_tokens_total": 18,
        "generation_tokens_total": 6,
        "prefix_cache_hits_total": 8,
        'request_success_total{finished_reason="length"}': 2,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 4,
        'e2e_request_latency_seconds_bucket{le="+Inf"}': 2,
        "num_requests_running": 0,
        "kv_cache_usage_perc": 0,
    }
    assert {name: figures[name] for name in expected} == expected
