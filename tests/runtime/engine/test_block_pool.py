import pytest

from runtime.engine.block_pool import BlockPool, extend_hashes, root_hash


def chain(tokens: list[int], block_size: int = 2, salt: str = "", namespace: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, root_hash(namespace, salt))
    return hashes


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a sequence that was computed and registered."""
    table = pool.allocate(pool.blocks_for(len(tokens)))
    hashes = chain(tokens, pool.block_size)
    for index in range(len(hashes)):
        pool.register(table, index, hashes)
    return table


def test_hashes_cover_full_blocks_and_everything_before_them() -> None:
    assert len(chain([1, 2, 3, 4, 5])) == 2
    assert chain([1, 2, 3, 4])[0] == chain([1, 2, 9, 9])[0]
    assert chain([1, 2, 3, 4])[1] != chain([9, 9, 3, 4])[1]
    assert all(len(block_hash) == 16 for block_hash in chain([1, 2, 3, 4]))


def test_salt_and_format_separate_chains() -> None:
    assert len({chain([1, 2], salt=salt, namespace=name)[0] for salt in ("", "a") for name in ("bf16", "int8")}) == 4
    assert root_hash("a", "b") != root_hash("ab", "")


def test_extending_hashes_step_by_step_gives_the_same_chain() -> None:
    tokens = list(range(11))
    hashes: list[bytes] = []
    for length in range(len(tokens) + 1):
        extend_hashes(hashes, tokens[:length], 3, root_hash("", ""))
    assert hashes == chain(tokens, 3)


def test_the_longest_known_prefix_is_found_and_shared() -> None:
    pool = BlockPool(8, 2)
    table = filled(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match(chain([1, 2, 3, 4, 9, 9])) == table[:2]
    assert pool.match(chain([9, 9, 3, 4])) == []
    pool.acquire(table[:2])
    pool.check([table, table[:2]])
    pool.release(table)
    pool.check([table[:2]])
    assert pool.num_free == 6


def test_freed_blocks_stay_findable_until_they_are_needed() -> None:
    pool = BlockPool(4, 2)
    table = filled(pool, [1, 2, 3, 4])
    pool.release(table)
    assert pool.num_free == 4
    assert pool.match(chain([1, 2, 3, 4])) == table
    taken = pool.allocate(2)
    assert not set(taken) & set(table), "empty blocks are handed out before cached ones"
    assert pool.num_evictions == 0
    pool.allocate(1)
    assert pool.num_evictions == 1
    assert pool.match(chain([1, 2, 3, 4])) == table[:1], "the tail goes first"


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(4, 2)
    old, new = filled(pool, [1, 2, 3, 4]), filled(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    pool.acquire(old)
    pool.release(old)
    pool.allocate(2)
    assert pool.match(chain([1, 2, 3, 4])) == old
    assert pool.match(chain([5, 6, 7, 8])) == []


def test_equal_blocks_become_one() -> None:
    pool = BlockPool(5, 2)
    first, second = filled(pool, [1, 2, 3]), filled(pool, [1, 2, 4, 4])
    assert pool.match(chain([1, 2, 4, 4])) == second
    assert second[0] == first[0]
    assert (pool.num_cached, pool.num_free) == (2, 2)
    pool.check([first, second])
    pool.release(second)
    pool.check([first])
    assert pool.match(chain([1, 2, 4, 4])) == second


def test_a_block_whose_beginning_is_unknown_stays_anonymous() -> None:
    pool = BlockPool(4, 2)
    table, hashes = filled(pool, [1, 2]) + pool.allocate(1), chain([1, 2, 3, 4])
    pool.forget(table[:1])
    pool.register(table, 1, hashes)
    assert pool.num_cached == 0
    pool.check([table])


def test_the_end_of_a_chain_goes_before_its_beginning_whatever_was_freed_first() -> None:
    pool = BlockPool(4, 2)
    table = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    for index in (1, 0, 3, 2):
        pool.release([table[index]])
    for left in (3, 2, 1, 0):
        pool.allocate(1)
        assert pool.match(chain([1, 2, 3, 4, 5, 6, 7, 8])) == table[:left]


def test_what_follows_an_evicted_block_and_is_in_use_is_not_found_any_more() -> None:
    pool = BlockPool(2, 2)
    table = filled(pool, [1, 2, 3, 4])
    pool.release(table[:1])
    taken = pool.allocate(1)
    assert taken == table[:1]
    assert pool.num_cached == 0
    pool.check([taken, table[1:]])


def test_evicting_on_demand_takes_ends_of_chains_and_nothing_in_use() -> None:
    pool = BlockPool(6, 2)
    table, used = filled(pool, [1, 2, 3, 4, 5, 6]), filled(pool, [7, 8])
    pool.release(table)
    pool.evict(2)
    assert pool.match(chain([1, 2, 3, 4, 5, 6])) == table[:1]
    pool.evict(9)
    assert pool.match(chain([7, 8])) == used
    assert (pool.num_cached, pool.num_free, pool.num_evictions) == (1, 5, 3)
    pool.check([used])


def test_rebuilding_heals_a_corrupted_pool() -> None:
    pool = BlockPool(6, 2, num_host_blocks=2)
    table = filled(pool, [1, 2, 3, 4])
    pool._blocks[table[0]].ref_count = 7
    pool._free[table[1]] = None
    with pytest.raises(RuntimeError, match=r" 7 .* 1$"):
        pool.check([table])
    pool.rebuild([table])
    pool.check([table])
    assert (pool.num_free, pool.num_cached) == (4, 0)


def test_forgotten_blocks_are_not_found_and_go_first() -> None:
    pool = BlockPool(4, 2)
    other, table = filled(pool, [7, 8]), filled(pool, [1, 2, 3, 4])
    pool.release(other)
    pool.release(table)
    pool.forget(table[:1])
    assert pool.match(chain([1, 2, 3, 4])) == []
    pool.check([])
    assert set(table) < set(pool.allocate(3)), "what followed the forgotten block is of no use either"
    assert pool.match(chain([7, 8])) == other


def test_a_fork_shares_until_it_writes() -> None:
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    child = list(table)
    pool.acquire(child)
    assert child == table
    assert child is not table
    assert pool.shared(table[1])
    pool.check([table, child])
    pool.release(table)
    assert not pool.shared(child[1])
    pool.check([child])


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, 2, prefix_caching=False)
    pool.release(filled(pool, [1, 2]))
    assert pool.match(chain([1, 2])) == []


def test_misuse_is_caught() -> None:
    pool = BlockPool(2, 2)
    table = pool.allocate(2)
    with pytest.raises(ValueError, match=r"1 blocks.*0 free"):
        pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match=f"{table[0]} .*twice"):
        pool.release(table[:1])


def test_check_sees_a_lost_and_an_invented_reference() -> None:
    pool = BlockPool(2, 2)
    table = pool.allocate(1)
    with pytest.raises(RuntimeError, match=r" 1 .* 0$"):
        pool.check([])
    with pytest.raises(RuntimeError, match=r" 1 .* 2$"):
        pool.check([table, table])
