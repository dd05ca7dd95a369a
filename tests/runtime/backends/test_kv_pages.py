import pytest
import torch
from tiny_configs import SIZES

from compress.checkpoint.kv_cache import UNCOMPRESSED
from runtime.backends.kv_pages import BlockField, BlockMemory, TokenPages
from runtime.core.model_config import parse_config
from runtime.core.step import BlockCopy, BlockOffload, BlockRestore

CONFIG = parse_config({"model_type": "llama", **SIZES})
CPU = torch.device("cpu")
FIELDS = {"codes": BlockField((4, 3), torch.uint8), "scales": BlockField((4,), torch.float16)}


@pytest.fixture
def memory() -> BlockMemory:
    memory = BlockMemory(FIELDS, num_layers=2, num_blocks=6, device=CPU, num_host_blocks=2)
    for tensor in memory.tensors.values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    return memory


def contents(memory: BlockMemory) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in memory.tensors.values()]


def test_what_is_written_is_gathered() -> None:
    pages = TokenPages(CONFIG, UNCOMPRESSED, num_blocks=6, block_size=4, dtype=torch.float64, device=CPU)
    pages.memory.clear(range(6))
    key, value = torch.randn(2, 5, 2, 16, dtype=torch.float64)
    pages.write(1, torch.tensor([3, 4, 20, 21, 7]), key, value)
    keys, values = pages.gather(1, torch.tensor([5, 0, 1]))
    assert keys.shape == (12, 2, 16)
    assert torch.equal(keys[[7, 8, 0, 1, 11]], key)
    assert torch.equal(values[[7, 8, 0, 1, 11]], value)
    assert not any(part.any() for part in pages.gather(0, torch.tensor([5, 0, 1])))


def test_copies_read_everything_before_they_write(memory: BlockMemory) -> None:
    before = contents(memory)
    memory.copy([BlockCopy(0, 1, 4), BlockCopy(1, 2, 3), BlockCopy(2, 0, 1)])
    for tensor, old in zip(memory.tensors.values(), before, strict=True):
        assert torch.equal(tensor[:, [1, 2, 0]], old[:, [0, 1, 2]])
        assert torch.equal(tensor[:, 3:], old[:, 3:])


def test_clear(memory: BlockMemory) -> None:
    before = contents(memory)
    memory.clear([4, 2])
    for tensor, old in zip(memory.tensors.values(), before, strict=True):
        assert not tensor[:, [2, 4]].any()
        assert torch.equal(tensor[:, [0, 1, 3, 5]], old[:, [0, 1, 3, 5]])


def test_blocks_come_back_from_host_memory_bit_by_bit(memory: BlockMemory) -> None:
    before = contents(memory)
    memory.offload([BlockOffload(block=3, slot=1), BlockOffload(block=0, slot=0)])
    memory.clear([0, 3])
    memory.restore([BlockRestore(slot=1, block=5), BlockRestore(slot=0, block=3)])
    for tensor, old in zip(memory.tensors.values(), before, strict=True):
        assert torch.equal(tensor[:, [5, 3]], old[:, [3, 0]])
        assert torch.equal(tensor[:, [1, 2, 4]], old[:, [1, 2, 4]])
        assert not tensor[:, 0].any()


def test_memory_knows_its_size(memory: BlockMemory) -> None:
    assert memory.nbytes == 2 * 6 * sum(field.nbytes for field in FIELDS.values()) == 2 * 6 * (12 + 8)
