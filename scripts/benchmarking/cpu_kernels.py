"""Kernels in C on one core beside those of PyTorch: linears and paged attention, interleaved.

Times are processor time of the calling thread, so other work on the machine shifts them little; torch and the C pool
get one thread each. Every product takes another copy of its weight, and every step of attention another layer's pages,
together larger than the caches.

    python scripts/bench_kernels.py cpu
    python scripts/bench_kernels.py cpu --shapes 4096x14336 --rows 1 8 --seconds 5
    python scripts/bench_kernels.py cpu --attention
    python scripts/bench_kernels.py cpu --mixture 1024x512x64x10
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from torch import Tensor

from benchmarking.machine import environment
from benchmarking.tables import Row, describe, print_with_markdown
from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.scale_search import FP8
from compress.checkpoint.weights import Activations as InputRounding
from compress.checkpoint.weights import Int, Scheme, Weight
from compress.checkpoint.weights.fp8 import Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from compress.common.errors import ToolkitError
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set, library, set_threads
from runtime.backends.base import Linear, Target
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.torch.linear import PrepackedLinear
from runtime.backends.torch.quantized_linear import INT4PACK

if TYPE_CHECKING:
    from runtime.backends.base import Attention
    from runtime.core.batch import Batch
    from runtime.core.model_config import DecoderConfig


CACHES = 128 * 2**20
"""Bytes of copies of one weight."""
CPU = torch.device("cpu")
TARGET = Target(CPU, torch.bfloat16)
BASELINE = "torch int4pack"


def random_weight(rows: int, columns: int, scheme: Scheme, device: torch.device = CPU) -> Weight:
    groups = rows, scheme.num_groups(columns)
    scale = torch.rand(groups, device=device).mul_(0.01).add_(0.001).bfloat16()
    if scheme.numbers == "float":
        return Fp8Weight(torch.randn(rows, columns, device=device).to(FP8), scale, scheme)
    codes = torch.randint(0, scheme.max_code + 1, (rows, columns), dtype=torch.uint8, device=device)
    zero = torch.full(groups, scheme.midpoint, dtype=torch.uint8, device=device)
    return IntegerWeight(codes, scale, zero, scheme)


@dataclass(frozen=True, slots=True)
class Contender:
    """Copies of one weight, taken in turns."""

    name: str
    copies: Sequence[Linear]

    def __call__(self, x: Tensor, turn: int) -> Tensor:
        return self.copies[turn % len(self.copies)](x)


def contenders(in_features: int, out_features: int, group_size: int = 128) -> list[Contender]:
    """All ways to multiply by a random weight of a shape."""
    torch.manual_seed(0)
    numbers = torch.randn(out_features, in_features).to(torch.bfloat16)
    w4, w2, w8 = (random_weight(out_features, in_features, Int(bits, group_size)) for bits in (4, 2, 8))
    w8a8 = random_weight(out_features, in_features, Int(8, None, activations=InputRounding.INT8))
    makers: Mapping[str, Callable[[], Linear]] = {
        "torch bf16": lambda: PrepackedLinear(numbers, None),
        "torch int4pack": lambda: INT4PACK.prepare(w4, None, TARGET),
        "w4a16": lambda: CpuLinear(w4),
        "w4a8": lambda: CpuLinear(w4, activations=Activations.INT8_GROUP),
        "w2a16": lambda: CpuLinear(w2),
        "w8a16": lambda: CpuLinear(w8),
        "w8a8": lambda: CpuLinear(w8a8, activations=Activations.INT8_ROW),
        "bf16": lambda: CpuLinear(numbers),
    }
    return [_copied(name, make) for name, make in makers.items()]


def _copied(name: str, make: Callable[[], Linear]) -> Contender:
    first = make()
    return Contender(name, [first, *(make() for _ in range(CACHES // first.nbytes))])


def milliseconds(
    sides: Sequence[Contender], in_features: int, rows: int, seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Processor time per product, and how many times as fast as the baseline each is: medians over turns.

    Args:
        seconds: how long all of it may take; at least three turns are made.

    Returns:
        Milliseconds, and times as fast, by contender.
    """
    x = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    deadline = time.monotonic() + seconds
    for turn in itertools.count():
        for side in sides:
            begin = time.thread_time()
            side(x, turn)
            taken[side.name].append(time.thread_time() - begin)
        if turn >= 3 and time.monotonic() > deadline:
            break
    measured = {name: times[1:] for name, times in taken.items()}
    speed = {
        name: statistics.median(slow / quick for slow, quick in zip(measured[BASELINE], times, strict=True))
        for name, times in measured.items()
    }
    return {name: 1e3 * statistics.median(times) for name, times in measured.items()}, speed


def linear_rows(in_features: int, out_features: int, numbers_of_rows: list[int], seconds: float) -> list[Row]:
    """One line per kernel: milliseconds for each number of rows, and times as fast as the baseline."""
    sides = contenders(in_features, out_features)
    measured = [milliseconds(sides, in_features, rows, seconds) for rows in numbers_of_rows]
    return [
        {"kernel": side.name}
        | {
            f"M={rows}": f"{times[side.name]:.3f} ({speed[side.name]:.2f}x)"
            for rows, (times, speed) in zip(numbers_of_rows, measured, strict=True)
        }
        for side in sides
    ]


FORMATS = ("16bit", "int8", "k8v4", "int4")
ATTENTION_ROUNDS = 9
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
        """Bytes of 16-bit keys and values of one layer."""
        return 4 * self.batch * self.context * self.kv_heads * self.head_dim

    @property
    def num_blocks(self) -> int:
        return self.batch * self.context // self.block_size

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.batch} x {self.context} keys, {heads}, blocks of {self.block_size}"


ATTENTION_CASES = (Case(8, 1024), Case(1, 8192), Case(8, 8192), Case(8, 1024, kv_heads=4, head_dim=64))


def attention_rows(cases: tuple[Case, ...] = ATTENTION_CASES) -> list[Row]:
    """Milliseconds of one layer on one thread: torch, then compiled code by the form of the cache."""
    return [attention_row(case) for case in cases]


def attention_row(case: Case) -> Row:
    steps = {"torch 16bit": torch_step(case)} | {format: compiled_step(case, format) for format in FORMATS}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ATTENTION_ROUNDS + 1):  # interleaved; the first round warms up
        for name, step in steps.items():
            started = time.thread_time()
            step()
            times[name].append(time.thread_time() - started)
    found = {name: statistics.median(seconds[1:]) * 1e3 for name, seconds in times.items()}
    speedup = {"x torch": f"{found['torch 16bit'] / found['16bit']:.1f}"}
    gain = {"int4 x 16bit": f"{found['16bit'] / found['int4']:.2f}"}
    return {"step": str(case)} | {name: f"{each:.2f} ms" for name, each in found.items()} | speedup | gain


def compiled_step(case: Case, format: str) -> Callable[[], object]:
    """Runs one layer, another one each time."""
    from runtime.backends.cpu.kv_pages import CpuPages
    from runtime.backends.cpu.layers import CpuAttention

    layers, scheme = _layers(case), KVCacheScheme(format)
    config = decoder_config(case, layers)
    pages = CpuPages(config, scheme, case.num_blocks, case.block_size, torch.bfloat16, CPU)
    fill_pages(pages.memory.tensors, scheme)
    return _layer_by_layer(case, CpuAttention(pages, _batch(case), (None,) * layers), layers)


def torch_step(case: Case) -> Callable[[], object]:
    """Same as `compiled_step` without compiled code: gathered pages, then torch's attention."""
    from runtime.backends.kv_pages import TokenPages
    from runtime.backends.span_attention import attend_tokens

    layers = _layers(case)
    config = decoder_config(case, layers)
    pages = TokenPages(config, UNCOMPRESSED, case.num_blocks, case.block_size, torch.bfloat16, CPU)
    fill_pages(pages.memory.tensors, UNCOMPRESSED)
    table = _batch(case).groups[0].blocks

    def attention(layer: int, query: Tensor, _key: Tensor, _value: Tensor) -> Tensor:
        key, value = (each.view(case.batch, case.context, *each.shape[1:]) for each in pages.gather(layer, table))
        return attend_tokens(query, key, value, None)

    return _layer_by_layer(case, attention, layers)


def fill_pages(tensors: Mapping[str, Tensor], scheme: KVCacheScheme) -> None:
    """Random keys and values in the form of the pages."""
    for name, tensor in tensors.items():
        if scheme.is_exact:
            tensor.view(torch.bfloat16).normal_()
        elif name.endswith("scales"):
            tensor.uniform_(0.01, 0.02)
        elif tensor.dtype == torch.uint8:
            tensor.random_(0, 119)  # as fp8 too: no NaN among them
        else:
            tensor.normal_()


def _layer_by_layer(case: Case, attention: Attention, layers: int) -> Callable[[], object]:
    query = torch.randn(case.batch, case.heads, case.head_dim).bfloat16()
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


def _batch(case: Case) -> Batch:
    from runtime.core.batch import AttentionGroup, Batch

    positions, nothing = torch.full((case.batch,), case.context - 1), torch.empty(0, dtype=torch.int64)
    table = torch.randperm(case.num_blocks, generator=torch.Generator().manual_seed(0))
    group = AttentionGroup(slice(0, case.batch), table, positions, case.batch, case.context, False)
    return Batch((), nothing, nothing, nothing, (group,), (), nothing, (), ())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["2048x5632"], help="inputs x outputs of weights")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512], help="tokens per product")
    parser.add_argument("--seconds", type=float, default=4.0, help="per shape and number of rows")
    parser.add_argument("--attention", action="store_true", help="paged attention of a decode step instead of linears")
    parser.add_argument("--mixture", default="", help="hidden x width x experts x chosen: a mixture instead of linears")


def run(options: argparse.Namespace) -> int:
    if library() is None:
        raise ToolkitError("there is nothing to compare", absence())
    console = Console(width=180, highlight=False)
    facts = environment() | {"instructions": INSTRUCTION_SETS[best_instruction_set()]}
    console.print(describe(facts), markup=False)
    torch.set_num_threads(1)
    set_threads(1)
    if options.attention:
        print_with_markdown("Attention of one layer in a decode step, one thread", attention_rows(), console)
        return 0
    if options.mixture:
        from benchmarking.cpu_mixtures import mixture_rows, parse_shape

        mixture = parse_shape(options.mixture)
        rows = mixture_rows(mixture, options.rows, options.seconds)
        print_with_markdown(f"{mixture}: ms of one core, load {os.getloadavg()[0]:.1f}", rows, console)
        return 0
    for shape in options.shapes:
        in_features, out_features = (int(number) for number in shape.split("x"))
        rows = linear_rows(in_features, out_features, options.rows, options.seconds)
        title = f"{shape}: ms of one core per product (times as fast as {BASELINE}), load {os.getloadavg()[0]:.1f}"
        print_with_markdown(title, rows, console)
    return 0
