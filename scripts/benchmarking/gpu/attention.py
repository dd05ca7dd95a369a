"""Attention of one layer on a GPU: over pages of each form, by PyTorch, and by flashinfer where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from benchmarking.cpu.attention import Case, decoder_config, fill_pages
from benchmarking.gpu.timing import Measured, first_line, num_copies, seconds_per_call
from compress.checkpoint.kv_cache import KVCacheScheme
from runtime.backends.kv_pages import TokenPages
from runtime.backends.scores import PLAIN_LAYER
from runtime.backends.triton.attention import NO_SINK_TOKENS, layer_pages
from runtime.backends.triton.fused_linear import ROWS_LAYOUT, QuantizedInput
from runtime.backends.triton.prefill import attend_span
from runtime.backends.triton.tiling import PROGRAMS_PER_PROCESSOR, Tiling, tile_rows
from runtime.core.batch import AttentionGroup, RaggedRows, equal_rows

FORMS, PAGES = ("16bit", "fp8", "int8", "int4"), "pages "
PAGES_BY_WORTH = ("int4", "16bit", "int8", "fp8")
SDPA, GATHERED = "SDPA bf16, contiguous", "SDPA over copies of "


@dataclass(frozen=True)
class Calls:
    """The same step over several copies of keys and values, and the bytes that one of them reads."""

    calls: list[Callable[[], object]]
    nbytes: int


def last_tokens(table: Tensor, tokens: int, keys: int) -> RaggedRows:
    """The last tokens of sequences of equal length, with block tables `[sequences, n]`."""
    count = len(table)
    positions = torch.arange(keys - tokens, keys, device=table.device).repeat(count)
    group = AttentionGroup(slice(0, count * tokens), table.flatten(), positions, count, keys, ragged=True)
    return replace(equal_rows(group), lengths=((tokens, keys),) * count)


def paged_calls(case: Case, form: str, processors: int, device: torch.device, tokens: int = 1) -> Calls:
    """The last tokens of each of `case.batch` sequences of `case.context` keys, in the form of the pages."""
    from runtime.backends.triton.kernels.paged_attention import prepare
    from runtime.backends.triton.kernels.tile_list import tile_list

    blocks, scheme = case.num_blocks, KVCacheScheme(form)
    config = decoder_config(case, copies_of(case))
    pages = TokenPages(config, scheme, blocks, case.block_size, torch.bfloat16, device)
    tensors = pages.memory.tensors
    fill_pages(tensors, scheme)
    query = torch.randn(case.batch * tokens, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
    table = torch.randperm(blocks, device=device).view(case.batch, -1)
    ragged = last_tokens(table, tokens, case.context)
    shared = case.heads // case.kv_heads
    rows = tile_rows(case.head_dim, tokens * shared)
    tiling = Tiling(rows, shared, case.kv_heads, PROGRAMS_PER_PROCESSOR * processors)
    tiles = tile_list(ragged, len(query), tiling)

    def call(layer: int) -> Callable[[], Tensor]:
        read = layer_pages(pages, scheme, layer)
        prepared = prepare(query, read, ragged, tiles, rows, None, NO_SINK_TOKENS, PLAIN_LAYER)
        out = QuantizedInput(torch.empty_like(query).flatten(1))

        def attend() -> Tensor:
            prepared(query, read, NO_SINK_TOKENS, None, out, ROWS_LAYOUT)
            return out.rows

        return attend

    nbytes = sum(tensor[0].nbytes for tensor in tensors.values())
    return Calls([call(layer) for layer in range(config.num_layers)], nbytes)


FLASHINFER = "flashinfer 16bit"


def flashinfer_calls(case: Case, device: torch.device, tokens: int = 1) -> Calls:
    """The same over 16-bit pages by the optional package, planned once."""
    from runtime.backends.flashinfer.attention import Spans, new_wrapper, plan

    table = torch.randperm(case.num_blocks, device=device, dtype=torch.int32)
    each, counts = case.num_blocks // case.batch, torch.arange(case.batch + 1, dtype=torch.int32)
    last = torch.full((case.batch,), case.block_size, dtype=torch.int32)
    spans, wrapper = Spans(counts * tokens, counts * each, table, last), new_wrapper(device)
    plan(wrapper, spans, (case.heads, case.kv_heads, case.head_dim), case.block_size, torch.bfloat16)
    query = torch.randn(case.batch * tokens, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
    shape = case.num_blocks, case.block_size, case.kv_heads, case.head_dim

    def call() -> Callable[[], object]:
        pages = tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        return lambda: wrapper.run(query, pages)

    return Calls([call() for _ in range(copies_of(case))], case.kv_bytes)


def sdpa_calls(case: Case, device: torch.device, tokens: int = 1) -> Calls:
    """The same by torch, whose keys and values lie in one piece; several tokens of one sequence."""
    if tokens > 1:
        parts = (case.context, case.kv_heads, case.head_dim)
        query = torch.randn(tokens, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
        key, value = (torch.randn(parts, device=device, dtype=torch.bfloat16) for _ in range(2))
        return Calls([lambda: attend_span(query, key, value)], case.kv_bytes)
    shape = case.batch, case.kv_heads, case.context, case.head_dim
    query = torch.randn(case.batch, case.heads, 1, case.head_dim, device=device, dtype=torch.bfloat16)

    def call() -> Callable[[], object]:
        key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        return lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return Calls([call() for _ in range(copies_of(case))], case.kv_bytes)


def gathered_calls(case: Case, form: str, device: torch.device, tokens: int) -> Calls:
    """The last tokens of one sequence by torch, over copies in 16 bits that are made of pages for them."""
    config, scheme = decoder_config(case, 1), KVCacheScheme(form)
    pages = TokenPages(config, scheme, case.num_blocks, case.block_size, torch.bfloat16, device)
    fill_pages(pages.memory.tensors, scheme)
    query = torch.randn(tokens, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
    table = torch.randperm(case.num_blocks, device=device)
    return Calls([lambda: attend_span(query, *pages.gather(0, table))], case.kv_bytes)


def copies_of(case: Case) -> int:
    return num_copies(case.kv_bytes // 4)  # int4 pages are that much smaller, and must not fit in the cache either


def attention_calls(case: Case, name: str, device: torch.device, tokens: int) -> Calls:
    """The last tokens of each sequence, by SDPA, by flashinfer, or over pages of a form."""
    from runtime.backends.triton.device import num_processors

    if name == SDPA:
        return sdpa_calls(case, device, tokens)
    if name == FLASHINFER:
        return flashinfer_calls(case, device, tokens)
    if name.startswith(GATHERED):
        return gathered_calls(case, name.removeprefix(GATHERED + PAGES), device, tokens)
    return paged_calls(case, name.removeprefix(PAGES), num_processors(device), device, tokens)


def measure_attention(
    case: Case, name: str, device: torch.device, say: Callable[[str], None], tokens: int = 1
) -> Measured | None:
    """One step of the last tokens with the heads of an 8B model; None where that cannot."""
    place = (f"{case.context} keys", case.batch) if tokens == 1 else (f"{case.heads}x{case.head_dim}", case.context)
    try:
        calls = attention_calls(case, name, device, tokens)
        return Measured(*place, name, seconds_per_call(calls.calls), calls.nbytes)
    except Exception as error:  # whatever a kernel raises is the finding
        say(f"{name} cannot do {tokens} tokens of {case.batch} x {case.context} keys: {first_line(error)}")
        return None
