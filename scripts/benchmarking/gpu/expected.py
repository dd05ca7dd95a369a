"""Figures that kernels should reach on an H200, from their machine code and the bytes that they move, beside the aims.

Nothing is measured: see benchmarking/gpu/roofline.py for the model, and its `Gpu` for the assumptions. Compare a first
run on a GPU with this table.

    python scripts/bench_kernels.py gpu-expected
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from rich.console import Console

from benchmarking.gpu import machine_code
from benchmarking.gpu.machine_code import INT4, INT8
from benchmarking.gpu.roofline import H200, Work, dense_seconds, seconds
from benchmarking.gpu.without_gpu import Build
from benchmarking.tables import Row, print_with_markdown, write_json
from compress.checkpoint.weights import Int
from runtime.backends.base import Target
from runtime.backends.triton.kernels.configs import config_for, default_plan
from runtime.backends.triton.kernels.weight_layout import interleaved_bytes, stored_bits, tile_inputs
from runtime.backends.triton.tiling import PROGRAMS_PER_PROCESSOR, Tiling

FORMS: Mapping[str, Int | None] = {"bf16": None, "int8": INT8, "int4": INT4}
"""Forms of the layers of a model; without a scheme its head is in 16 bits, too, with one in 8."""
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 4096, 14336, 32, 8, 128, 32, 128256
"""The shape of Llama-3-8B."""
QKV, OUT, GATE_UP, DOWN = (6144, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)
HEAD = (VOCABULARY, HIDDEN)
SMALL_NODES = 5
"""Launches of a layer beside four products and attention: two norms, rotation and write, join, gate."""
LAST_NODES = 10
"""Launches behind the layers beside the head: norm, logits, sampling."""


@dataclass(frozen=True)
class Expected:
    """A figure, its aim, and what a unit of it is."""

    what: str
    figure: float
    aim: float
    unit: str

    @property
    def row(self) -> Row:
        reached = "yes" if self.figure >= self.aim else "no"
        if self.unit == "ms":
            reached = "yes" if self.figure <= self.aim else "no"
        return {
            "what": self.what,
            "model": f"{self.figure:,.2f} {self.unit}",
            "aim": f"{self.aim:,.2f}",
            "met": reached,
        }


def _work(build: Build, nbytes: float, elements: float, products: float, programs: int) -> Work:
    """A launch by its machine code; a plain load in the loop is waited for in every pass."""
    found, takes = machine_code.counted(build)
    tile = machine_code.tile_of(build)
    of_tile = tile.elements * tile.bits / 8
    under_way = of_tile if found.loads else max(of_tile, found.bytes_in_flight / takes.programs)
    return Work(nbytes, found.slots_per_element * elements, products, programs, takes.programs, under_way)


def _build(call: Callable[[], object]) -> Build:
    build = machine_code.build_of(call)
    if build is None:
        raise ValueError("the call launches no kernel whose loop is counted")
    return build


@cache
def packed_seconds(scheme: Int, rows: int, columns: int, tokens: int) -> float:
    """Time of a product with packed codes."""
    weight = packed_bytes(scheme, rows, columns)
    build = _build(lambda: machine_code.weight_only(rows, columns, tokens, scheme))
    if build.kernel == "expand":
        expanded = _work(build, weight + 2 * rows * columns, rows * columns, 0, 0)
        return seconds(expanded, H200) + dense_seconds(rows, columns, tokens, H200)
    constants, bits = dict(build.constants), stored_bits(scheme.bits)
    splits = config_for(default_plan(bits, rows, columns // tile_inputs(bits), H200.processors), tokens).splits
    blocks = -(-tokens // constants["BLOCK_M"])
    parts = 2 * 4 * splits * tokens * rows if splits > 1 else 0
    moved = weight + 2 * tokens * (rows + columns) + parts
    programs = rows // constants["BLOCK_N"] * splits * blocks
    return seconds(_work(build, moved, rows * columns * blocks, 2 * rows * columns * tokens, programs), H200)


def packed_bytes(scheme: Int, rows: int, columns: int) -> int:
    """Bytes of a packed weight on the GPU."""
    return interleaved_bytes(scheme, rows, columns, Target(torch.device("meta"), torch.bfloat16))


@cache
def attention_seconds(cache: str, batch: int, context: int) -> float:
    """Time of attention of one token of each sequence."""
    build = _build(lambda: machine_code.attention(cache, 16))
    bits = machine_code.tile_of(build).bits
    elements = 2 * batch * context * KV_HEADS * HEAD_DIM
    scales = 0 if cache == "16bit" else 2 * 4 * batch * context * KV_HEADS
    tiling = Tiling(16, HEADS // KV_HEADS, KV_HEADS, PROGRAMS_PER_PROCESSOR * H200.processors)
    programs = KV_HEADS * sum(tiling.splits([(1, context)] * batch))
    products = 4 * batch * context * HEADS * HEAD_DIM
    return seconds(_work(build, elements * bits / 8 + scales, elements, products, programs), H200)


def decode_seconds(form: str, batch: int, context: int, cache: str = "16bit") -> float:
    """Time of a captured decode step of the 8B shape, without the host."""
    layer = sum(linear_seconds(FORMS[form], *shape, batch) for shape in (QKV, OUT, GATE_UP, DOWN))
    layer += attention_seconds(cache, batch, context) + SMALL_NODES * H200.launch
    head = linear_seconds(FORMS[form] and INT8, *HEAD, batch)
    return LAYERS * layer + head + LAST_NODES * H200.launch


def prompt_seconds(tokens: int) -> float:
    """Time of the launches of a whole prompt of int4 weights, without the host; its attention counts as products."""
    layer = sum(packed_seconds(INT4, *shape, tokens) for shape in (QKV, OUT, GATE_UP, DOWN))
    attention = 2 * HEADS * HEAD_DIM * tokens**2 / (H200.products * H200.dense_products)
    small = (SMALL_NODES + 1) * H200.launch + 12 * 2 * tokens * HIDDEN / H200.stream
    return LAYERS * (layer + attention + small) + packed_seconds(INT8, *HEAD, 1) + LAST_NODES * H200.launch


def linear_seconds(scheme: Int | None, rows: int, columns: int, tokens: int) -> float:
    """Time of a product with packed codes, or without a scheme with 16-bit numbers."""
    if scheme is None:
        return dense_seconds(rows, columns, tokens, H200)
    return packed_seconds(scheme, rows, columns, tokens)


def weight_bytes(form: str) -> float:
    """Bytes of weights that a decode step of the 8B shape reads."""
    scheme = FORMS[form]
    if scheme is None:
        return 2 * (LAYERS * sum(rows * columns for rows, columns in (QKV, OUT, GATE_UP, DOWN)) + HEAD[0] * HEAD[1])
    layer = sum(packed_bytes(scheme, *shape) for shape in (QKV, OUT, GATE_UP, DOWN))
    return LAYERS * layer + packed_bytes(INT8, *HEAD)


def expectations() -> Iterator[Expected]:
    """Yields aims with what the model says of each."""
    for tokens, aim in ((1, 3.0), (16, 3.0), (64, 2.0), (256, 1.1), (2048, 0.95)):
        ratio = linear_seconds(None, 8192, 8192, tokens) / packed_seconds(INT4, 8192, 8192, tokens)
        yield Expected(f"int4 8192x8192 over cuBLAS bf16, {tokens} tokens", ratio, aim, "x")
    rows, columns = GATE_UP
    for tokens in (1, 8):
        moved = packed_bytes(INT4, rows, columns) + 2 * tokens * (rows + columns)
        share = 100 * moved / packed_seconds(INT4, rows, columns, tokens) / H200.stream
        yield Expected(f"int4 {rows}x{columns} of the read stream, {tokens} tokens", share, 75, "%")
    for form, aim in (("bf16", 75), ("int8", 65), ("int4", 60)):
        share = 100 * weight_bytes(form) / decode_seconds(form, 1, 128) / H200.bandwidth
        yield Expected(f"decode of one sequence in {form}, of the peak bandwidth", share, aim, "%")
    yield Expected("decode of one sequence in int4", 1 / decode_seconds("int4", 1, 128), 600, "tokens/s")
    yield Expected(
        "decode of 64 sequences of 1,024 tokens in int4", 64 / decode_seconds("int4", 64, 1024), 1e4, "tokens/s"
    )
    yield Expected("first token of a prompt of 128, without the host", prompt_seconds(128) * 1e3, 12, "ms")
    yield Expected("prefill of 2,048 tokens in int4", 2048 / prompt_seconds(2048), 5e4, "tokens/s")
    ratio = attention_seconds("16bit", 1, 32768) / attention_seconds("int4", 1, 32768)
    yield Expected("attention over int4 pages beside 16-bit ones, 32,768 keys", ratio, 2.0, "x")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, help="write the figures here")


def run(options: argparse.Namespace) -> int:
    found = list(expectations())
    title = f"Modelled for an {H200.name}, not measured"
    print_with_markdown(title, [each.row for each in found], Console(width=160, highlight=False))
    if options.json:
        write_json(options.json, {"gpu": asdict(H200), "expected": [asdict(each) for each in found]})
    return 0
