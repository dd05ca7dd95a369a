"""Conversations on models with recurrent states: what was computed once is found again, wherever they are changed."""

import random

import pytest
from covering import sample
from engines import drain, tokens_of
from fake_runner import FakeRunner, expected_tokens

from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine

BLOCK = 4
END_TOKEN = 0
ANSWER = 16
ENOUGH = 0.95
"""Share of what attention alone would find."""

Message = list[int]


def make_engine(
    num_slots: int, num_host_states: int = 0, end_token_ids: frozenset[int] = frozenset({END_TOKEN})
) -> Engine:
    """Room for all keys and values; no states at intervals. Without slots there is attention alone."""
    states = {"num_state_slots": num_slots, "num_host_states": num_host_states}
    runner = FakeRunner(1000, BLOCK, 4000, end_token_ids, **states)
    return Engine(runner, None, RuntimeConfig(block_size=BLOCK, state_interval=10**6))


def message(role: int, text: list[int]) -> Message:
    """As a chat template writes it: header, text, end of the turn."""
    return [role, 9, *text, END_TOKEN]


def answer(engine: Engine, conversation: list[Message]) -> list[int]:
    prompt = [*(token for each in conversation for token in each), 2, 9]
    engine.add_request(prompt, SamplingParams(max_tokens=ANSWER, seed=1))
    (deltas,) = drain(engine).values()
    assert tokens_of(deltas) == expected_tokens(prompt, ANSWER, 1, engine.runner.eos_token_ids)
    return [token for token in tokens_of(deltas) if token != END_TOKEN]


def replay(engine: Engine, *, thinks: bool) -> int:
    """Tokens found by three conversations that take turns, and are now and then continued from an earlier message.

    Args:
        thinks: the template leaves the first half of each answer out of the next prompt.
    """
    chance = random.Random(3)

    def said() -> Message:
        return message(1, [chance.randrange(1, 50) for _ in range(chance.randint(20, 60))])

    conversations = [[message(3, [4 + number] * 50), said()] for number in range(3)]
    for turn in range(5):
        for conversation in conversations:
            text = answer(engine, conversation)
            conversation += [message(2, text[len(text) // 2 if thinks else 0 :]), said()]
            if turn % 2:
                kept = chance.randrange(2, len(conversation))
                answer(engine, [*conversation[:kept], said()])
    return engine.scheduler.stats.num_prefix_hits


@pytest.mark.parametrize("thinks", sample([True, False]))
@pytest.mark.parametrize(("num_slots", "num_host_states"), [(8, 80), pytest.param(80, 0, marks=pytest.mark.full)])
def test_nearly_all_that_attention_would_find_is_found(num_slots: int, num_host_states: int, thinks: bool) -> None:
    possible = replay(make_engine(0), thinks=thinks)
    found = replay(make_engine(num_slots, num_host_states), thinks=thinks)
    assert possible >= found >= ENOUGH * possible > 0


@pytest.mark.full
@pytest.mark.parametrize("thinks", [False, True])
def test_few_states_serve_conversations_that_leave_thoughts_out_and_others(thinks: bool) -> None:
    assert replay(make_engine(16), thinks=thinks) > replay(make_engine(0), thinks=thinks) / 2


@pytest.mark.parametrize(("end_token_ids", "found"), [(frozenset({END_TOKEN}), 4), (frozenset(), 0)])
def test_a_conversation_from_elsewhere_may_be_changed_anywhere(end_token_ids: frozenset[int], found: int) -> None:
    """Its messages are new, so only their ends can have states, where anything but the end of the prompt has."""
    engine, turns = make_engine(32, 0, end_token_ids), [message(1 + number % 2, [5] * 41) for number in range(5)]
    answer(engine, turns)
    starts = []
    for kept in (4, 3, 2, 1):
        answer(engine, [*turns[:kept], message(1, [kept + 20] * 9)])
        starts.append(engine.scheduler.stats.num_prefix_hits)
    assert sum(after > before for before, after in zip([0, *starts], starts, strict=False)) == found


def test_messages_of_one_prompt_take_part_of_the_slots() -> None:
    """Half of those for saved states, the last messages first; the end of the prompt and of the answer have others."""
    engine = make_engine(16)
    turns = [message(1 + number % 2, [7] * 9) for number in range(40)]
    answer(engine, turns)
    assert engine.scheduler.states.pool.num_findable <= 4 + 2
    before = engine.scheduler.stats.num_prefix_hits
    answer(engine, [*turns[:37], message(1, [8] * 9)])
    assert engine.scheduler.stats.num_prefix_hits - before == 37 * 12 // BLOCK * BLOCK
