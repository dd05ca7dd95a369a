"""Saved states: what a prefix that is cached up to one gives, and that no token depends on any of it."""

from itertools import product
from pathlib import Path

import pytest
from covering import covering, sample
from engines import Tokens, answer_all, small_engine
from fake_runner import FakeDrafter, FakeRunner, expected_tokens
from tiny_configs import DELTA_NET
from tiny_models import save_tiny_model

from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner
from runtime.runner.warm_up import largest_steps, with_states
from runtime.speculative.proposer import Speculator

BLOCK = 4
AMPLE = {"num_blocks": 400, "num_state_slots": 100, "state_interval": 16}


def fake_engine(num_slots: int, drafter: FakeDrafter | None = None, **options: object) -> Engine:
    runner = FakeRunner(400, BLOCK, 1000, num_state_slots=num_slots)
    config = RuntimeConfig(**({"block_size": BLOCK, "state_interval": 64, "prefill_chunk": 32} | options))
    return Engine(runner, None, config, speculator=Speculator(drafter, 3) if drafter else None)


def answer(engine: Engine, prompt: list[int], max_tokens: int = 1) -> list[int]:
    """Answers one request; the runner checks that every state is that of the tokens before."""
    name = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, seed=1))
    found: list[int] = []
    while engine.has_work:
        for delta in engine.step():
            assert delta.request_id == name
            found += delta.token_ids
        engine.check()
        engine.scheduler.check()
    assert found == expected_tokens(prompt, max_tokens, 1)
    return found


def cached_by(engine: Engine, prompt: list[int]) -> int:
    """Tokens of a prompt that were found."""
    before = engine.scheduler.stats.num_prefix_hits
    answer(engine, prompt)
    return engine.scheduler.stats.num_prefix_hits - before


def test_a_prompt_continues_from_the_end_of_the_last() -> None:
    engine = fake_engine(8)
    prompt = [*range(40), 1, 2]
    assert cached_by(engine, prompt) == 0
    assert cached_by(engine, prompt) == 40
    assert cached_by(engine, prompt[:41]) == 40


def test_a_state_is_saved_where_prompts_part() -> None:
    """Only attention could use what is cached up to there; whoever comes third finds the state, too."""
    engine = fake_engine(8, prefill_chunk=500)
    shared = [7] * 22
    assert cached_by(engine, [*shared, *[1] * 30]) == 0
    assert cached_by(engine, [*shared, *[2] * 30]) == 0
    assert cached_by(engine, [*shared, *[3] * 30]) == 20
    assert cached_by(engine, [*shared, *[2] * 31]) == 20 + 32


def test_long_prompts_have_states_at_intervals() -> None:
    engine = fake_engine(8, prefill_chunk=500)
    prompt = [number % 5 for number in range(203)]
    answer(engine, prompt)
    assert engine.scheduler.states.pool.num_findable == 4
    assert cached_by(engine, [*prompt[:150], *[9] * 10]) == 128


def test_the_least_recently_used_states_go_first() -> None:
    engine = fake_engine(3)
    prompts = [[number] * 11 for number in range(4)]
    for prompt in prompts:
        answer(engine, prompt)
    assert [cached_by(engine, prompt) for prompt in prompts[2:]] == [8, 8]
    assert cached_by(engine, prompts[0]) == 0


@pytest.mark.parametrize("drafted", sample([False, True]))
def test_conversations_are_cached(drafted: bool) -> None:
    """At least 95 % of what is cached for attention alone, although four conversations take turns."""
    hits = []
    for num_slots in (0, 16):
        engine = fake_engine(num_slots, FakeDrafter(3, 0.7) if drafted else None)
        conversations: list[list[int]] = [[40 + number] * 20 for number in range(4)]
        for turn, conversation in product(range(4), conversations):
            conversation += [turn, len(conversation) % 7] * 8
            conversation += answer(engine, conversation, 15 + turn)
        hits.append(engine.scheduler.stats.num_prefix_hits)
    assert hits[1] >= 0.95 * hits[0] > 0


@pytest.mark.parametrize(("num_slots", "longest"), [(1, 0), (2, 3)])
def test_drafts_take_slots_that_nothing_else_needs(num_slots: int, longest: int) -> None:
    engine = fake_engine(num_slots, FakeDrafter(3, 1.0), prefix_caching=False)
    answer(engine, [1, 2, 3], 30)
    drafted = [sum(plan.values()) - 1 for plan in engine.runner.plans[1:]]
    assert max(drafted) == longest
    assert (engine.metrics.spec_decode_num_accepted_tokens_total > 0) == (longest > 0)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_sequences_wait_for_slots(num_slots: int) -> None:
    """Half of them are for saved states, one of which all of these sequences continue from."""
    engine = fake_engine(num_slots)
    prompts = [[7] * 9 + [number] for number in range(5)]
    answer(engine, prompts[0])
    names = [engine.add_request(prompt, SamplingParams(max_tokens=9, seed=0)) for prompt in prompts]
    found: dict[str, list[int]] = {name: [] for name in names}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
        assert len(engine.scheduler.running) <= max(1, num_slots // 2)
        engine.scheduler.check()
    assert list(found.values()) == [expected_tokens(prompt, 9) for prompt in prompts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", "qwen3_5_text", **DELTA_NET)


@pytest.fixture(scope="module")
def hybrid(folder: Path) -> Decoder:
    """Three recurrent layers and one of attention, in float64."""
    return load_model(folder, dtype="float64")


def requests() -> list[tuple[str, list[int], SamplingParams]]:
    """Prompts with two beginnings, which repeat themselves, some twice; one greedy answer or two sampled ones."""
    prompts = [[3 + length % 5, *range(20, 20 + length)] * 2 for length in (9, 9, 5)]
    prompts += [[*range(30, 48), number, *range(60, 63)] for number in range(2)]
    params = [
        SamplingParams(max_tokens=8, temperature=0.8 * number, n=1 + number, seed=5, ignore_eos=True)
        for number in range(2)
    ]
    return [(str(number), prompt, params[number % 2]) for number, prompt in enumerate(prompts + prompts[:3])]


@pytest.fixture(scope="module")
def expected(hybrid: Decoder) -> Tokens:
    engine = small_engine(hybrid, **AMPLE, prefix_caching=False)
    found: Tokens = {}
    for request in requests():
        found |= answer_all(engine, [request])
    return found


@pytest.mark.parametrize(
    ("num_slots", "caching", "chunk", "speculate", "num_blocks"),
    covering((5, 1), (True, False), (3, 512), ("ngram", ""), (18, 400)),
)
def test_no_setting_changes_a_token(
    hybrid: Decoder,
    folder: Path,
    expected: Tokens,
    num_slots: int,
    caching: bool,
    chunk: int,
    speculate: str,
    num_blocks: int,
) -> None:
    options = {"num_blocks": num_blocks, "prefill_chunk": chunk, "speculative_model": speculate}
    engine = small_engine(
        hybrid, folder, num_state_slots=num_slots, prefix_caching=caching, state_interval=8, **options
    )
    assert answer_all(engine, requests(), gap=2) == expected
    states, stats = engine.scheduler.states, engine.scheduler.stats
    assert states.pool.num_free == num_slots
    assert (states.pool.num_findable > 0) == (stats.num_prefix_hits > 0) == (caching and num_slots > 1)
    if num_slots == 1 or not speculate:
        assert engine.metrics.spec_decode_num_draft_tokens_total == 0


def test_preempted_sequences_continue_from_their_last_state(hybrid: Decoder, expected: Tokens) -> None:
    """All but the first sequence are preempted in every seventh step."""
    engine, recomputed = small_engine(hybrid, **AMPLE), []

    def preempt() -> None:
        if engine.metrics.steps_total % 7 == 0:
            for sequence in engine.scheduler.running[1:]:
                recomputed.append(sequence)
                engine.scheduler.preempt(sequence)

    assert answer_all(engine, requests(), after_step=preempt) == expected
    stats = engine.scheduler.stats
    assert stats.num_preemptions == len(recomputed) > 0
    assert stats.num_prefix_hits > 0.5 * stats.num_prefix_queries


def test_the_largest_steps_have_states(hybrid: Decoder) -> None:
    """Steps of fewer sequences, where slots are few; a GPU computes them at the start."""
    config = RuntimeConfig(num_blocks=200, block_size=4, num_state_slots=3)
    runner, sizes = build_runner(hybrid, config), []
    for plan in largest_steps(config, runner.num_blocks, runner.max_model_len):
        planned = with_states(plan, runner.num_state_slots)
        sizes.append(len(runner.execute(planned).tokens))
    assert sizes == [2, 3]
    assert all(tensor[:3].isfinite().all() for fields in runner.states.tensors.values() for tensor in fields.values())


def test_trees_of_drafts_are_refused(hybrid: Decoder, folder: Path) -> None:
    with pytest.raises(ToolkitError, match="--speculative-model ngram"):
        small_engine(hybrid, folder, speculative_model="ngram-tree")
