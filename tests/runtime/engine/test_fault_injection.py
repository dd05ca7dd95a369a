"""Random preemption, eviction and aborts: invariants hold after each step, and whoever is spared gets its tokens."""

import pytest
from engines import drain
from fake_runner import FakeRunner, expected_tokens
from fault_injection import FaultInjection

from runtime.core.config import RuntimeConfig
from runtime.core.request import FinishReason, SamplingParams
from runtime.engine.engine import Engine


@pytest.mark.parametrize("num_host_blocks", [0, 10])
@pytest.mark.parametrize("seed", range(5))
def test_chaos_changes_no_token_of_requests_it_spares(seed: int, num_host_blocks: int) -> None:
    runner = FakeRunner(num_blocks=30, num_host_blocks=num_host_blocks)
    config = RuntimeConfig(block_size=4, max_num_batched_tokens=32, prefill_chunk=7)
    engine = Engine(runner, None, config, before_step=FaultInjection(seed, preempt=0.2, evict=0.3, abort=0.01))
    prompts = {str(i): [i % 3] * (5 + i) for i in range(20)}
    for name, prompt in prompts.items():
        engine.add_request(prompt, SamplingParams(max_tokens=20, seed=0, n=1 + int(name) % 2), name)
    tokens: dict[tuple[str, int], list[int]] = {}
    reasons: list[FinishReason] = []
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.finish_reason is FinishReason.LENGTH and delta.index == 0:
                assert tokens[delta.request_id, 0] == expected_tokens(prompts[delta.request_id], 20)
            if delta.finish_reason is not None:
                reasons.append(delta.finish_reason)
        engine.scheduler.check()
    assert set(reasons) == {FinishReason.LENGTH, FinishReason.ABORT}
    assert len(reasons) == 30, "every answer ends once"
    assert engine.scheduler.stats.num_preemptions > 20
    pool = engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    assert pool.num_evictions > 20
    if num_host_blocks:
        assert pool.tier.num_restores > 0


def test_a_seed_gives_the_same_trouble() -> None:
    def trouble(seed: int) -> tuple[int, int]:
        engine = Engine(FakeRunner(), None, RuntimeConfig(block_size=4), before_step=FaultInjection(seed, preempt=0.3))
        for index in range(5):
            engine.add_request([index], SamplingParams(max_tokens=20))
        drain(engine)
        return engine.scheduler.stats.num_preemptions, engine.scheduler.stats.num_preempted_tokens

    assert trouble(1) == trouble(1) != trouble(2)


def test_the_first_running_sequence_is_left_alone() -> None:
    engine = Engine(
        FakeRunner(), None, RuntimeConfig(block_size=4), before_step=FaultInjection(0, preempt=1.0, evict=1.0)
    )
    for index in range(3):
        engine.add_request([index] * 4, SamplingParams(max_tokens=6), str(index))
    ends = [delta.request_id for _ in range(18) for delta in engine.step() if delta.finish_reason]
    assert ends[0] == "0"
    assert set(ends) == {"0", "1", "2"}
