"""Attention over pages in Triton against plain torch in float64 over the same codes: every form, grouped heads,
windows, ragged lengths, drafts, chunks, empty splits; memory that nobody wrote is poisoned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from poisoned_memory import poison, poisoned_allocations

from compress.checkpoint.kv_cache import CODE_BITS, KVCacheScheme
from compress.checkpoint.kv_numerics import QuantizedHeads, dequantize_heads, quantize_heads, rotate_heads
from runtime.attention.gpu import TritonAttention, num_splits, refuse
from runtime.attention.paged import PagedAttention
from runtime.attention.step_keys import StepKeys
from runtime.batch import AttentionGroup
from runtime.model.kv_cache import ExactPlaces
from runtime.model.pages import ExactPages
from runtime.model.pages_quantized import QuantizedPages, pack_halves

BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 16, 24, 32


class Pages:
    """Random heads in one form: as a kernel reads them, and as exact numbers `[blocks, block_size, heads, D]`."""

    def __init__(self, form: str, kv_heads: int, seed: int, device: torch.device) -> None:
        heads = torch.randn(NUM_BLOCKS, BLOCK_SIZE, kv_heads, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
        if form == "16bit":
            self.codes = self.scales = heads.half().to(device)
            self.exact = heads.half().double()
            return
        found: QuantizedHeads = quantize_heads(heads, form)
        self.exact = dequantize_heads(found, torch.float64)
        metadata = [found.scale] if found.offset is None else [found.scale, found.offset]
        self.codes = (pack_halves(found.codes) if CODE_BITS[form] == 4 else found.codes).to(device)
        self.scales = torch.stack(metadata, -1).to(device)


def reference(query, keys, values, blocks, positions, window):
    """The slow way, one row after the other."""
    tokens, heads, head_dim = query.shape
    each, shared = tokens // len(blocks), heads // keys.shape[2]
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float64)
    for token in range(tokens):
        context = [keys[blocks[token // each]].flatten(0, 1), values[blocks[token // each]].flatten(0, 1)]
        last = int(positions[token])
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(heads):
            key, value = (part[first : last + 1, head // shared] for part in context)
            out[token, head] = torch.softmax(key @ query[token, head] * head_dim**-0.5, 0) @ value
    return out


CASES = [
    # lengths of the sequences, tokens of each, heads, kv heads, window, splits
    ((50, 7), 1, 4, 2, None, 1),
    ((90, 3), 1, 8, 2, None, 4),
    ((70,), 1, 2, 2, 20, 2),
    ((33, 90), 5, 6, 2, None, 3),
    ((80,), 37, 4, 1, 24, 1),
]


@pytest.mark.parametrize(
    "forms", [("16bit",) * 2, ("fp8",) * 2, ("int8",) * 2, ("int8", "int4"), ("int4",) * 2], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(gpu, case, forms) -> None:
    from runtime.kernels.gpu.launch_attention import attend

    lengths, each, heads, kv_heads, window, splits = case
    key, value = Pages(forms[0], kv_heads, 1, gpu), Pages(forms[1], kv_heads, 2, gpu)
    query = torch.randn(len(lengths) * each, heads, HEAD_DIM, generator=torch.Generator().manual_seed(3)).half()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4))[: 6 * len(lengths)].view(-1, 6)
    positions = torch.cat([torch.arange(length - each, length) for length in lengths])
    with poisoned_allocations():
        found = attend(
            query.to(gpu), (key.codes, value.codes), (key.scales, value.scales), forms,
            blocks.to(gpu), positions.to(gpu), window, 16 if each < 10 else 64, splits,
        )  # fmt: skip
    expected = reference(query.double(), key.exact, value.exact, blocks, positions, window)
    error = (found.cpu().double() - expected).norm() / expected.norm()
    assert found.dtype == torch.float16
    assert error < 2e-3


def test_a_sequence_does_not_see_its_neighbours(gpu) -> None:
    from runtime.kernels.gpu.launch_attention import attend

    key, value = Pages("int4", 2, 1, gpu), Pages("int4", 2, 2, gpu)
    query = torch.randn(2, 4, HEAD_DIM).half().to(gpu)
    blocks, positions = torch.arange(12, device=gpu).view(2, 6), torch.tensor([80, 40], device=gpu)
    arguments = (key.codes, value.codes), (key.scales, value.scales), ("int4", "int4")
    together = attend(query, *arguments, blocks, positions, None, 16, 2)
    value.scales[6:] = float("nan")
    alone = attend(query, *arguments, blocks, positions, None, 16, 2)
    assert torch.equal(alone[0], together[0])
    assert alone[1].isnan().all()


@pytest.mark.parametrize("format", ["16bit", "k8v4", "int4"])
def test_a_step_agrees_with_plain_torch(gpu, format: str) -> None:
    """Prompt, draft and single tokens of several sequences, written and read through the pages that torch uses."""
    scheme = KVCacheScheme.named(format)
    config = SimpleNamespace(num_layers=1, num_kv_heads=2, head_dim=HEAD_DIM)
    sizes = (NUM_BLOCKS, BLOCK_SIZE, torch.float16, gpu)
    random = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(50, n, HEAD_DIM, generator=random).to(gpu, torch.float16) for n in (6, 2, 2))
    results = []
    for attention in (PagedAttention, TritonAttention):
        pages = ExactPages(config, *sizes) if scheme.is_exact else QuantizedPages(config, scheme, *sizes)
        poison(pages.memory)
        pages.memory.clear(range(NUM_BLOCKS))
        turn = rotate_heads if scheme.rotate else (lambda heads: heads)
        cache = SimpleNamespace(pages=pages, scheme=scheme, turn=turn, sinks=None, recent=None)
        table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(6))[:3]
        slots = (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(gpu)
        out = []
        for start, stop in ((0, 37), (37, 41), (41, 42)):
            positions = torch.arange(start, stop, device=gpu)
            ragged = 0 < start < stop - 1
            group = AttentionGroup(slice(0, stop - start), table.to(gpu), positions, 1, stop, ragged)
            batch = SimpleNamespace(groups=(group,), slots=slots[start:stop], positions=positions)
            step = attention(StepKeys(cache, batch, ExactPlaces(None, None)), (None,))
            out.append(step(0, query[start:stop], key[start:stop], value[start:stop]))
        results.append(torch.cat(out).double())
    assert (results[1] - results[0]).norm() / results[0].norm() < 2e-3


def test_splits_fill_the_processors_and_are_never_tiny() -> None:
    assert num_splits(32768, 8, 132) == 33
    assert num_splits(32768, 8 * 64, 132) == 1
    assert num_splits(1000, 1, 132) == 3
    assert num_splits(10**6, 1, 132) == 64


def test_refusals_say_why() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert not refuse(cuda, torch.bfloat16, 128, False)
    assert "NVIDIA" in refuse(cpu, torch.bfloat16, 128, False)
    assert "16 bits" in refuse(cuda, torch.float32, 128, False)
    assert "dimensions" in refuse(cuda, torch.bfloat16, 96, False)
    assert "exact sinks" in refuse(cuda, torch.bfloat16, 128, True)
