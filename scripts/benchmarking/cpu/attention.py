"""Attention in C over pages, compared with PyTorch and with a plain read of memory: one layer of a decode step, or of a
chunk of a prompt.

Times are processor time of the process, divided by its threads: other work on the machine shifts them little. All sides
take turns, and every step reads another layer's pages, together larger than the caches. The stream is what the same
threads reach when they sum up a large tensor, in the same turns; PyTorch has one thread.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarking.machine import take_turns
from benchmarking.tables import Row
from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.cpu.binding import set_threads

if TYPE_CHECKING:
    from runtime.backends.base import Attention
    from runtime.core.batch import Batch
    from runtime.core.model_config import DecoderConfig


CPU = torch.device("cpu")
FORMATS = ("16bit", "int8", "k8v4", "int4")
ROUNDS = 9
COLD_BYTES = 160e6


@dataclass(frozen=True)
class Case:
    """One step: the last tokens of each of `batch` sequences, over `context` keys, themselves included."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    tokens: int = 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of 16-bit keys and values of one layer."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim

    @property
    def num_blocks(self) -> int:
        return self.batch * self.context // self.block_size

    @property
    def products(self) -> float:
        """Multiplications of a layer: scores and weighted values, of keys that are seen."""
        seen = self.tokens * self.context - self.tokens * (self.tokens - 1) / 2
        return 2 * self.batch * self.heads * self.head_dim * seen

    def __str__(self) -> str:
        tokens = "" if self.tokens == 1 else f" by {self.tokens} tokens"
        return f"{self.batch} x {self.context} keys{tokens}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"


DECODE_CASES = (
    Case(8, 1024),
    Case(8, 1024, head_dim=64),
    Case(1, 32768),
    Case(1, 32768, head_dim=64),
    Case(1, 32768, tokens=4),
    Case(1, 32768, head_dim=64, tokens=4),
)
PROMPT_CASES = (
    Case(1, 512, tokens=512),
    Case(1, 2048, tokens=512),
    Case(1, 8192, tokens=512),
    Case(1, 2048, kv_heads=4, head_dim=64, tokens=512),
)


def measure(steps: Mapping[str, Callable[[], object]], threads: int) -> dict[str, float]:
    """Median processor seconds of one thread by name; sides take turns, and the first round warms up."""
    torch.set_num_threads(1)
    set_threads(threads)
    calls = {name: lambda _turn, step=step: step() for name, step in steps.items()}
    taken = take_turns(calls, rounds=ROUNDS, clock=time.process_time)
    return {name: statistics.median(times) / 1e3 / threads for name, times in taken.items()}


def decode_rows(cases: Sequence[Case], threads: int) -> list[Row]:
    """One line per case: milliseconds by format of the cache, and the share of the stream that its bytes stand for."""
    return [decode_row(case, threads) for case in cases]


def decode_row(case: Case, threads: int) -> Row:
    numbers, readers = torch.ones(1 << 26, dtype=torch.float32), ThreadPoolExecutor(threads)
    pieces = numbers.chunk(threads)
    steps: dict[str, Callable[[], object]] = {"stream": lambda: list(readers.map(Tensor.sum, pieces))}
    nbytes = {"stream": numbers.nbytes}
    for format in FORMATS:
        steps[format], nbytes[format] = compiled_step(case, format)
    if case.tokens == 1 and threads == 1:
        steps["torch"] = torch_step(case)
    found = measure(steps, threads)
    stream = nbytes["stream"] / found["stream"]
    shares = {
        format: f"{found[format] * 1e3:.2f} ms, {nbytes[format] / found[format] / stream:.0%}" for format in FORMATS
    }
    gain = {"int4 x 16bit": f"{found['16bit'] / found['int4']:.2f}"}
    return {"step": str(case), "stream": f"{stream / 1e9:.1f} GB/s"} | shares | gain | beside_torch(found)


def prompt_rows(cases: Sequence[Case], threads: int) -> list[Row]:
    """One line per case: milliseconds and products by format of the cache, and PyTorch's attention over keys and values
    side by side."""
    rows: list[Row] = []
    for case in cases:
        steps = {format: compiled_step(case, format)[0] for format in FORMATS}
        found = measure(({"torch": torch_prompt(case)} if threads == 1 else {}) | steps, threads)
        speeds = {
            name: f"{seconds * 1e3:.1f} ms, {case.products / seconds / threads / 1e9:.0f}"
            for name, seconds in found.items()
        }
        rows.append({"step": str(case)} | speeds | beside_torch(found))
    return rows


def beside_torch(found: Mapping[str, float]) -> Row:
    return {"x torch": f"{found['torch'] / found['16bit']:.1f}" if "torch" in found else "-"}


def compiled_step(case: Case, format: str) -> tuple[Callable[[], object], int]:
    """One layer, another one each time, and the bytes of its pages."""
    from runtime.backends.cpu.kv_pages import CpuPages
    from runtime.backends.cpu.layers import CpuAttention

    layers, scheme = _layers(case), KVCacheScheme(format)
    config = decoder_config(case, layers)
    pages = CpuPages(config, scheme, case.num_blocks, case.block_size, torch.bfloat16, CPU)
    fill_pages(pages.memory.tensors, scheme)
    attention = CpuAttention(pages, batch_of(case), (None,) * layers)
    return _layer_by_layer(case, attention, layers), pages.memory.nbytes // layers


def torch_step(case: Case) -> Callable[[], object]:
    """A decode step without compiled code: gathered pages, then torch's attention."""
    from runtime.backends.kv_pages import TokenPages
    from runtime.backends.span_attention import attend_tokens

    layers = _layers(case)
    config = decoder_config(case, layers)
    pages = TokenPages(config, UNCOMPRESSED, case.num_blocks, case.block_size, torch.bfloat16, CPU)
    fill_pages(pages.memory.tensors, UNCOMPRESSED)
    table = batch_of(case).groups[0].blocks

    def attention(layer: int, query: Tensor, _key: Tensor, _value: Tensor) -> Tensor:
        key, value = (each.view(case.batch, case.context, *each.shape[1:]) for each in pages.gather(layer, table))
        return attend_tokens(query, key, value, None)

    return _layer_by_layer(case, attention, layers)


def torch_prompt(case: Case) -> Callable[[], object]:
    """`attend_span`, plain torch, over keys and values that lie side by side already."""
    from runtime.backends.span_attention import attend_span, visibility_mask

    shape = (case.context, case.kv_heads, case.head_dim)
    key, value = (torch.randn(shape).bfloat16() for _ in range(2))
    query = torch.randn(case.tokens, case.heads, case.head_dim).bfloat16()
    positions = torch.arange(case.context - case.tokens, case.context)
    whole = case.tokens == case.context
    mask = None if whole else visibility_mask(positions, case.context, None, torch.bfloat16)
    return lambda: attend_span(query, key, value, mask)


def fill_pages(tensors: Mapping[str, Tensor], scheme: KVCacheScheme) -> None:
    """Random keys and values in the form of the pages."""
    for name, tensor in tensors.items():
        if scheme.is_exact:
            tensor.view(torch.bfloat16).normal_()
        elif "scales" in name:
            tensor.uniform_(0.01, 0.02)
        elif tensor.dtype == torch.uint8:
            tensor.random_(0, 119)  # as fp8 too: no NaN among them
        else:
            tensor.normal_()


def _layer_by_layer(case: Case, attention: Attention, layers: int) -> Callable[[], object]:
    query = torch.randn(case.batch * case.tokens, case.heads, case.head_dim).bfloat16()
    nothing = query.new_empty(0, case.kv_heads, case.head_dim)
    turn = itertools.count()
    return lambda: attention(next(turn) % layers, query, nothing, nothing)


def _layers(case: Case) -> int:
    return max(1, round(COLD_BYTES / case.kv_bytes))


def decoder_config(case: Case, layers: int) -> DecoderConfig:
    from benchmarking.models import SHAPES, config_of
    from runtime.core.model_config import parse_config

    sizes = {"num_hidden_layers": layers, "num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads}
    return parse_config(config_of(SHAPES["tiny"], **sizes, head_dim=case.head_dim).to_dict())


def batch_of(case: Case) -> Batch:
    from runtime.core.batch import AttentionGroup, Batch

    positions = torch.arange(case.context - case.tokens, case.context).repeat(case.batch)
    nothing = torch.empty(0, dtype=torch.int64)
    table = torch.randperm(case.num_blocks, generator=torch.Generator().manual_seed(0))
    rows = slice(0, case.batch * case.tokens)
    group = AttentionGroup(rows, table, positions, case.batch, case.context, case.tokens > 1)
    return Batch((), nothing, nothing, nothing, (group,), (), nothing, (), ())
