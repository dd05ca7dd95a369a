from __future__ import annotations

import pytest
import torch
from tiny_models import SIZES

from runtime.model.config import parse_config
from runtime.model.pages import KVPages
from runtime.step import BlockCopy, BlockOffload, BlockRestore

CONFIG = parse_config({"model_type": "llama", **SIZES})
CPU = torch.device("cpu")


@pytest.fixture
def pages():
    pages = KVPages(CONFIG, num_blocks=6, block_size=4, dtype=torch.float64, device=CPU, num_host_blocks=2)
    pages.data.copy_(torch.arange(pages.data.numel()).view(pages.data.shape))
    return pages


def test_what_is_written_is_gathered(pages):
    key, value = torch.randn(2, 5, 2, 16, dtype=torch.float64)
    pages.write(1, torch.tensor([3, 4, 20, 21, 7]), key, value)
    keys, values = pages.gather(1, torch.tensor([5, 0, 1]))
    assert keys.shape == (12, 2, 16)
    assert torch.equal(keys[[7, 8, 0, 1, 11]], key)
    assert torch.equal(values[[7, 8, 0, 1, 11]], value)
    untouched, _ = pages.gather(0, torch.tensor([5, 0, 1]))
    assert torch.equal(untouched, pages.data[0, 0, [5, 0, 1]].flatten(0, 1))


def test_copies_read_everything_before_they_write(pages):
    before = pages.data.clone()
    pages.copy([BlockCopy(0, 1, 4), BlockCopy(1, 2, 3), BlockCopy(2, 0, 1)])
    assert torch.equal(pages.data[:, :, 1], before[:, :, 0])
    assert torch.equal(pages.data[:, :, 2, :3], before[:, :, 1, :3])
    assert torch.equal(pages.data[:, :, 0, :1], before[:, :, 2, :1])
    assert not pages.data[:, :, 2, 3:].any()
    assert not pages.data[:, :, 0, 1:].any()
    assert torch.equal(pages.data[:, :, 3:], before[:, :, 3:])


def test_clear(pages):
    before = pages.data.clone()
    pages.clear([4, 2])
    assert not pages.data[:, :, [2, 4]].any()
    assert torch.equal(pages.data[:, :, [0, 1, 3, 5]], before[:, :, [0, 1, 3, 5]])


def test_blocks_come_back_from_host_memory_bit_by_bit(pages):
    before = pages.data.clone()
    pages.offload([BlockOffload(block=3, slot=1), BlockOffload(block=0, slot=0)])
    pages.clear([0, 3])
    pages.restore([BlockRestore(slot=1, block=5), BlockRestore(slot=0, block=3)])
    assert torch.equal(pages.data[:, :, [5, 3]], before[:, :, [3, 0]])
    assert torch.equal(pages.data[:, :, [1, 2, 4]], before[:, :, [1, 2, 4]])
    assert not pages.data[:, :, 0].any()
