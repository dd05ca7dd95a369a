"""An engine in a process of its own: equal to one in a thread, and neither process outlives the other."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from engine_apart import EXITS, FAILS, HANGS, PANICS, engine_process, new_engine
from fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens

from compress.common.errors import RequestError
from runtime.core.request import (
    Delta,
    FinishReason,
    Grammar,
    GrammarKind,
    RequestOptions,
    SamplingParams,
    TokenLogprobs,
)
from runtime.engine.engine_client import EngineClient
from runtime.engine.engine_loop import Add, EngineLoop, Status, Stop
from runtime.engine.engine_process import EngineProcess, packed
from runtime.engine.engine_thread import EngineThread

SECONDS = 30.0
ENDLESS = SamplingParams(max_tokens=900, seed=0)

Test = Callable[[EngineClient], Coroutine[Any, Any, Any]]


async def each(groups: AsyncGenerator[list[Delta], None]) -> AsyncGenerator[Delta, None]:
    async with aclosing(groups):
        async for deltas in groups:
            for delta in deltas:
                yield delta


async def collect(engine: EngineClient, prompt: list[int], sampling: SamplingParams) -> list[Delta]:
    return [delta async for delta in each(engine.generate(prompt, sampling))]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def apart(test: Test, stall_seconds: float = 60.0) -> Any:
    """Runs a test with an engine in a process."""

    async def main(engine: EngineProcess) -> Any:
        engine.start()
        try:
            return await asyncio.wait_for(test(engine), SECONDS)
        finally:
            await asyncio.to_thread(engine.stop, 5.0)

    with engine_process(stall_seconds) as engine:
        return asyncio.run(main(engine))


def in_thread(test: Test) -> Any:
    """Runs a test with an engine in a thread."""
    engine = EngineThread(new_engine())
    engine.start()
    try:
        return asyncio.run(test(engine))
    finally:
        assert engine.stop()


SAMPLINGS = [
    SamplingParams(max_tokens=20, seed=0),
    SamplingParams(max_tokens=20, seed=1, n=3),
    SamplingParams(max_tokens=20, seed=2, logprobs=1),
    SamplingParams(max_tokens=200, seed=3, stop=("a", "e")),
    SamplingParams(max_tokens=200, seed=4, stop_token_ids=(7, 9)),
    SamplingParams(max_tokens=200, seed=4, stop_token_ids=(7, 9), include_stop=True),
    SamplingParams(max_tokens=0, seed=0),
]


def summary(deltas: list[Delta]) -> list[Any]:
    """Contents of answers, however they were divided."""
    answers = {delta.index: Delta("", index=delta.index) for delta in deltas}
    for delta in deltas:
        answers[delta.index].append(delta)
    return [
        (index, each.text, each.token_ids, each.logprobs, each.finish_reason, each.stop_string, each.num_output_tokens)
        for index, each in sorted(answers.items())
    ]


def test_answers_are_those_of_a_thread() -> None:
    async def ask(engine: EngineClient) -> list[Any]:
        prompts = [[index % 30, 1, 2] for index in range(3 * len(SAMPLINGS))]
        tasks = [collect(engine, prompt, SAMPLINGS[i % len(SAMPLINGS)]) for i, prompt in enumerate(prompts)]
        return [summary(deltas) for deltas in await asyncio.gather(*tasks)]

    found = apart(ask)
    assert found == in_thread(ask)
    assert found[0][0][2] == expected_tokens([0, 1, 2], 20)
    assert {reason for answers in found for *_, reason, _, _ in answers} == {FinishReason.LENGTH, FinishReason.STOP}


def test_a_thousand_that_vanish_leave_nothing() -> None:
    async def ask(engine: EngineClient) -> None:
        async def client(index: int) -> None:
            async with aclosing(engine.generate([index % 30, 1, 2], ENDLESS)) as stream:
                for _ in range(index % 3):
                    await anext(stream)

        await asyncio.gather(*(client(index) for index in range(1000)))
        await until(lambda: engine.check().is_idle)
        assert "runtime_kv_cache_usage_perc 0.0" in await engine.render_metrics()
        assert not engine._streams

    apart(ask)


def test_refusals_come_from_the_engine() -> None:
    async def ask(engine: EngineClient) -> None:
        bad = Grammar(GrammarKind.REGEX, "(")
        for prompt, sampling in (([1] * 999, ENDLESS), ([99], ENDLESS), ([1], SamplingParams(grammar=bad))):
            with pytest.raises(RequestError):
                await collect(engine, prompt, sampling)
        first = each(engine.generate([1], ENDLESS, "same"))
        await anext(first)
        with pytest.raises(RequestError, match="same"):
            await anext(engine.generate([1], ENDLESS, "same"))
        assert (await anext(first)).finish_reason is None
        assert (await collect(engine, [FAILS], ENDLESS))[-1].finish_reason is FinishReason.ERROR
        assert engine.check().healthy

    apart(ask)


def test_a_long_prompt_does_not_wait_for_room() -> None:
    """Its message is longer than what the socket holds."""

    async def ask(engine: EngineClient) -> None:
        began = time.monotonic()
        task = asyncio.ensure_future(collect(engine, [1] * 2_000_000, ENDLESS))
        await asyncio.sleep(0)
        assert time.monotonic() - began < SECONDS
        with pytest.raises(RequestError):
            await task
        assert len(await collect(engine, [1], SamplingParams(5))) == 5

    apart(ask)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [(PANICS, "PanicError: unreachable"), (EXITS, "status 3"), (signal.SIGKILL, f"signal {signal.SIGKILL}")],
)
def test_the_end_of_the_engine_ends_each_request_with_its_reason(trouble: int, words: str) -> None:
    async def ask(engine: EngineProcess) -> None:
        others = [asyncio.ensure_future(collect(engine, [index], ENDLESS)) for index in range(3)]
        await until(lambda: engine.check().num_running == 3)
        if trouble == signal.SIGKILL:
            engine.process.kill()
        else:
            others.append(asyncio.ensure_future(collect(engine, [trouble], ENDLESS)))
        for deltas in await asyncio.gather(*others):
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert words in deltas[-1].error
        health = engine.check()
        assert (health.healthy, health.has_ended) == (False, True)
        assert words in health.reason
        assert (await collect(engine, [1], ENDLESS))[-1].finish_reason is FinishReason.ERROR
        assert await engine.render_metrics() == ""

    apart(ask)


def test_a_stall_fails_requests_and_the_process_is_killed_at_the_end() -> None:
    async def ask(engine: EngineProcess) -> None:
        found = await collect(engine, [HANGS], ENDLESS)
        assert found[-1].finish_reason is FinishReason.ERROR
        assert engine.check().seconds_since_progress > 0.5
        assert not engine.check().healthy
        assert not await asyncio.to_thread(engine.stop, 0.1)
        assert engine.process.returncode == -signal.SIGKILL

    apart(ask, stall_seconds=0.5)


def test_the_engine_ends_when_its_server_is_gone() -> None:
    with engine_process() as engine:
        engine._socket.close()
        assert engine.process.wait(SECONDS) == 1


def test_stopping_ends_requests_and_the_process() -> None:
    async def ask(engine: EngineProcess) -> None:
        running = asyncio.ensure_future(collect(engine, [1], ENDLESS))
        await until(lambda: engine.check().num_running == 1)
        assert await asyncio.to_thread(engine.stop)
        assert (await running)[-1].finish_reason is FinishReason.ABORT
        assert engine.process.returncode == 0
        health = engine.check()
        assert (health.healthy, health.has_ended) == (False, False)

    apart(ask)


def test_a_token_alone_is_packed_as_numbers() -> None:
    plain = Delta("a", token_ids=[5], num_output_tokens=2, index=1)
    others = [
        Delta("a", token_ids=[5], num_output_tokens=1),
        Delta("a", token_ids=[5, 6], num_output_tokens=3),
        Delta("a", "x", token_ids=[5], num_output_tokens=2),
        Delta("a", token_ids=[5], num_output_tokens=2, logprobs=[TokenLogprobs(-0.5)]),
        Delta("a", token_ids=[5], num_output_tokens=2, finish_reason=FinishReason.LENGTH),
    ]
    events = [(7, plain), *((8, other) for other in others), (9, RequestError("no", "x"))]
    assert packed(events, Status()) == (Status(), [7, 1, 2, 5], events[1:])


@pytest.mark.parametrize("options", [{}, {"include_stop": True}, {"skip_special_tokens": False}, {"ignore_eos": True}])
@pytest.mark.parametrize("n", [1, 2])
def test_texts_of_the_client_are_those_of_the_engine(options: dict[str, bool], n: int) -> None:
    """Bytes of characters, special tokens, end tokens and ends within a character."""
    script = [0, 1, 2, 40, *range(3, 30), 48, 49, 5, 47]
    for end in (3, 17, 47):
        runner = FakeRunner(2000, 4, 1000, frozenset({end}))
        runner.script = [token % VOCAB_SIZE for token in script]
        sampling = SamplingParams(max_tokens=len(script) - 2, seed=0, n=n, **options)
        engine = new_engine(runner)
        engine.add_request([1, 2], sampling, options=RequestOptions())
        expected: list[Delta] = []
        while engine.has_work:
            expected += engine.step()

        async def ask(sampling: SamplingParams, runner: FakeRunner) -> list[Delta]:
            thread = EngineThread(new_engine(runner))
            thread.start()
            try:
                return await collect(thread, [1, 2], sampling)
            finally:
                await asyncio.to_thread(thread.stop)

        assert summary(asyncio.run(ask(sampling, runner))) == summary(expected)


def test_messages_put_together_are_seen_together() -> None:
    runner = FakeRunner(2000, 4, 1000)
    seen: list[int] = []

    def deliver(events: Any, status: Status) -> None:
        if events:
            seen.append(len(events))
            if sum(seen) == NUM_TOGETHER:
                loop.put(Stop(when_idle=True))

    loop = EngineLoop(new_engine(runner), deliver)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    sampling = SamplingParams(max_tokens=1, seed=0)
    loop.put(*(Add(i, str(i), [5], sampling, RequestOptions()) for i in range(NUM_TOGETHER)))
    thread.join(SECONDS)
    assert seen == [NUM_TOGETHER]


NUM_TOGETHER = 12
