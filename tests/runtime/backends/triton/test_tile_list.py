"""Work lists that the device makes: every row once, splits as the host counts them, results apart from each other."""

from dataclasses import replace
from random import Random

import pytest
import torch
from poisoned_memory import poisoned_allocations
from ragged import ragged_rows

from runtime.backends.triton.tiling import MAX_SPLITS, Tiling, tile_rows

TILINGS = {
    "few heads": Tiling(16, 4, 8, 264),
    "one kv head of many": Tiling(16, 71, 1, 264),
    "odd heads": Tiling(64, 7, 2, 264),
    "windows": Tiling(32, 3, 2, 512, reach=500, least=64),
    "one processor": Tiling(16, 2, 2, 2),
}


def random_lengths(seed: int) -> list[tuple[int, int]]:
    """Decodes, one of them long, drafts, chunks and prompts: more sequences than the kernel takes at a time."""
    chance = Random(seed)
    keys = [1, 30000, *(chance.randrange(1, 700) for _ in range(80))]
    lengths = [(1, each) for each in keys] + [(5, each + 4) for each in keys[2:8]]
    return [*lengths, (128, 128), (200, 5000), (33, 40)]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", TILINGS)
def test_every_row_of_every_split_once(gpu, name: str, captured: bool) -> None:
    from runtime.backends.triton.kernels.tile_list import tile_list

    tiling, lengths = TILINGS[name], random_lengths(3)
    positions = [torch.arange(keys - tokens, keys) for tokens, keys in lengths]
    rows = ragged_rows([torch.arange(-(-keys // 16)) for _, keys in lengths], [each.to(gpu) for each in positions])
    num_tokens = len(rows.positions)
    with poisoned_allocations():
        found = tile_list(replace(rows, lengths=()) if captured else rows, num_tokens, tiling)
    items, starts, tables = found.items.tolist(), rows.starts.tolist(), rows.tables.tolist()
    splits, expected = tiling.splits(lengths), []
    for sequence, (tokens, _) in enumerate(lengths):
        for tile in range(tiling.tiles(tokens)):
            for split in range(splits[sequence]):
                first = tables[sequence], starts[sequence], tile * tiling.rows, tokens * tiling.shared
                expected.append([sequence, *first, split, splits[sequence]])
    used = [item for item in items if item[4]]
    assert [item[:7] for item in used] == expected
    assert max(splits) <= found.most_splits <= MAX_SPLITS
    held = {item[0]: item[7] for item in used}
    places = []
    for sequence, (tokens, _) in enumerate(lengths):
        own = found.parts[starts[sequence] : starts[sequence] + tokens].tolist()
        count = splits[sequence] if splits[sequence] > 1 else 0
        assert own == [[held[sequence] + token * splits[sequence], count] for token in range(tokens)]
        places += [first + split for first, number in own for split in range(number)]
    assert len(set(places)) == len(places)
    assert max(places, default=0) < found.num_parts


def test_sequences_with_other_rows_than_the_step_are_refused() -> None:
    from runtime.backends.triton.kernels.tile_list import tile_list

    rows = ragged_rows([torch.arange(60)] * 2, [torch.tensor([900])] * 2)
    for num_tokens in (1, 3):
        with pytest.raises(ValueError, match="2 rows"):
            tile_list(rows, num_tokens, Tiling(16, 2, 1, 64))


def test_padding_and_empty_sequences_have_no_splits(gpu) -> None:
    """A sequence of padding has rows, to store zeros; one without rows has no item."""
    from runtime.backends.triton.kernels.tile_list import tile_list

    positions = [torch.tensor([900]), torch.tensor([], dtype=torch.int64), torch.tensor([-1, -1])]
    starts = torch.tensor([0, 1, 1, 3], device=gpu)
    rows = ragged_rows([torch.arange(60)] * 3, [torch.tensor([900], device=gpu)] * 3)
    rows = replace(rows, starts=starts, positions=torch.cat(positions).to(gpu), longest=2, lengths=())
    found = tile_list(rows, 3, Tiling(16, 2, 1, 64, least=256))
    used = [item for item in found.items.tolist() if item[4]]
    assert [(item[0], item[5], item[6]) for item in used] == [(0, split, 4) for split in range(4)] + [(2, 0, 1)]
    assert found.parts[:, 1].tolist() == [4, 0, 0]


def test_rows_of_a_tile_fit_in_registers() -> None:
    assert [tile_rows(128, rows) for rows in (1, 16, 17, 32, 33, 8192)] == [16, 16, 32, 32, 64, 64]
    assert [tile_rows(256, 8192), tile_rows(512, 8192)] == [32, 16]
