import pytest

from runtime.core.step import BlockOffload
from runtime.engine.kv_offload import KVOffload


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
    tier = saved(KVOffload(3), b"a")
    tier.save(b"b", 1)
    tier.load([b"b"])
    tier.take_offloads()
    tier.settle(done=False)
    assert tier.find([b"a"])
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
    with pytest.raises(RuntimeError, match="without an owner"):
        tier.check()
    tier._free.clear()
    with pytest.raises(RuntimeError, match=r"1 used.*0 free.*2"):
        tier.check()
