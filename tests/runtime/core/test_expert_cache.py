"""Which experts lie on the device: every chosen one when it is computed, the least recently used one leaves first."""

from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from runtime.core.expert_cache import ExpertCache

EXPERTS = 9


@examples(300)
@given(
    num_slots=st.integers(1, EXPERTS - 1),
    popular=st.permutations(range(EXPERTS)),
    steps=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, EXPERTS - 1))), max_size=12),
)
def test_every_expert_lies_on_the_device_when_it_is_computed(
    num_slots: int, popular: list[int], steps: list[tuple[bool, set[int]]]
) -> None:
    cache = ExpertCache(num_slots, popular)
    device = {slot: expert for expert, slot in cache.fill().slots.items()}
    assert set(device.values()) == set(popular[:num_slots])
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


def test_the_least_recently_used_expert_leaves_first() -> None:
    cache = ExpertCache(3, [4, 2, 0, 1, 3])
    assert sorted(cache.fill().slots) == [0, 2, 4]
    (first,) = cache.rounds([0, 1])
    assert first.loads == (1,)
    assert sorted(cache.slots) == [0, 1, 4]
    (second,) = cache.rounds([2])
    assert second.loads == (2,)
    assert sorted(cache.slots) == [0, 1, 2]
    assert (cache.queries, cache.hits) == (3, 1)


def test_more_experts_than_slots_are_computed_in_rounds() -> None:
    cache = ExpertCache(2, range(5))
    cache.fill()
    assert [sorted(each.slots) for each in cache.rounds(range(5))] == [[0, 1], [2, 3], [4]]
    assert sorted(cache.slots) == [3, 4]
