"""Bookkeeping that is broken, by whatever bug: an idle engine finds it, says so, and serves on."""

import asyncio
import logging

import pytest
from engines import drain, tokens_of
from fake_runner import FakeRunner, expected_tokens

from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.block_pool import BlockPool
from runtime.engine.engine import Engine
from runtime.engine.engine_loop import CHECK_SECONDS
from runtime.engine.engine_thread import EngineThread


def leak(pool: BlockPool) -> None:
    pool.allocate(pool.num_free)


def count_wrongly(pool: BlockPool) -> None:
    pool._blocks[3].ref_count = 5


def mislead(pool: BlockPool) -> None:
    pool._by_hash[b"nonsense"] = 1


def lose_a_slot(pool: BlockPool) -> None:
    pool.tier._free.pop()


def corrupted_engine() -> Engine:
    engine = Engine(FakeRunner(num_blocks=12, num_host_blocks=4), None, RuntimeConfig(block_size=4))
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=5, seed=0))
    drain(engine)
    return engine


@pytest.mark.parametrize("corrupt", [leak, count_wrongly, mislead, lose_a_slot])
def test_broken_bookkeeping_is_reported_rebuilt_and_counted(corrupt, caplog: pytest.LogCaptureFixture) -> None:
    engine = corrupted_engine()
    engine.check()
    assert engine.metrics.broken_invariants_total == 0
    corrupt(engine.scheduler.pool)
    with caplog.at_level(logging.CRITICAL, "runtime.engine.engine"):
        engine.check()
    assert "KV pages is inconsistent" in caplog.text
    assert engine.metrics.broken_invariants_total == 1
    engine.scheduler.check()
    pool = engine.scheduler.pool
    assert (pool.num_free, pool.num_cached, pool.tier.num_used) == (12, 0, 0)


def test_healing_amid_requests_keeps_their_blocks() -> None:
    engine = Engine(FakeRunner(num_blocks=20), None, RuntimeConfig(block_size=4))
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=20, seed=0, n=2), "a")
    deltas = [delta for _ in range(5) for delta in engine.step()]
    count_wrongly(engine.scheduler.pool)
    engine.check()
    assert tokens_of([*deltas, *drain(engine)["a"]], 0) == expected_tokens([1, 2, 3, 4, 5], 20)


def test_requests_that_lost_blocks_keep_waiting_are_served() -> None:
    engine = corrupted_engine()
    leak(engine.scheduler.pool)
    engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=5, seed=0))
    (deltas,) = drain(engine).values()
    assert tokens_of(deltas) == expected_tokens([1, 2, 3, 4, 5], 5)
    assert engine.metrics.broken_invariants_total == 1


def test_an_idle_thread_heals_its_engine() -> None:
    thread = EngineThread(Engine(FakeRunner(num_blocks=12), None, RuntimeConfig(block_size=4)))

    async def ask() -> list[int]:
        groups = thread.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=5, seed=0))
        return [token async for deltas in groups for delta in deltas for token in delta.token_ids]

    async def scenario() -> None:
        async with asyncio.timeout(CHECK_SECONDS + 10):
            await ask()
            mislead(thread.engine.scheduler.pool)
            assert await ask() == expected_tokens([1, 2, 3, 4, 5], 5)
            while thread.engine.metrics.broken_invariants_total == 0:
                await asyncio.sleep(0.01)
            assert await ask() == expected_tokens([1, 2, 3, 4, 5], 5)

    thread.start()
    try:
        asyncio.run(scenario())
    finally:
        assert thread.stop()
    assert thread.engine.metrics.broken_invariants_total == 1
    thread.engine.scheduler.check()
