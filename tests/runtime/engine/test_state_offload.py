"""Saved states that leave the pool for host memory and come back: less is computed again, and no token changes."""

from pathlib import Path

import pytest
from covering import sample
from engines import Tokens, answer_all, drain, small_engine, tokens_of
from fake_runner import FakeRunner, expected_tokens
from fault_injection import FaultInjection
from tiny_configs import DELTA_NET
from tiny_models import save_tiny_model

from runtime.core.config import RuntimeConfig
from runtime.core.request import FinishReason, SamplingParams
from runtime.engine.engine import Engine
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

BLOCK = 4
PROMPTS = [[number, *range(10, 21)] for number in range(6)]
END = 8
"""Tokens before the last block end of a prompt, which are found when it comes again."""


def fake_engine(num_slots: int = 4, num_host_states: int = 20) -> Engine:
    """Room for all keys and values."""
    runner = FakeRunner(400, BLOCK, 1000, num_state_slots=num_slots, num_host_states=num_host_states)
    return Engine(runner, None, RuntimeConfig(block_size=BLOCK))


def cached_by(engine: Engine, prompt: list[int]) -> int:
    """Tokens of a prompt that were found; the runner checks that every state is that of the tokens before."""
    name = engine.add_request(prompt, SamplingParams(max_tokens=2, seed=1))
    (deltas,) = drain(engine).values()
    assert deltas[-1].request_id == name
    if deltas[-1].finish_reason is not FinishReason.ERROR:
        assert tokens_of(deltas) == expected_tokens(prompt, 2, 1)
    return deltas[-1].num_cached_tokens


def test_a_state_in_the_only_slot_is_found_when_another_sequence_needs_that() -> None:
    engine = fake_engine(1)
    assert [cached_by(engine, prompt) for prompt in PROMPTS[:2]] == [0, 0]
    assert cached_by(engine, [*PROMPTS[0], 5]) == len(PROMPTS[0])


@pytest.mark.parametrize("num_slots", [2, 4])
def test_states_that_were_pushed_out_are_found(num_slots: int) -> None:
    engine, without = fake_engine(num_slots), fake_engine(num_slots, 0)
    for each in (engine, without):
        assert [cached_by(each, prompt) for prompt in PROMPTS] == [0] * len(PROMPTS)
    assert [cached_by(engine, prompt) for prompt in PROMPTS] == [END] * len(PROMPTS)
    assert cached_by(without, PROMPTS[0]) == 0
    assert engine.scheduler.states.pool.tier.num_restores >= len(PROMPTS) - num_slots


def test_the_longest_prefix_wins_wherever_its_state_is() -> None:
    engine = fake_engine(3)
    for prompt in (PROMPTS[0], [*PROMPTS[0], *range(20)], *PROMPTS[1:3]):
        cached_by(engine, prompt)
    assert cached_by(engine, [*PROMPTS[0], *range(20), 9]) == 32
    assert cached_by(engine, PROMPTS[0]) == END


def test_a_failed_step_leaves_no_wrong_state_in_host_memory() -> None:
    engine = fake_engine(2)
    cached_by(engine, PROMPTS[0])
    engine.runner.failure = RuntimeError("injected")
    cached_by(engine, PROMPTS[1])
    tier = engine.scheduler.states.pool.tier
    assert tier.num_offloads > tier.num_used
    assert [cached_by(engine, prompt) for prompt in PROMPTS[:2] * 2][2:] == [END, END]


def test_a_state_that_led_to_a_failure_is_not_restored() -> None:
    engine = fake_engine(2)
    for prompt in PROMPTS[:3]:
        cached_by(engine, prompt)
    engine.runner.failure = RuntimeError("injected")
    assert [cached_by(engine, PROMPTS[0]) for _ in range(2)] == [END, 0]


def test_the_figures_tell_of_states() -> None:
    engine = fake_engine(2)
    for prompt in PROMPTS[:3] * 2:
        cached_by(engine, prompt)
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=4, seed=1))
    engine.step()
    pool, text = engine.scheduler.states.pool, engine.render_metrics()
    assert pool.tier.num_restores > 0
    for name, number in {
        "state_slots": 2,
        "state_slots_used": 1,
        "state_slots_saved": pool.num_findable,
        "state_hits_total": 4,
        "state_evictions_total": pool.num_evictions,
        "host_states_saved": pool.tier.num_used,
        "host_states_offloaded_total": pool.tier.num_offloads,
        "host_states_restored_total": pool.tier.num_restores,
    }.items():
        assert f"runtime_{name} {float(number)}\n" in text
    drain(engine)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Three recurrent layers and one of attention, in float64."""
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", "qwen3_5_text", **DELTA_NET)
    return load_model(folder, dtype="float64")


def answers(engine: Engine) -> Tokens:
    prompts = [[(7 * i + k % 3) % 112 for i in range(9 + 5 * k)] for k in range(4)]
    sampling = SamplingParams(max_tokens=7, temperature=0.8, seed=3, ignore_eos=True)
    return answer_all(engine, [(str(k), prompt, sampling) for k, prompt in enumerate(prompts)])


@pytest.fixture(scope="module")
def wanted(hybrid: Decoder) -> Tokens:
    return answers(small_engine(hybrid, num_blocks=400, prefix_caching=False))


@pytest.mark.parametrize("fault_seed", sample([0, None]))
@pytest.mark.parametrize(("num_slots", "host_states"), [(3, 20), pytest.param(2, 50, marks=pytest.mark.full)])
def test_tokens_of_few_states_are_those_of_many(
    hybrid: Decoder, wanted: Tokens, num_slots: int, host_states: int, fault_seed: int | None
) -> None:
    state_bytes = build_runner(hybrid, RuntimeConfig()).memory.states.slot_bytes
    faults = None if fault_seed is None else FaultInjection(fault_seed, preempt=0.05, evict=0.1)
    options = {"num_blocks": 60, "prefill_chunk": 7, "state_interval": 8, "num_state_slots": num_slots}
    engine = small_engine(hybrid, faults=faults, kv_offload_bytes=2 * host_states * state_bytes, **options)
    assert engine.runner.num_host_states == host_states
    assert host_states * state_bytes < engine.runner.memory.host_bytes <= 2 * host_states * state_bytes
    assert answers(engine) == wanted
    assert answers(engine) == wanted, "once more, with what is cached now"
    assert engine.scheduler.states.pool.tier.num_restores > 0
    assert engine.scheduler.states.pool.num_free == num_slots
