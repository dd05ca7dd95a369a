"""Paged attention of one decode step on a CPU: compiled code over its pages beside plain torch, in processor time.

The pages of several layers take turns, so that they come from memory and not from a cache. Run alone it prints its own
table: `python -m benchmarking.cpu_attention` in scripts/.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarking.tables import Row

if TYPE_CHECKING:
    from runtime.core.batch import Batch
    from runtime.core.model_config import DecoderConfig
    from runtime.model.decoder import Attention


FORMATS = ("16bit", "int8", "k8v4", "int4")
ROUNDS = 9
COLD_BYTES = 160e6


@dataclass(frozen=True)
class Case:
    """One decode step: a token of each of `batch` sequences over `context` keys."""

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def kv_bytes(self) -> int:
        """Of 16-bit keys and values of one layer."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.batch} x {self.context} keys, {heads}, blocks of {self.block_size}"


CASES = (Case(8, 1024), Case(1, 8192), Case(8, 8192), Case(8, 1024, kv_heads=4, head_dim=64))


def rows(cases: tuple[Case, ...] = CASES) -> list[Row]:
    """Milliseconds of one layer on one thread: torch, then compiled code by the form of the cache."""
    return [row(case) for case in cases]


def row(case: Case) -> Row:
    steps = {"torch 16bit": torch_step(case)} | {format: compiled_step(case, format) for format in FORMATS}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 1):  # interleaved; the first round warms up
        for name, step in steps.items():
            started = time.thread_time()
            step()
            times[name].append(time.thread_time() - started)
    found = {name: median(seconds[1:]) * 1e3 for name, seconds in times.items()}
    speedup = {"x torch": f"{found['torch 16bit'] / found['16bit']:.1f}"}
    gain = {"int4 x 16bit": f"{found['16bit'] / found['int4']:.2f}"}
    return {"step": str(case)} | {name: f"{each:.2f} ms" for name, each in found.items()} | speedup | gain


def compiled_step(case: Case, format: str) -> Callable[[], object]:
    """Runs one layer, another one each time."""
    import torch

    from compress.checkpoint.kv_cache import KVCacheScheme
    from runtime.backends.cpu.attention import NativeAttention
    from runtime.backends.cpu.kv_pages import NativePages

    layers, device = _layers(case), torch.device("cpu")
    blocks = case.batch * case.context // case.block_size
    scheme = KVCacheScheme(format)
    pages = NativePages(decoder_config(case, layers), scheme, blocks, case.block_size, torch.bfloat16, device)
    for name, tensor in pages.memory.tensors.items():
        if name.endswith("scales"):
            tensor.uniform_(0.01, 0.02)
        elif format == "16bit":
            tensor.view(torch.bfloat16).normal_()
        else:
            tensor.random_(0, 256)
    return _layer_by_layer(case, NativeAttention(pages, _batch(case, blocks), (None,) * layers), layers)


def torch_step(case: Case) -> Callable[[], object]:
    """As `compiled_step`, by what serves without compiled code: pages gathered, then torch's attention."""
    import torch

    from runtime.backends.kv.pages import ExactPages
    from runtime.backends.torch.span_attention import attend_tokens

    layers, device = _layers(case), torch.device("cpu")
    blocks = case.batch * case.context // case.block_size
    pages = ExactPages(decoder_config(case, layers), blocks, case.block_size, torch.bfloat16, device)
    for tensor in pages.memory.tensors.values():
        tensor.normal_()
    table = _batch(case, blocks).groups[0].blocks

    def attention(layer: int, query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor) -> torch.Tensor:
        key, value = (each.view(case.batch, case.context, *each.shape[1:]) for each in pages.gather(layer, table))
        return attend_tokens(query, key, value, None)

    return _layer_by_layer(case, attention, layers)


def _layer_by_layer(case: Case, attention: Attention, layers: int) -> Callable[[], object]:
    import torch

    query = torch.randn(case.batch, case.heads, case.head_dim).bfloat16()
    nothing = query.new_empty(0, case.kv_heads, case.head_dim)
    turn = iter(range(1 << 30))
    return lambda: attention(next(turn) % layers, query, nothing, nothing)


def _layers(case: Case) -> int:
    return max(1, round(COLD_BYTES / case.kv_bytes))


def decoder_config(case: Case, layers: int) -> DecoderConfig:
    from benchmarking.random_model import SHAPES, config_of
    from runtime.core.model_config import parse_config

    sizes = {"num_hidden_layers": layers, "num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads}
    return parse_config(config_of(SHAPES["tiny"]) | sizes | {"head_dim": case.head_dim})


def _batch(case: Case, blocks: int) -> Batch:
    import torch

    from runtime.core.batch import AttentionGroup, Batch

    random = torch.Generator().manual_seed(0)
    positions, nothing = torch.full((case.batch,), case.context - 1), torch.empty(0, dtype=torch.int64)
    table = torch.randperm(blocks, generator=random)
    group = AttentionGroup(slice(0, case.batch), table, positions, case.batch, case.context, False)
    return Batch((), nothing, nothing, nothing, (group,), (), nothing, (), ())


def main() -> None:
    """Prints the table."""
    import torch
    from rich.console import Console

    from benchmarking.machine import environment
    from benchmarking.tables import describe, print_with_markdown
    from compress.cpu.binding import set_threads

    torch.set_num_threads(1)
    set_threads(1)
    console = Console(width=180, highlight=False)
    console.print(describe(environment()))
    print_with_markdown("One layer's attention of a decode step, one thread", rows(), console)


if __name__ == "__main__":
    main()
