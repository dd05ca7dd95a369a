"""Tokens and blocks that the scheduler grants to drafts: those that no other request needs, for one step."""

import pytest

from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, SamplingParams, Sequence, Status
from runtime.core.step import StepPlan
from runtime.engine.block_pool import BlockPool
from runtime.engine.scheduler import Scheduler

BLOCK = 4


def make_scheduler(num_blocks: int = 100, **options: object) -> Scheduler:
    config = RuntimeConfig(**({"block_size": BLOCK, "max_num_batched_tokens": 16, "prefill_chunk": 8} | options))
    return Scheduler(BlockPool(num_blocks, BLOCK, prefix_caching=config.prefix_caching), config, 1000)


def add_decoding(scheduler: Scheduler, name: str, prompt: int = 6, max_tokens: int = 50) -> Sequence:
    """A sequence whose next step decodes its second token."""
    tokens = tuple(100 * len(name) + position for position in range(prompt))
    sequence = scheduler.add(Request(name, tokens, SamplingParams(max_tokens=max_tokens), seed=0))
    while not sequence.num_output_tokens:
        finish_step(scheduler, scheduler.schedule(), {})
    return sequence


def finish_step(scheduler: Scheduler, plan: StepPlan, accepted: dict[str, int]) -> None:
    new = {e.sequence: [*e.sequence.draft_token_ids[: accepted.get(e.sequence.id, 0)], 7] for e in plan.entries}
    by_name = {sequence.id: tokens for sequence, tokens in new.items()}
    sampling = [entry.sequence for entry in plan.entries if entry.samples]
    scheduler.complete(plan, {name: [*new_tokens[:-1]] for name, new_tokens in by_name.items()})
    for sequence in sampling:
        sequence.token_ids += new[sequence]
    scheduler.check()


def granted(plan: StepPlan) -> dict[str, int]:
    return {entry.sequence.id: entry.num_draft_tokens for entry in plan.entries}


def test_guesses_are_planned_behind_the_known_tokens() -> None:
    scheduler = make_scheduler()
    sequence = add_decoding(scheduler, "a")
    sequence.draft_token_ids = [1, 2, 3]
    plan = scheduler.schedule()
    (entry,) = plan.entries
    assert (entry.start, entry.num_tokens, entry.num_draft_tokens, entry.samples) == (6, 4, 3, True)
    assert len(sequence.block_ids) == 3
    finish_step(scheduler, plan, {"a": 1})
    assert (sequence.num_computed_tokens, sequence.token_ids[-2:], sequence.draft_token_ids) == (8, [1, 7], [])
    assert len(sequence.block_ids) == 2, "blocks of refused guesses went back"


def test_guesses_delay_no_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12)
    sequences = [add_decoding(scheduler, "x" * n) for n in (1, 2, 3)]
    prompt = scheduler.add(Request("prompt", tuple(range(18)), SamplingParams(), seed=0))
    for _ in range(2):
        for sequence in sequences:
            sequence.draft_token_ids = [1, 2, 3]
        plan = scheduler.schedule()
        assert granted(plan) == {"prompt": 0, "x": 1, "xx": 0, "xxx": 0}
        assert {entry.num_tokens for entry in plan.entries if entry.sequence is prompt} == {8}, "a whole chunk"
        finish_step(scheduler, plan, {})
    for sequence in sequences:
        sequence.draft_token_ids = [1, 2, 3]
    plan = scheduler.schedule()
    assert granted(plan) == {"x": 3, "xx": 3, "xxx": 1, "prompt": 0}
    assert plan.num_tokens == 12


def test_nobody_is_guessed_for_while_prompts_need_the_whole_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=9)
    sequence = add_decoding(scheduler, "a")
    scheduler.add(Request("prompt", tuple(range(18)), SamplingParams(), seed=0))
    wanted = []
    for _ in range(3):
        wanted.append(scheduler.decodes())
        finish_step(scheduler, scheduler.schedule(), {})
    # A prompt that waits may have no room yet; one that runs takes 8, 8 and 2 tokens.
    assert wanted == [[sequence], [], [sequence]]


@pytest.mark.parametrize(("max_tokens", "drafts"), [(2, 0), (3, 1), (4, 2), (5, 3)])
def test_no_guess_goes_beyond_max_tokens(max_tokens: int, drafts: int) -> None:
    scheduler = make_scheduler()
    sequence = add_decoding(scheduler, "a", max_tokens=max_tokens)
    sequence.draft_token_ids = [1, 2, 3]
    assert granted(scheduler.schedule()) == {"a": drafts}


def test_without_spare_blocks_guesses_go_and_nobody_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    first, second = (add_decoding(scheduler, name, prompt=6, max_tokens=8) for name in ("a", "bb"))
    for sequence in (first, second):
        sequence.draft_token_ids = [1, 2, 3]
    plan = scheduler.schedule()
    # 8 and 7 tokens in two blocks each; the fifth block is left for who needs it next.
    assert granted(plan) == {"a": 0, "bb": 1}
    assert scheduler.stats.num_preemptions == 0


def test_who_is_preempted_loses_its_guesses() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    first, second = (add_decoding(scheduler, name, prompt=7, max_tokens=13) for name in ("a", "bb"))
    for sequence in (first, second, first, second):
        sequence.draft_token_ids = [1]
    while second.status is Status.RUNNING:
        plan = scheduler.schedule()
        finish_step(scheduler, plan, {})
        first.draft_token_ids, second.draft_token_ids = [1, 2], [] if second.status is Status.WAITING else [1, 2]
    assert second.draft_token_ids == []
    assert first.num_preemptions == 0


def test_only_accepted_tokens_are_findable() -> None:
    scheduler = make_scheduler()
    sequence = add_decoding(scheduler, "a", prompt=6)
    before = list(sequence.token_ids)
    sequence.draft_token_ids = [1, 2, 3, 4, 5, 6]
    plan = scheduler.schedule()
    table = list(sequence.block_ids)
    finish_step(scheduler, plan, {"a": 2})
    assert sequence.num_computed_tokens == 9
    scheduler.finish(sequence)
    follower = scheduler.add(Request("b", (*before, 1, 2, 3, 4, 5, 6), SamplingParams(), seed=0))
    scheduler.schedule()
    assert follower.num_cached_tokens == 8
    assert follower.block_ids[:2] == table[:2]


def test_sequences_at_the_end_of_their_prompt_are_not_guessed_for() -> None:
    scheduler = make_scheduler()
    sequence = scheduler.add(Request("a", tuple(range(9)), SamplingParams(), seed=0))
    finish_step(scheduler, scheduler.schedule(), {})
    assert sequence.num_tokens - sequence.num_computed_tokens == 1
    assert scheduler.decodes() == []
    finish_step(scheduler, scheduler.schedule(), {})
    assert scheduler.decodes() == [sequence]
