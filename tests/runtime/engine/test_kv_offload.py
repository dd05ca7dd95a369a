"""Blocks that leave the pool for host memory and come back: less is computed again, and no token changes."""

import pytest
from covering import covering
from engines import Tokens, answer_all, drain, small_engine, tokens_of
from fake_runner import VOCAB_SIZE, FakeRunner, expected_tokens
from fault_injection import FaultInjection

from runtime.core.config import RuntimeConfig
from runtime.core.request import Delta, FinishReason, SamplingParams
from runtime.core.step import BlockOffload, StepOutput, StepPlan
from runtime.engine.engine import Engine
from runtime.engine.kv_offload import KVOffload
from runtime.model.decoder import Decoder
from runtime.runner.runner import build_runner


def saved(tier: KVOffload, *names: bytes) -> KVOffload:
    """The tier after a step that saved blocks 0, 1, ... under these hashes."""
    for block_id, name in enumerate(names):
        tier.save(name, block_id)
    tier.take_offloads()
    tier.settle(done=True)
    return tier


def test_what_was_saved_is_found_in_order_and_loaded() -> None:
    tier = KVOffload(3)
    for block_id, name in ((7, b"a"), (8, b"b")):
        tier.save(name, block_id)
    offloads = tier.take_offloads()
    assert {offload.block for offload in offloads} == {7, 8}
    tier.settle(done=True)
    assert tier.find([b"a", b"b", b"c"]) == [b"a", b"b"]
    assert tier.find([b"c", b"a"]) == []
    assert tier.load([b"a", b"b"]) == [offload.slot for offload in offloads]
    assert tier.take_offloads() == ()
    assert (tier.num_offloads, tier.num_restores, tier.num_used) == (2, 2, 2)
    tier.check()


def test_the_least_recently_used_entry_is_replaced() -> None:
    tier = saved(KVOffload(2), b"a", b"b")
    tier.load([b"a"])
    tier.settle(done=True)
    saved(tier, b"c")
    assert [bool(tier.find([name])) for name in (b"a", b"b", b"c")] == [True, False, True]
    tier.check()


def test_saving_what_is_known_moves_nothing_and_keeps_it_longer() -> None:
    tier = saved(KVOffload(2), b"a", b"b")
    tier.save(b"a", 5)
    assert tier.take_offloads() == ()
    saved(tier, b"c")
    assert tier.find([b"a"])


def test_what_a_step_loads_is_not_replaced_before_it_is_over() -> None:
    tier = saved(KVOffload(2), b"a", b"b")
    tier.load([b"a", b"b"])
    tier.save(b"c", 3)
    assert tier.take_offloads() == ()
    assert not tier.find([b"c"])
    tier.settle(done=True)
    tier.save(b"c", 3)
    assert len(tier.take_offloads()) == 1


def test_a_slot_that_gets_a_second_owner_in_one_step_is_saved_to_once() -> None:
    tier = KVOffload(1)
    tier.save(b"a", 0)
    tier.save(b"b", 1)
    tier.check()
    assert tier.take_offloads() == (BlockOffload(1, 0),)
    assert not tier.find([b"a"])


def test_a_failed_step_leaves_only_what_was_certain() -> None:
    """Not what the plan before has saved: it may be the one that failed."""
    tier = saved(saved(KVOffload(4), b"a"), b"before")
    tier.save(b"b", 1)
    tier.load([b"b"])
    tier.take_offloads()
    tier.settle(done=False)
    assert tier.find([b"a"])
    assert not tier.find([b"before"])
    assert not tier.find([b"b"])
    assert tier.num_used == 1
    tier.check()


def test_forgetting_takes_back_what_was_to_be_saved() -> None:
    tier = saved(KVOffload(3), b"a")
    tier.save(b"b", 1)
    tier.forget([b"a", b"b", b"unknown"])
    assert tier.take_offloads() == ()
    assert tier.num_used == 0
    tier.check()


def test_without_slots_nothing_is_kept() -> None:
    tier = KVOffload(0)
    tier.save(b"a", 1)
    assert (tier.take_offloads(), tier.find([b"a"])) == ((), [])
    tier.check()


def test_check_sees_lost_slots_and_moves_without_an_owner() -> None:
    tier = saved(KVOffload(2), b"a")
    tier._moves[1] = 3
    with pytest.raises(RuntimeError, match="owner"):
        tier.check()
    tier._free.clear()
    with pytest.raises(RuntimeError, match=r"1 used.*0 free.*2"):
        tier.check()


BLOCK_SIZE = 4


class RecordingRunner(FakeRunner):
    """Keeps all plans. A step that fails has damaged what it was about to save."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)
        self.executed: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        self.executed.append(plan)
        if self.failure is not None:
            for offload in plan.offloads:
                self._host[offload.slot] = [(49, 49)] * BLOCK_SIZE
        return super().execute(plan)

    @property
    def num_computed(self) -> int:
        return sum(plan.num_tokens for plan in self.executed)


def make_engine(num_blocks: int = 8, num_host_blocks: int = 20, **options: object) -> Engine:
    config = RuntimeConfig(**({"block_size": BLOCK_SIZE, "max_num_batched_tokens": 64} | options))
    return Engine(RecordingRunner(num_blocks, num_host_blocks), None, config)


def run(engine: Engine, *prompts: list[int], max_tokens: int = 4) -> list[Delta]:
    """Last deltas of requests that run together; all their tokens are checked."""
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=0)) for prompt in prompts]
    deltas = drain(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        if deltas[request_id][-1].finish_reason is FinishReason.LENGTH:
            assert tokens_of(deltas[request_id]) == expected_tokens(prompt, max_tokens)
    return [deltas[request_id][-1] for request_id in ids]


def prompt(first: int, length: int) -> list[int]:
    return [first, *((7 * i) % VOCAB_SIZE for i in range(1, length))]


def push_out(engine: Engine) -> None:
    """Strangers that need the whole pool."""
    for first in (40, 41):
        run(engine, prompt(first, 28))


@pytest.mark.parametrize(("length", "found"), [(21, 20), (20, 19), (18, 16)])
def test_a_prefix_that_was_pushed_out_is_restored_and_not_computed(length: int, found: int) -> None:
    """Only the last token of a cached prompt that ends with its block is computed."""
    engine = make_engine()
    run(engine, prompt(1, length))
    push_out(engine)
    assert engine.scheduler.pool.match(engine.scheduler.pool.tier._slots) == []
    (again,) = run(engine, prompt(1, length))
    assert again.num_cached_tokens == found
    plan = engine.runner.executed[-4]
    assert [entry.num_tokens for entry in plan.entries] == [length - found]
    assert len(plan.restores) == length // BLOCK_SIZE
    assert not plan.copies


def test_a_prefix_may_begin_in_the_pool_and_go_on_in_host_memory() -> None:
    engine = make_engine()
    run(engine, prompt(1, 21))
    engine.scheduler.pool.evict(engine.scheduler.pool.num_cached - 2)
    (again,) = run(engine, prompt(1, 21))
    assert again.num_cached_tokens == 20
    assert len(engine.runner.executed[-4].restores) == 3
    assert engine.scheduler.pool.tier.num_restores == 3


def test_restored_blocks_are_findable_and_evicting_them_again_moves_nothing() -> None:
    engine = make_engine()
    run(engine, prompt(1, 18))
    push_out(engine)
    run(engine, prompt(1, 18))
    num_restores, num_offloads = engine.scheduler.pool.tier.num_restores, engine.scheduler.pool.tier.num_offloads
    assert run(engine, prompt(1, 18))[0].num_cached_tokens == 16
    assert engine.scheduler.pool.tier.num_restores == num_restores
    push_out(engine)
    assert engine.scheduler.pool.tier.num_offloads - num_offloads < 2 * 8, "strangers are there already"


def test_preempted_sequences_come_back_from_host_memory() -> None:
    prompts = [prompt(first, 9) for first in range(4)]
    computed = {}
    for num_host_blocks in (0, 40):
        engine = make_engine(num_blocks=12, num_host_blocks=num_host_blocks)
        run(engine, *prompts, max_tokens=30)
        assert engine.scheduler.stats.num_preemptions > 0
        computed[num_host_blocks] = engine.runner.num_computed
    needed = 4 * (9 + 29)
    assert computed[0] - needed > 2 * (computed[40] - needed), "more than half of what was computed twice is saved"


def test_a_failed_step_leaves_nothing_wrong_in_host_memory() -> None:
    engine = make_engine()
    run(engine, prompt(1, 18))
    engine.add_request(prompt(40, 28), SamplingParams(max_tokens=4, seed=0))
    engine.runner.failure = RuntimeError("injected")
    (failed,) = engine.step()
    assert failed.finish_reason is FinishReason.ERROR
    assert engine.runner.executed[-1].offloads
    engine.scheduler.check()
    (again,) = run(engine, prompt(1, 18))
    assert again.num_cached_tokens < 16
    assert again.finish_reason is FinishReason.LENGTH


def test_what_led_to_a_failure_is_not_restored() -> None:
    engine = make_engine()
    run(engine, prompt(1, 18))
    push_out(engine)
    engine.runner.broken_ids.add("bad")
    engine.add_request(prompt(1, 18), SamplingParams(max_tokens=4), "bad")
    (bad,) = engine.step()
    assert (bad.finish_reason, bad.num_cached_tokens) == (FinishReason.ERROR, 16)
    assert run(engine, prompt(1, 18))[0].num_cached_tokens == 0


def test_two_requests_of_one_step_restore_the_same_blocks_and_hold_them_once() -> None:
    engine = make_engine(num_blocks=16)
    run(engine, prompt(1, 18))
    engine.scheduler.pool.evict(16)
    for suffix in (1, 2):
        engine.add_request([*prompt(1, 18), suffix], SamplingParams(max_tokens=4, seed=0))
    engine.step()
    assert len(engine.runner.executed[-1].restores) == 8
    first, second = engine.scheduler.running
    assert first.block_ids[:4] == second.block_ids[:4]
    assert engine.scheduler.pool.num_free == 16 - 4 - 2
    drain(engine)


def test_equal_prompts_that_arrive_together_hold_their_blocks_once() -> None:
    engine = make_engine(num_blocks=30, num_host_blocks=0)
    for seed in range(3):
        engine.add_request(prompt(1, 18), SamplingParams(max_tokens=4, seed=seed))
    engine.step()
    assert engine.scheduler.pool.num_free == 30 - 4 - 3
    found = [tokens_of(deltas) for deltas in drain(engine).values()]
    assert found == [expected_tokens(prompt(1, 18), 4, seed)[1:] for seed in range(3)]


def test_the_figures_tell_of_it() -> None:
    engine = make_engine()
    run(engine, prompt(1, 18))
    push_out(engine)
    run(engine, prompt(1, 18))
    text = engine.render_metrics()
    assert "runtime_host_blocks_restored_total 4.0\n" in text
    assert f"runtime_host_blocks_offloaded_total {float(engine.scheduler.pool.tier.num_offloads)}\n" in text
    assert f"runtime_host_cache_usage_perc {engine.scheduler.pool.tier.num_used / 20}\n" in text


PROMPTS = [[(7 * i + k % 3) % 112 for i in range(6 + 5 * k)] for k in range(6)]
SAMPLINGS = [SamplingParams(max_tokens=40, temperature=k % 2, seed=k, n=1 + k % 2, ignore_eos=True) for k in range(6)]


def test_what_another_engine_writes_is_found_once_it_has_arrived() -> None:
    tier = saved(KVOffload(4), b"a")
    reserved = dict(tier.reserve([b"a", b"b", b"c", b"b"]))
    assert reserved.keys() == {b"b", b"c"}
    assert tier.reserve([b"c"]) == []
    assert tier.find([b"b"]) == []
    tier.commit([b"b"])
    assert tier.find([b"a", b"b", b"c"]) == [b"a", b"b"]
    assert tier.load([b"b"]) == [reserved[b"b"]]
    tier.settle(done=True)
    tier.check()
    # Neither what has arrived nor what may still be written is replaced.
    saved(tier, b"d", b"e", b"f")
    assert b"b" in tier
    assert tier.num_used == 3
    tier.cancel([b"c"])
    tier.release([b"b"])
    saved(tier, b"g", b"h", b"i")
    assert b"b" not in tier
    tier.check()


def test_reserved_slots_outlast_a_rebuild() -> None:
    tier = KVOffload(2)
    ((name, slot),) = tier.reserve([b"a"])
    tier.clear()
    assert [number for _, number in tier.reserve([b"b", b"c"])] == [1 - slot]
    tier.check()
    tier.commit([name])
    assert tier.load([name]) == [slot]
    tier.clear()
    tier.release([name])
    tier.check()


def test_slots_for_what_was_computed_here_meanwhile_are_free() -> None:
    tier = KVOffload(2)
    tier.reserve([b"a"])
    saved(tier, b"a")
    tier.commit([b"a"])
    tier.release([b"a"])
    assert tier.num_used == 1
    saved(tier, b"b")
    assert tier.num_used == 2
    tier.check()


SCARCE = {"num_blocks": 24, "max_model_len": 96, "prefill_chunk": 7}


def answers(engine: Engine) -> Tokens:
    return answer_all(engine, zip(map(str, range(6)), PROMPTS, SAMPLINGS, strict=True))


@pytest.fixture(scope="module", params=[{}, {"attention_window": 20, "attention_sinks": 3}], ids=["all", "window"])
def options(request: pytest.FixtureRequest) -> dict[str, int]:
    """Tokens that each token attends to."""
    return request.param


@pytest.fixture(scope="module")
def wanted(tiny: Decoder, options: dict[str, int]) -> Tokens:
    return answers(small_engine(tiny, num_blocks=400, prefix_caching=False, **options))


@pytest.mark.parametrize(("host_blocks", "fault_seed"), covering([0, 5, 200], [None, 0, 1]))
def test_tokens_of_few_blocks_are_those_of_many(
    tiny: Decoder, options: dict[str, int], wanted: Tokens, host_blocks: int, fault_seed: int | None
) -> None:
    faults = None if fault_seed is None else FaultInjection(fault_seed, preempt=0.05, evict=0.1)
    block_bytes = 4 * build_runner(tiny, RuntimeConfig()).memory.token_bytes
    engine = small_engine(tiny, faults=faults, kv_offload_bytes=host_blocks * block_bytes, **SCARCE, **options)
    assert engine.runner.num_host_blocks == host_blocks
    assert answers(engine) == wanted
    assert engine.scheduler.stats.num_preemptions > 0
    assert (engine.scheduler.pool.tier.num_restores > 0) == (host_blocks > 0)
    assert answers(engine) == wanted, "once more, with what is cached now"
