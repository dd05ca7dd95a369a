"""Packed linears and attention on a GPU beside those of PyTorch, and gemlite where it is installed.

Linears: one shape and number of tokens after the other, beside cuBLAS, PyTorch's int4 product and its 2:4 product.
Attention: one token over a long context, by KV cache format, beside PyTorch's own.

Every time is the median over replays of one CUDA graph over copies that do not fit in the cache. Bytes are those of
weights, inputs and outputs; the last column is their rate over the measured read bandwidth of the card.

    python scripts/bench_kernels.py gpu
    python scripts/bench_kernels.py gpu --shapes 8192x8192 --tokens 1 16 256 2048 --json kernels.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from benchmarking.cpu_kernels import Case, decoder_config, fill_pages, random_weight
from benchmarking.machine import environment
from benchmarking.tables import Row, describe, print_with_markdown, write_json
from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.weights import Activations, Fp8, Int
from compress.common.errors import ToolkitError
from runtime.backends.base import Target
from runtime.backends.kv_pages import TokenPages
from runtime.backends.torch.linear import DenseLinear, semi_structured_bytes
from runtime.backends.triton.attention import block_rows, layer_pages, num_splits
from runtime.backends.triton.kernels.configs import EXPAND, GEMM, SKINNY, KernelConfig
from runtime.backends.triton.linear import FP8_KERNEL, FP8_W8A16_KERNEL, W4A16_KERNEL, W8A8_KERNEL, W8A16_KERNEL

CACHE_BYTES = 2 * 64 * 2**20
"""Copies that are read in turn hold together at least twice the second-level cache of the largest GPU."""
REPLAYS = 9


def require_gpu() -> torch.device:
    """The GPU.

    Raises:
        ToolkitError: there is none.
    """
    if not torch.cuda.is_available():
        raise ToolkitError("this benchmark times kernels on an NVIDIA GPU, and there is none", "Run it where one is")
    return torch.device("cuda")


def num_copies(nbytes: int) -> int:
    """Number of copies of the data that one measurement walks through."""
    return max(2, min(64, -(-CACHE_BYTES // max(1, nbytes))))


def seconds_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of the calls, which do the same to different copies: all of them recorded in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(times)


def read_stream(device: torch.device) -> float:
    """Bytes per second that a reduction reads: the ceiling that products are compared with."""
    buffers = [torch.ones(2**28, dtype=torch.float16, device=device) for _ in range(2)]
    time = seconds_per_call([lambda buffer=buffer: buffer.view(torch.float32).sum() for buffer in buffers])
    return buffers[0].nbytes / time


TINYGEMM, SPARSE, GEMLITE = "torch int4", "torch 2:4", "gemlite int4"


def tinygemm(rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`torch.ops.aten._weight_int4pack_mm` in groups of 128."""
    pairs = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    scales = torch.rand(columns // 128, rows, 2, device=device, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, 128, scales)


def semi_structured(rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """PyTorch's product with 16-bit weights of which every second is zero."""
    from runtime.backends.torch.linear import SemiStructuredLinear

    weight = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).view(rows, -1, 4)
    weight[..., 2:] = 0
    return SemiStructuredLinear(weight.view(rows, columns), None)


def gemlite(rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The Triton kernels of gemlite, as a peer: 4 bits in groups of 128."""
    from gemlite.core import DType, GemLiteLinear

    linear = GemLiteLinear(4, 128, columns, rows, DType.BF16.value, DType.BF16.value)
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
    groups = rows * columns // 128
    scales, zeros = (torch.rand(groups, 1, device=device, dtype=torch.bfloat16) for _ in range(2))
    linear.pack(codes, scales, zeros, None)
    return linear


PEERS = {TINYGEMM: tinygemm, SPARSE: semi_structured, GEMLITE: gemlite}


def peers() -> list[str]:
    """Peers that are installed."""
    return [name for name in PEERS if name != GEMLITE or find_spec("gemlite")]


FORMS = ("16bit", "fp8", "int8", "int4")
SDPA = "SDPA bf16, contiguous"


@dataclass(frozen=True)
class Calls:
    """The same step over several copies of keys and values, and the bytes that one of them reads."""

    calls: list[Callable[[], object]]
    nbytes: int


def paged_calls(case: Case, form: str, processors: int, device: torch.device) -> Calls:
    """One token of each of `case.batch` sequences over `case.context` keys, in the form of the pages."""
    from runtime.backends.triton.kernels.paged_attention import attend

    blocks, scheme = case.num_blocks, KVCacheScheme(form)
    config = decoder_config(case, copies_of(case))
    pages = TokenPages(config, scheme, blocks, case.block_size, torch.bfloat16, device)
    tensors = pages.memory.tensors
    fill_pages(tensors, scheme)
    query = torch.randn(case.batch, case.heads, case.head_dim, device=device, dtype=torch.bfloat16)
    table = torch.randperm(blocks, device=device).view(case.batch, -1)
    positions = torch.full((case.batch,), case.context - 1, device=device)
    splits = num_splits(case.context, case.batch * case.kv_heads, processors)

    def call(layer: int) -> Callable[[], object]:
        read = layer_pages(pages, scheme, layer)
        return lambda: attend(query, read, table, positions, None, block_rows(case.head_dim)[0], splits)

    nbytes = sum(tensor[0].nbytes for tensor in tensors.values())
    return Calls([call(layer) for layer in range(config.num_layers)], nbytes)


def sdpa_calls(case: Case, device: torch.device) -> Calls:
    """The same by torch, whose keys and values lie in one piece."""
    shape = case.batch, case.kv_heads, case.context, case.head_dim
    query = torch.randn(case.batch, case.heads, 1, case.head_dim, device=device, dtype=torch.bfloat16)

    def call() -> Callable[[], object]:
        key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        return lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return Calls([call() for _ in range(copies_of(case))], case.kv_bytes)


def copies_of(case: Case) -> int:
    return num_copies(case.kv_bytes // 4)  # int4 pages are that much smaller, and must not fit in the cache either


SHAPES = ("4096x4096", "6144x4096", "28672x4096", "4096x14336", "8192x8192")
TOKENS = (1, 4, 16, 64, 256, 2048)
KERNELS = {
    "int4 g128": (W4A16_KERNEL, Int(4, 128)),
    "int2 g64": (W4A16_KERNEL, Int(2, 64)),
    "int8": (W8A16_KERNEL, Int(8, None)),
    "w8a8": (W8A8_KERNEL, Int(8, None, True, Activations.INT8)),
    "fp8": (FP8_W8A16_KERNEL, Fp8()),
    "fp8 w8a8": (FP8_KERNEL, Fp8(Activations.FP8)),
}
DENSE = "cuBLAS bf16"


@dataclass(frozen=True)
class Measured:
    shape: str
    tokens: int
    name: str
    seconds: float
    nbytes: int


def linears(name: str, rows: int, columns: int, device: torch.device) -> list[Callable[[Tensor], Tensor]]:
    """Copies of one linear, enough to leave the cache behind."""
    target = Target(device, torch.bfloat16)

    def make() -> Callable[[Tensor], Tensor]:
        if name == DENSE:
            return DenseLinear(torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 0.02, None)
        if name in PEERS:
            return PEERS[name](rows, columns, device)
        kernel, scheme = KERNELS[name]
        return kernel.prepare(random_weight(rows, columns, scheme, device), None, target)

    first = make()
    return [first, *(make() for _ in range(num_copies(weight_bytes(name, rows, columns)) - 1))]


def weight_bytes(name: str, rows: int, columns: int) -> int:
    if name == DENSE:
        return rows * columns * 2
    if name == SPARSE:
        return semi_structured_bytes(rows, columns)
    scheme = Int(4, 128) if name in PEERS else KERNELS[name][1]
    return rows * columns * scheme.bits // 8 + rows * scheme.num_groups(columns) * (4 if name in PEERS else 2)


def measure(shape: str, tokens: int, name: str, device: torch.device) -> Measured:
    rows, columns = map(int, shape.split("x"))
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    calls = [lambda linear=linear: linear(x) for linear in linears(name, rows, columns, device)]
    nbytes = weight_bytes(name, rows, columns) + 2 * tokens * (rows + columns)
    return Measured(shape, tokens, name, seconds_per_call(calls), nbytes)


def measure_or_say(
    shape: str, tokens: int, name: str, device: torch.device, say: Callable[[str], None]
) -> Measured | None:
    """None where a peer cannot: then it says why."""
    try:
        return measure(shape, tokens, name, device)
    except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
        if name not in PEERS:
            raise
        say(f"{name} cannot do {shape} for {tokens} tokens: {str(error).splitlines()[0]}")
        return None


def measure_attention(contexts: Sequence[int], batches: Sequence[int], device: torch.device) -> list[Measured]:
    """One decode step with the heads of an 8B model."""
    from runtime.backends.triton.linear import num_processors

    measured = []
    for case in (Case(batch, context) for batch in batches for context in contexts):
        found = {SDPA: sdpa_calls(case, device)}
        found |= {f"pages {form}": paged_calls(case, form, num_processors(device), device) for form in FORMS}
        for name, calls in found.items():
            seconds = seconds_per_call(calls.calls)
            measured.append(Measured(f"{case.context} keys", case.batch, name, seconds, calls.nbytes))
    return measured


def table(measured: Sequence[Measured], stream: float, first: str = DENSE) -> list[Row]:
    """Rows with the speed-up over one of them, `first`."""
    dense = {(each.shape, each.tokens): each.seconds for each in measured if each.name == first}
    return [
        {
            "shape": each.shape,
            "tokens": str(each.tokens),
            "kernel": each.name,
            "microseconds": f"{each.seconds * 1e6:.1f}",
            f"x {first}": f"{dense[each.shape, each.tokens] / each.seconds:.2f}",
            "GB/s": f"{each.nbytes / each.seconds / 1e9:.0f}",
            "of the stream": f"{each.nbytes / each.seconds / stream:.0%}",
        }
        for each in measured
    ]


def candidates(tokens: int) -> Iterator[KernelConfig]:
    """Yields configurations of the int4 kernels worth measuring for a number of tokens."""
    if tokens <= 128:
        for block_n in (64, 128):
            for num_warps in (4, 8):
                for num_stages in (3, 4, 5):
                    for splits in (1, 2, 4, 8, 16):
                        yield KernelConfig(SKINNY, block_n, min(64, max(16, tokens)), num_warps, num_stages, splits)
    if tokens >= 64:
        for block_m in (64, 128, 256):
            for num_stages in (2, 3):
                yield KernelConfig(GEMM, 128, block_m, 8, num_stages)
    if tokens >= 256:
        yield KernelConfig(EXPAND)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x columns")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--contexts", nargs="*", type=int, default=(4096, 32768), help="keys of a step of attention")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 16), help="sequences of a step of attention")
    parser.add_argument("--json", type=Path, help="write the figures here")


def run(options: argparse.Namespace) -> int:
    console = Console(width=160, highlight=False)
    device = require_gpu()
    facts, stream = environment(), read_stream(device)
    console.print(describe(facts))
    console.print(f"read stream: {stream / 1e9:.0f} GB/s")
    tried = [
        measure_or_say(shape, tokens, name, device, console.print)
        for shape in options.shapes
        for tokens in options.tokens
        for name in (DENSE, *peers(), *options.kernels)
    ]
    measured = [each for each in tried if each is not None]
    print_with_markdown("Linears: medians over replays", table(measured, stream), console)
    attention = measure_attention(options.contexts, options.batches, device)
    if attention:
        print_with_markdown("Attention of one layer", table(attention, stream, attention[0].name), console)
    if options.json:
        rows = {"rows": [asdict(each) for each in measured], "attention": [asdict(each) for each in attention]}
        write_json(options.json, {"facts": facts, "stream": stream, **rows})
    return 0
