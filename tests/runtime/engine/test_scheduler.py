"""Tokens and blocks that the scheduler grants to requests and to drafts."""

from dataclasses import replace

import pytest

from compress.common.errors import RequestError
from runtime.core.config import RuntimeConfig
from runtime.core.request import Request, RequestOptions, SamplingParams, Sequence, Status
from runtime.core.step import StepPlan
from runtime.engine.block_pool import BlockPool
from runtime.engine.scheduler import PRIORITY_PLACES, Scheduler


def make_scheduler(num_blocks: int = 100, max_model_len: int = 1000, **options: object) -> Scheduler:
    config = RuntimeConfig(**({"block_size": 4, "max_num_batched_tokens": 16, "prefill_chunk": 8} | options))
    pool = BlockPool(num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    return Scheduler(pool, config, max_model_len)


def add(scheduler: Scheduler, name: str, prompt: list[int] | int, max_tokens: int = 20, **options: object) -> Sequence:
    tokens = [sum(name.encode())] * prompt if isinstance(prompt, int) else prompt
    sampling = SamplingParams(max_tokens=max_tokens)
    return scheduler.add(Request(name, tuple(tokens), sampling, seed=0, options=RequestOptions(**options)))


def spans(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(entry.sequence.id, entry.start, entry.num_tokens) for entry in plan.entries]


def step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """One step in which every sequence that samples gets the token 7."""
    plan = scheduler.schedule()
    result = spans(plan)
    sampling = [entry.sequence for entry in plan.entries if entry.samples]
    scheduler.complete(plan)
    for sequence in sampling:
        sequence.token_ids.append(7)
    scheduler.check()
    return result


def test_decodes_come_first_then_partial_prefills_then_waiting() -> None:
    scheduler = make_scheduler()
    add(scheduler, "long", 30)
    assert step(scheduler) == [("long", 0, 8)]
    add(scheduler, "short", 3)
    assert step(scheduler) == [("long", 8, 8), ("short", 0, 3)]
    add(scheduler, "later", 9)
    assert step(scheduler) == [("short", 3, 1), ("long", 16, 8), ("later", 0, 7)]
    assert step(scheduler) == [("short", 4, 1), ("long", 24, 6), ("later", 7, 2)]
    assert step(scheduler) == [("long", 30, 1), ("short", 5, 1), ("later", 9, 1)]


def test_one_step_never_exceeds_budget_sequences_or_chunk() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=10, prefill_chunk=4)
    for index in range(6):
        add(scheduler, str(index), 9)
    for _ in range(20):
        plan = step(scheduler)
        assert sum(count for _, _, count in plan) <= 10
        assert len(plan) <= 3
        assert all(count <= 4 for _, _, count in plan)


def test_more_sequences_than_budget_are_not_admitted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2, max_num_seqs=50)
    for index in range(5):
        add(scheduler, str(index), 1)
    step(scheduler)
    assert step(scheduler) == [("0", 1, 1), ("1", 1, 1)]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, "first", 12, max_tokens=4)
    step(scheduler)
    add(scheduler, "large", 16, max_tokens=4)
    add(scheduler, "small", 1, max_tokens=1)
    assert [name for name, _, _ in step(scheduler)] == ["first"]
    assert [sequence.id for sequence in scheduler.waiting] == ["large", "small"]


def test_the_youngest_is_preempted_and_comes_back_before_later_ones() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    oldest, youngest = (add(scheduler, name, 7, max_tokens=13) for name in ("oldest", "youngest"))
    step(scheduler)
    later = add(scheduler, "later", 1, max_tokens=1)
    assert step(scheduler) == [("oldest", 7, 1), ("youngest", 7, 1)]
    # Both need a third block now, and one is left.
    assert step(scheduler) == [("oldest", 8, 1)]
    assert youngest.status is Status.WAITING
    assert youngest.num_preemptions == 1
    assert youngest.block_ids == []
    assert scheduler.waiting == [youngest, later]
    assert scheduler.stats.num_preempted_tokens == 8
    scheduler.finish(oldest)
    assert step(scheduler)[0] == ("youngest", 0, 8)


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(num_blocks=5)
    oldest, youngest = (add(scheduler, name, 7, max_tokens=13) for name in ("oldest", "youngest"))
    step(scheduler)
    step(scheduler)
    step(scheduler)
    assert youngest.status is Status.WAITING
    scheduler.finish(oldest)
    assert step(scheduler) == [("youngest", 8, 1)]


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    first = add(scheduler, "first", 4, max_tokens=8)
    second = add(scheduler, "second", 16, max_tokens=4)
    step(scheduler)
    assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)


def test_prompts_share_full_blocks_but_not_across_salts() -> None:
    scheduler = make_scheduler()
    prompt = list(range(10))
    add(scheduler, "a", prompt)
    step(scheduler)
    step(scheduler)
    b, c = add(scheduler, "b", prompt), add(scheduler, "c", prompt, cache_salt="tenant")
    plan = step(scheduler)
    assert ("b", 8, 2) in plan
    assert ("c", 0, 8) in plan
    assert (b.num_cached_tokens, c.num_cached_tokens) == (8, 0)


def test_blocks_are_found_only_after_they_are_computed() -> None:
    scheduler = make_scheduler(prefill_chunk=16, max_num_batched_tokens=64)
    prompt = list(range(10))
    add(scheduler, "a", prompt)
    add(scheduler, "b", prompt)
    assert step(scheduler) == [("a", 0, 10), ("b", 0, 10)]


@pytest.mark.parametrize("in_use", [True, False])
def test_a_prompt_that_is_known_as_a_whole_computes_one_token_in_a_copy(in_use: bool) -> None:
    scheduler = make_scheduler()
    prompt = list(range(8))
    first = add(scheduler, "a", prompt)
    step(scheduler)
    if not in_use:
        scheduler.finish(first)
    second = add(scheduler, "b", prompt)
    plan = scheduler.schedule()
    assert ("b", 7, 1) in spans(plan)
    assert len(plan.copies) == 1
    assert plan.copies[0].num_tokens == 3
    assert plan.copies[0].target == second.block_ids[1]
    assert plan.copies[0].source != second.block_ids[1]


def fork(scheduler: Scheduler, parent: Sequence, index: int) -> Sequence:
    return scheduler.fork(parent, replace(parent.request, id=f"{parent.id}/{index}"), index)


@pytest.mark.parametrize(("length", "copied"), [(6, 2), (8, 3), (5, 1)])
def test_forks_share_the_prompt_and_copy_what_they_write(length: int, copied: int) -> None:
    """The last writer of a partly filled last block keeps the original; a full one is copied by forks only."""
    scheduler = make_scheduler()
    parent = add(scheduler, "a", length)
    plan = scheduler.schedule()
    scheduler.complete(plan)
    child = fork(scheduler, parent, 1)
    parent.token_ids.append(7)
    assert child.status is Status.RUNNING
    assert child.block_ids == parent.block_ids
    plan = scheduler.schedule()
    assert spans(plan) == [("a", length, 1), ("a/1", length - 1, 1)]
    assert parent.block_ids[0] == child.block_ids[0]
    assert parent.block_ids[1] != child.block_ids[1]
    assert [copy.num_tokens for copy in plan.copies] == [copied]
    scheduler.check()
    for sequence in (parent, child):
        scheduler.finish(sequence)
    scheduler.check()
    assert scheduler.pool.num_free == 100


def test_a_fork_without_room_waits_and_computes_for_itself() -> None:
    scheduler = make_scheduler(max_num_seqs=1, prefix_caching=False)
    parent = add(scheduler, "a", 6)
    later = add(scheduler, "b", 6)
    scheduler.complete(scheduler.schedule())
    child = fork(scheduler, parent, 1)
    parent.token_ids.append(7)
    assert child.status is Status.WAITING
    assert scheduler.waiting == [child, later], "a fork stands in its parent's place"
    scheduler.finish(parent)
    assert step(scheduler) == [("a/1", 0, 6)]


def test_a_fork_does_not_overtake_who_is_more_urgent() -> None:
    scheduler = make_scheduler(num_blocks=6)
    parent = add(scheduler, "a", 6, max_tokens=4)
    plan = scheduler.schedule()
    urgent = add(scheduler, "urgent", 16, max_tokens=4, priority=-1)
    scheduler.complete(plan)
    child = fork(scheduler, parent, 1)
    assert scheduler.waiting == [urgent, child]


def test_a_full_block_that_a_fork_writes_alone_is_not_found_any_more() -> None:
    scheduler = make_scheduler()
    parent = add(scheduler, "a", list(range(8)))
    scheduler.complete(scheduler.schedule())
    child = fork(scheduler, parent, 1)
    scheduler.finish(parent)
    plan = scheduler.schedule()
    assert spans(plan) == [("a/1", 7, 1)]
    assert not plan.copies
    assert len(parent.block_hashes) == 2
    assert scheduler.pool.match(parent.block_hashes) == child.block_ids[:1]


def test_priority_is_worth_places_and_not_more() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "running", 1)
    step(scheduler)
    patient = add(scheduler, "patient", 1, priority=1)
    others = [add(scheduler, str(index), 1) for index in range(PRIORITY_PLACES + 5)]
    assert scheduler.waiting.index(patient) == PRIORITY_PLACES - 1
    urgent = add(scheduler, "urgent", 1, priority=-100)
    assert scheduler.waiting[0] is urgent
    assert len(others) == PRIORITY_PLACES + 5


def test_the_least_urgent_is_preempted_first() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    patient = add(scheduler, "patient", 7, max_tokens=13, priority=1)
    step(scheduler)
    urgent = add(scheduler, "urgent", 7, max_tokens=13)
    for _ in range(3):
        step(scheduler)
    assert (patient.status, urgent.status) == (Status.WAITING, Status.RUNNING)


def test_finishing_frees_at_once_and_twice_is_fine() -> None:
    scheduler = make_scheduler()
    sequence, waiting = add(scheduler, "a", 9), add(scheduler, "b", 9)
    step(scheduler)
    for _ in range(2):
        scheduler.finish(sequence)
        scheduler.finish(waiting)
    assert scheduler.pool.num_free == 100
    assert not scheduler.has_work
    scheduler.check()


def test_what_cannot_be_trusted_is_not_found_again() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", list(range(9)))
    step(scheduler)
    step(scheduler)
    scheduler.finish(sequence, trusted=False)
    add(scheduler, "b", list(range(9)))
    assert step(scheduler) == [("b", 0, 8)]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "message"),
    [
        (0, 1, r"^\D+$"),
        (50, 1, r"50 tokens.*50.*49"),
        (40, 11, r"40 prompt.*max_tokens=11.*50.*10"),
        (20, 21, r"20 prompt.*max_tokens=21.*11 KV.*4.*10"),
    ],
)
def test_the_impossible_is_refused_with_the_numbers(num_prompt_tokens: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(num_blocks=10, max_model_len=50)
    with pytest.raises(RequestError, match=message):
        add(scheduler, "a", num_prompt_tokens, max_tokens)
    assert not scheduler.has_work


def test_the_largest_possible_request_is_taken_and_finishes() -> None:
    scheduler = make_scheduler(num_blocks=10, max_model_len=50)
    sequence = add(scheduler, "a", 20, 20)
    while sequence.num_output_tokens < 20:
        step(scheduler)
    assert sequence.num_preemptions == 0


BLOCK = 4


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
