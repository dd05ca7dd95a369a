"""Any use of the pool: unreachable blocks are not kept, and the ends of chains are evicted first."""

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiers import examples

from runtime.engine.block_pool import BlockPool, extend_hashes, root_hash

BLOCK_SIZE = 2


def chain(tokens: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, BLOCK_SIZE, root_hash("", ""))
    return hashes


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet share many prefixes. `chains` are all that were ever registered."""

    @initialize(num_blocks=st.integers(1, 12), num_host_blocks=st.sampled_from([0, 2, 5]))
    def start(self, num_blocks: int, num_host_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)
        self.tables: list[list[int]] = []
        self.chains: dict[bytes, list[bytes]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), hit=st.booleans())
    def compute(self, tokens: list[int], hit: bool) -> None:
        """A sequence takes blocks, the known ones first unless others compute the same tokens, and registers them."""
        hashes = chain(tokens)
        found = self.pool.match(hashes) if hit else []
        num_new = self.pool.blocks_for(len(tokens)) - len(found)
        if num_new + self.pool.count_free(found) > self.pool.num_free:
            return
        self.pool.acquire(found)
        before = self.findable()
        table = found + self.pool.allocate(num_new)
        self.check_evictions(before)
        for index in range(len(found), len(hashes)):
            self.chains[hashes[index]] = hashes[: index + 1]
            self.pool.register(table, index, hashes)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        self.pool.forget(data.draw(st.sampled_from(self.tables)))

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        before = self.findable()
        self.pool.evict(count)
        self.check_evictions(before)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.pool.touch(data.draw(st.integers(0, self.pool.num_blocks - 1)))

    def findable(self) -> dict[bytes, int]:
        """Blocks that some chain leads to, by hash."""
        found = {}
        for hashes in self.chains.values():
            found.update(zip(hashes, self.pool.match(hashes), strict=False))
        return found

    def check_evictions(self, before: dict[bytes, int]) -> None:
        """An evicted block has no cached successor."""
        after = self.findable()
        gone = before.keys() - after.keys()
        for block_hash in after:
            assert gone.isdisjoint(self.chains[block_hash])

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)
            assert len(self.findable()) == self.pool.num_cached, "an unreachable block is kept"


PoolMachine.TestCase.settings = examples(100, stateful_step_count=40, suppress_health_check=list(HealthCheck))
test_nothing_unreachable_is_kept = PoolMachine.TestCase
