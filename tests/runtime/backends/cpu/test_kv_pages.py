"""Keys and values stored by compiled code: the same bytes whatever tokens, threads and instruction sets store them."""

import pytest
import torch
from decoder_configs import decoder_config
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import rotate_heads
from compress.cpu.binding import best_instruction_set, library, set_threads
from runtime.backends.cpu.kv_pages import CpuPages

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
SETS = range(best_instruction_set() + 1)
HEADS, KV_HEADS, DIM, BLOCK = 6, 3, 96, 16


def empty_pages(format: str) -> CpuPages:
    pages = CpuPages(
        decoder_config(HEADS, KV_HEADS, DIM, 1), KVCacheScheme(format), 64, BLOCK, torch.bfloat16, torch.device("cpu")
    )
    for tensor in pages.memory.tensors.values():
        tensor.view(torch.uint8).fill_(255)
    pages.memory.clear(range(64))
    return pages


def heads(tokens: int, count: int, seed: int) -> Tensor:
    return torch.randn(tokens, count, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same_bytes(one: CpuPages, other: CpuPages) -> bool:
    pairs = [(tensor, other.memory.tensors[name]) for name, tensor in one.memory.tensors.items()]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("format", ["16bit", "int8", "k8v4", "int4"])
def test_a_prompt_stored_at_once_is_what_its_tokens_store_one_by_one(format: str, hadamard: bool) -> None:
    lengths, first_slots = (301, 1, 203), (5, 29 * BLOCK, 30 * BLOCK + 11)
    slots = torch.cat([torch.arange(length) + first for length, first in zip(lengths, first_slots, strict=True)])
    query, key, value = (heads(len(slots), count, count) for count in (HEADS, KV_HEADS, KV_HEADS))
    expected, expected_query = empty_pages(format), query.clone()
    for row in torch.randperm(len(slots), generator=torch.Generator().manual_seed(1)).tolist():
        part = slice(row, row + 1)
        queries = expected_query[part] if hadamard else None
        expected.write(0, slots[part], key[part], value[part], queries, instruction_set=0)
    try:
        for threads in (1, 3):
            set_threads(threads)
            for instruction_set in SETS:
                found, ours = empty_pages(format), query.clone()
                found.write(0, slots, key, value, ours if hadamard else None, instruction_set)
                assert same_bytes(found, expected)
                assert torch.equal(ours, expected_query)
    finally:
        set_threads(0)
    assert torch.equal(expected_query, rotate_heads(query) if hadamard else query)


def test_keys_are_not_changed_where_they_stand() -> None:
    slots, query, key, value = torch.arange(20), heads(20, HEADS, 0), heads(20, KV_HEADS, 1), heads(20, KV_HEADS, 2)
    before = key.clone(), value.clone()
    empty_pages("int4").write(0, slots, key, value, query)
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


def test_a_missing_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="set 7"):
        empty_pages("16bit").write(0, torch.arange(1), heads(1, 3, 0), heads(1, 3, 1), instruction_set=7)
