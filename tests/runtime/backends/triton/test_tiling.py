"""Splits of keys between the programs of an attention launch."""

from __future__ import annotations

import pytest

from runtime.backends.triton.tiling import MAX_SPLITS, MIN_SPLIT_TOKENS, PROGRAMS_PER_PROCESSOR, Tiling


def test_splits_fill_the_processors_and_are_never_tiny() -> None:
    """Also where one sequence is much longer than the others, or decoded in a step with prompts."""
    tiling = Tiling(16, 4, 8, 264)
    assert tiling.splits([(1, 32768)]) == [33]
    assert tiling.splits([(1, 32768)] * 64) == [1] * 64
    assert tiling._replace(kv_heads=1).splits([(1, 1000)]) == [4]
    assert tiling._replace(kv_heads=1).splits([(1, 10**6)]) == [MAX_SPLITS]
    assert tiling.splits([(1, 200)] * 63 + [(1, 32768)]) == [1] * 63 + [24]
    assert tiling._replace(rows=64).splits([(128, 128)] * 16 + [(1, 32768)]) == [1] * 16 + [22]
    assert tiling._replace(reach=1024).splits([(1, 32768)]) == [4]


@pytest.mark.parametrize("processors", [108, 132])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("batch", [1, 3, 16, 64])
@pytest.mark.parametrize("keys", [300, 4096, 32768])
def test_decodes_make_two_waves_of_programs(batch: int, keys: int, kv_heads: int, processors: int) -> None:
    """Where keys are enough: a split has no fewer than `MIN_SPLIT_TOKENS`, and a sequence no more than `MAX_SPLITS`."""
    tiling = Tiling(16, 4, kv_heads, PROGRAMS_PER_PROCESSOR * processors)
    (splits,) = set(tiling.splits([(1, keys)] * batch))
    programs, most = batch * kv_heads * splits, min(MAX_SPLITS, -(-keys // MIN_SPLIT_TOKENS))
    assert splits == most or programs >= 0.95 * 2 * 3 * processors
    assert splits == 1 or programs <= 2 * 2 * 3 * processors
