import asyncio
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import partial

import pytest
from fake_runner import FakeRunner, expected_tokens

from compress.common.errors import RequestError
from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, FinishReason, SamplingParams
from runtime.core.step import StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.engine.engine_thread import EngineThread

STALL_SECONDS = 0.5


class GatedRunner(FakeRunner):
    """Steps wait while `gate` is closed, in which case they are `held`, and take `seconds`."""

    def __init__(self, num_blocks: int = 2000, max_model_len: int = 1000) -> None:
        super().__init__(num_blocks, 4, max_model_len)
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepOutput:
        if not self.gate.is_set():
            self.held.set()
        self.gate.wait()
        time.sleep(self.seconds)
        return super().execute(plan)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.full)], ids=["serial", "overlapped"])
def runner(request: pytest.FixtureRequest) -> GatedRunner:
    runner = GatedRunner()
    runner.overlaps = request.param
    return runner


@pytest.fixture
def thread(runner: GatedRunner) -> Iterator[EngineThread]:
    config = RuntimeConfig(block_size=4, max_num_batched_tokens=64, max_num_seqs=16)
    thread = EngineThread(Engine(runner, None, config))
    thread.start()
    yield thread
    runner.gate.set()
    assert thread.stop()


async def each(groups: AsyncGenerator[list[Delta], None]) -> AsyncGenerator[Delta, None]:
    """Deltas one by one, however many of them come together."""
    async with aclosing(groups):
        async for deltas in groups:
            for delta in deltas:
                yield delta


async def collect(thread: EngineThread, prompt: list[int], max_tokens: int = 20) -> list[Delta]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return [delta async for delta in each(thread.generate(prompt, sampling))]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until_idle(thread: EngineThread) -> None:
    pool = thread.engine.scheduler.pool
    await until(lambda: not thread.engine.has_work and pool.num_free == pool.num_blocks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def test_fifty_at_once_of_which_some_leave(thread: EngineThread) -> None:
    prompts = [[index % 50, 1, 2, 3, 4] for index in range(50)]

    async def client(index: int) -> list[Delta]:
        if index % 5 == 0:
            async for _ in thread.generate(prompts[index], SamplingParams(max_tokens=900, seed=0)):
                break  # leaving the loop closes the generator when it is collected; cancelling does it at once
            return []
        return await collect(thread, prompts[index])

    async def main() -> list[list[Delta]]:
        tasks = [asyncio.create_task(client(index)) for index in range(50)]
        endless = [asyncio.create_task(collect(thread, [49, index], 900)) for index in range(10)]
        results = await asyncio.gather(*tasks)
        for task in endless:
            task.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        await until_idle(thread)
        return results

    for index, deltas in enumerate(asyncio.run(main())):
        if deltas:
            assert tokens(deltas) == expected_tokens(prompts[index], 20)
            assert deltas[-1].finish_reason is FinishReason.LENGTH
    thread.engine.scheduler.check()


def test_a_thousand_clients_that_vanish_leave_every_block_free(thread: EngineThread) -> None:
    async def client(index: int) -> None:
        sampling = SamplingParams(max_tokens=900, n=1 + index % 2)
        async with aclosing(thread.generate([index % 50, 1, 2], sampling)) as stream:
            for _ in range(index % 3):
                await anext(stream)
            if index % 3 == 0:
                await asyncio.wait_for(anext(stream), 0.001 * (index % 7))

    async def main() -> None:
        await asyncio.gather(*(client(index) for index in range(1000)), return_exceptions=True)
        await until_idle(thread)
        assert not thread._streams

    asyncio.run(main())
    thread.engine.scheduler.check()
    assert thread.check().healthy


def test_an_answer_that_was_complete_is_not_aborted(thread: EngineThread) -> None:
    asyncio.run(collect(thread, [1, 2]))
    assert thread.engine.metrics.request_success_total == {"length": 1}
    assert thread.loop.messages.empty()


def test_several_answers_come_out_of_one_generator(thread: EngineThread) -> None:
    async def main() -> None:
        sampling = SamplingParams(max_tokens=20, seed=0, n=3)
        deltas = [delta async for delta in each(thread.generate([1, 2], sampling))]
        assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
        assert tokens([delta for delta in deltas if delta.index == 0]) == expected_tokens([1, 2], 20)
        stream = each(thread.generate([1, 2], SamplingParams(max_tokens=900, n=3)))
        while (await anext(stream)).index != 2:
            pass
        await stream.aclose()
        await until_idle(thread)
        assert not thread._streams

    asyncio.run(main())


def test_refusals_reach_the_caller(thread: EngineThread, runner: GatedRunner) -> None:
    runner.seconds = 0.005

    async def main() -> None:
        with pytest.raises(RequestError, match="999 prompt"):
            await collect(thread, [1] * 999, 2)
        first = each(thread.generate([1], SamplingParams(max_tokens=900), "same"))
        await anext(first)
        with pytest.raises(RequestError, match="'same'"):
            await anext(thread.generate([1], SamplingParams(max_tokens=1), "same"))
        assert (await anext(first)).finish_reason is None, "the second must not have ended the first"
        await first.aclose()
        await until_idle(thread)

    asyncio.run(main())


def test_who_leaves_before_being_refused_ends_nobody_else(thread: EngineThread, runner: GatedRunner) -> None:
    async def main() -> None:
        first = each(thread.generate([1], SamplingParams(max_tokens=900), "same"))
        start = await anext(first)
        runner.gate.clear()
        await until(runner.held.is_set)
        refused = asyncio.ensure_future(anext(thread.generate([1], SamplingParams(max_tokens=1), "same")))
        await until(lambda: not thread.loop.messages.empty())
        refused.cancel()
        await asyncio.gather(refused, return_exceptions=True)
        runner.gate.set()
        async with asyncio.timeout(60):
            assert len(start.token_ids) + sum([len(delta.token_ids) async for delta in first]) == 900

    asyncio.run(main())


def test_threads_hand_over_the_interpreter_lock_within_a_millisecond(thread: EngineThread) -> None:
    asyncio.run(collect(thread, [1]))
    assert sys.getswitchinterval() < 0.001


def test_two_event_loops_may_share_an_engine(thread: EngineThread) -> None:
    results: list[list[int]] = []
    loops = [
        threading.Thread(target=lambda p=p: results.append(tokens(asyncio.run(collect(thread, [p, 1])))))
        for p in range(4)
    ]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    assert sorted(results) == sorted(expected_tokens([p, 1], 20) for p in range(4))


def test_a_loop_that_was_closed_loses_its_requests(thread: EngineThread, runner: GatedRunner) -> None:
    async def start() -> None:
        stream = thread.generate([1, 2], SamplingParams(max_tokens=900))
        await anext(stream)
        runner.gate.clear()
        streams.append(stream)

    streams: list[object] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(start())
    loop.close()
    runner.gate.set()
    asyncio.run(until_idle(thread))


def test_it_sleeps_without_work(thread: EngineThread) -> None:
    asyncio.run(collect(thread, [1]))
    clock = time.pthread_getcpuclockid(thread._thread.ident)
    used = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - used < 0.1
    health = thread.check()
    assert (health.healthy, health.seconds_since_progress) == (True, 0.0)


def test_stopping_ends_requests_in_flight_and_later_ones(thread: EngineThread) -> None:
    async def main() -> None:
        stream = each(thread.generate([1, 2], SamplingParams(max_tokens=900)))
        await anext(stream)
        assert await asyncio.to_thread(thread.stop)
        rest = [delta async for delta in stream]
        assert rest[-1].finish_reason is FinishReason.ABORT
        many = [delta async for delta in each(thread.generate([1], SamplingParams(n=3)))]
        assert [(delta.index, delta.finish_reason) for delta in many] == [(i, FinishReason.ABORT) for i in range(3)]
        assert [delta.finish_reason for delta in await collect(thread, [1])] == [FinishReason.ABORT]

    asyncio.run(main())
    assert not thread._thread.is_alive()
    assert thread.check().reason == "the engine is not running"
    assert thread.engine.scheduler.pool.num_free == 2000


def test_stopping_does_not_wait_for_a_step_to_tell_requests(thread: EngineThread) -> None:
    async def main() -> None:
        thread.engine.runner.gate.clear()
        running = asyncio.create_task(collect(thread, [1, 2]))
        await until(thread.engine.runner.held.is_set)
        stopped = asyncio.create_task(asyncio.to_thread(thread.stop))
        assert (await running)[-1].finish_reason is FinishReason.ABORT
        assert not stopped.done()
        thread.engine.runner.gate.set()
        assert await stopped

    asyncio.run(main())


def test_draining_lets_requests_end_and_takes_no_new_ones(thread: EngineThread) -> None:
    async def main() -> None:
        thread.engine.runner.gate.clear()
        running = asyncio.create_task(collect(thread, [1, 2], 300))
        await until(thread.engine.runner.held.is_set)
        drained = asyncio.create_task(asyncio.to_thread(thread.drain, 60.0))
        await until(lambda: not thread._accepting)
        thread.engine.runner.gate.set()
        assert (await collect(thread, [3]))[-1].finish_reason is FinishReason.ABORT
        assert await drained
        assert tokens(await running) == expected_tokens([1, 2], 300)

    asyncio.run(main())


def test_draining_gives_up_in_time(thread: EngineThread) -> None:
    async def main() -> None:
        thread.engine.runner.gate.clear()
        running = asyncio.create_task(collect(thread, [1, 2], 900))
        await until(thread.engine.runner.held.is_set)
        drained = asyncio.create_task(asyncio.to_thread(thread.drain, 0.02))
        await until(
            lambda: thread.loop.messages.qsize() == 2
        )  # it asked for an end when idle, gave up, and for one now
        thread.engine.runner.gate.set()
        assert not await drained
        assert (await running)[-1].finish_reason is FinishReason.ABORT

    asyncio.run(main())


def test_a_stall_turns_health_and_fails_waiting_requests(thread: EngineThread, runner: GatedRunner) -> None:
    thread.stall_seconds = STALL_SECONDS

    async def main() -> None:
        runner.gate.clear()
        deltas = await collect(thread, [1, 2])
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert "no progress for" in deltas[-1].error
        health = thread.check()
        assert not health.healthy
        assert health.seconds_since_progress > STALL_SECONDS
        runner.gate.set()
        await until_idle(thread)
        thread.stall_seconds = 60.0
        assert thread.check().healthy
        assert tokens(await collect(thread, [1, 2])) == expected_tokens([1, 2], 20)

    asyncio.run(main())


def test_a_stall_is_noticed_in_time_whenever_requests_came(thread: EngineThread, runner: GatedRunner) -> None:
    runner.seconds, thread.stall_seconds = 0.002, 3.0

    async def main() -> None:
        tasks = []
        for index in range(10):
            tasks.append(asyncio.create_task(collect(thread, [index, 2], 900)))
            await asyncio.sleep(0.04)
        runner.gate.clear()
        start = time.monotonic()

        async def seconds_until_told(task: asyncio.Task[list[Delta]]) -> float:
            deltas = await task
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert len(deltas) > 1
            return time.monotonic() - start

        waited = await asyncio.gather(*map(seconds_until_told, tasks))
        assert min(waited) > 0.8 * thread.stall_seconds  # the step may have begun before the gate closed
        assert max(waited) < 1.5 * thread.stall_seconds  # not a second period later
        assert not thread.check().healthy
        runner.gate.set()
        await until_idle(thread)

    asyncio.run(main())


def test_a_failing_step_fails_its_requests_only(thread: EngineThread, runner: GatedRunner) -> None:
    runner.failure = RuntimeError("kernel")
    assert "RuntimeError: kernel" in asyncio.run(collect(thread, [1]))[-1].error
    assert tokens(asyncio.run(collect(thread, [1]))) == expected_tokens([1], 20)
    assert thread.check().healthy


def test_a_broken_engine_tells_everybody_and_health(thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("bug")

    monkeypatch.setattr(thread.engine.scheduler, "schedule", broken)

    async def main() -> None:
        results = await asyncio.gather(*(collect(thread, [index]) for index in range(3)))
        for deltas in results:
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert "KeyError: 'bug'" in deltas[-1].error

    asyncio.run(main())
    assert not thread.check().healthy
    assert "KeyError" in thread.check().reason


def test_a_library_that_panics_breaks_the_engine_loudly(thread: EngineThread, runner: GatedRunner) -> None:
    """Panics of Rust libraries do not derive from `Exception`."""

    class PanicError(BaseException):
        pass

    runner.failure = PanicError("unreachable")
    thread.stall_seconds = 60.0

    async def main() -> None:
        async with asyncio.timeout(10):
            assert "PanicError: unreachable" in (await collect(thread, [1]))[-1].error

    asyncio.run(main())
    assert "PanicError" in thread.check().reason


def test_work_for_idle_time_is_done_in_quiet_times_and_its_failure_ends_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request waits for one part of it at most, and one soon after another for none."""
    monkeypatch.setattr("runtime.engine.engine_loop.QUIET_SECONDS", 3600)
    runner, done, first_may_end = GatedRunner(), list[str](), threading.Event()

    def work(name: str) -> None:
        done.append(name)
        if name == "first":
            assert first_may_end.wait(60)
        if name == "third":
            raise RuntimeError("no memory for one more graph")

    idle_work = [partial(work, name) for name in ("first", "second", "third", "fourth")]
    thread = EngineThread(Engine(runner, None, RuntimeConfig(block_size=4)), idle_work=idle_work)
    runner.gate.clear()
    thread.start()

    async def main() -> None:
        request = asyncio.ensure_future(collect(thread, [1]))
        await until(lambda: not thread.loop.messages.empty())
        first_may_end.set()
        await asyncio.to_thread(runner.held.wait, 60)
        assert done == ["first"]
        runner.gate.set()
        assert len(tokens(await request)) == 20
        assert len(tokens(await collect(thread, [2]))) == 20
        assert done == ["first"]
        monkeypatch.setattr("runtime.engine.engine_loop.QUIET_SECONDS", 0)
        assert len(tokens(await collect(thread, [3]))) == 20
        await until(lambda: len(done) == 3)

    asyncio.run(main())
    assert thread.stop()
    assert done == ["first", "second", "third"]


def test_a_thread_that_was_never_started_says_so() -> None:
    thread = EngineThread(Engine(FakeRunner(), None, RuntimeConfig(block_size=4)))
    assert thread.check().reason == "the engine is not running"
    assert thread.stop()
    assert asyncio.run(collect(thread, [1]))[-1].finish_reason is FinishReason.ABORT
