"""Which experts lie on the device: every chosen one when it is computed, the least frequent one leaves first."""

from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.core.expert_cache import ExpertCache

EXPERTS = 9


@examples(300)
@given(
    num_slots=st.integers(1, EXPERTS - 1),
    popularity=st.lists(st.floats(0, 1), min_size=EXPERTS, max_size=EXPERTS),
    steps=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, EXPERTS - 1))), max_size=12),
)
def test_every_expert_lies_on_the_device_when_it_is_computed(
    num_slots: int, popularity: list[float], steps: list[tuple[bool, set[int]]]
) -> None:
    cache = ExpertCache(num_slots, popularity)
    device = {slot: expert for expert, slot in cache.fill().slots.items()}
    assert sorted(popularity[expert] for expert in device.values()) == sorted(popularity)[-num_slots:]
    for singly, wanted in steps:
        before, computed, loaded = set(device.values()), [], []
        for each in cache.one_by_one(sorted(wanted)) if singly else cache.rounds(sorted(wanted)):
            device |= {each.slots[expert]: expert for expert in each.loads}
            assert all(device[slot] == expert for expert, slot in each.slots.items())
            assert {expert: slot for slot, expert in device.items()} == cache.slots
            assert len(device) == num_slots
            computed += each.slots
            loaded += each.loads
        assert sorted(computed) == sorted(wanted)
        if singly:
            assert computed == sorted(wanted)
        else:
            assert set(loaded) == wanted - before
    looked_up = sum(len(wanted) for _, wanted in steps)
    assert cache.queries == looked_up >= cache.hits


def test_the_least_frequent_expert_leaves_first() -> None:
    cache = ExpertCache(3, [0.3, 0.0, 0.2, 0.0, 0.5])
    assert sorted(cache.fill().slots) == [0, 2, 4]
    for wanted, loads, left in (([0, 1], (1,), [0, 1, 4]), ([3], (3,), [0, 3, 4]), ([0, 3], (), [0, 3, 4])):
        (found,) = cache.rounds(wanted)
        assert found.loads == loads
        assert sorted(cache.slots) == left
    assert (cache.queries, cache.hits) == (5, 3)
    for _ in range(100):
        assert len(list(cache.rounds([1, 2]))) == 1
    assert {1, 2} < set(cache.slots)


def test_frequent_experts_outlast_a_step_with_all_experts() -> None:
    cache = ExpertCache(4, [0.1, 0.1, 0.3, 0.05, 0.05, 0.05, 0.3, 0.05])
    cache.fill()
    assert [sorted(each.slots) for each in cache.rounds(range(8))] == [[0, 1, 2, 6], [3, 4], [5, 7]]
    assert {2, 6} < set(cache.slots)


def test_an_expert_that_is_awaited_is_not_evicted() -> None:
    cache = ExpertCache(2, [0.1, 0.2, 0.0])
    cache.fill()
    assert [each.loads for each in cache.one_by_one([2, 0])] == [(2,), ()]
