"""Packed linears and attention on a GPU, compared with PyTorch, and with gemlite where it is installed.

Linears: one shape and number of tokens after the other, with cuBLAS, PyTorch's int4 product and its 2:4 product.
Attention: one token over a long context, by KV cache format, with PyTorch's attention.

Every time is the median over replays of one CUDA graph over copies that do not fit in the cache. Bytes are those of
weights, inputs and outputs; the last column is their rate over the measured read bandwidth of the card.

    python scripts/bench_kernels.py gpu
    python scripts/bench_kernels.py gpu --shapes 8192x8192 --tokens 1 16 256 2048 --pages --rows kernels.jsonl
    TRITON_INTERPRET=1 python scripts/bench_kernels.py gpu --device cpu --shapes 64x256 --tokens 1 --contexts 64
    python scripts/bench_kernels.py gpu --write-tables
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from benchmarking.cpu.attention import Case
from benchmarking.cpu.kernels import random_weight
from benchmarking.gpu.ahead import compile_ahead
from benchmarking.gpu.attention import FLASHINFER, FORMS, GATHERED, PAGES, PAGES_BY_WORTH, SDPA, measure_attention
from benchmarking.gpu.timing import Measured, first_line, num_copies, read_stream, require_gpu, seconds_per_call
from benchmarking.machine import environment
from benchmarking.tables import Row, Rows, print_with_markdown
from compress.checkpoint.weights import Activations, BlockFp8, Exl3, Fp8, Int, Iq4Nl, Mxfp8, Nf4, Nvfp4
from runtime.backends.base import Target
from runtime.backends.flashinfer import attention as flashinfer
from runtime.backends.humming import linear as humming
from runtime.backends.measured import Speedups, table_path, to_json
from runtime.backends.torch.linear import DenseLinear, semi_structured_bytes
from runtime.backends.triton.kernels.configs import EXPAND, GEMM, SKINNY, SPLITS, KernelConfig
from runtime.backends.triton.linear import (
    EXL3_KERNEL,
    FP8_KERNEL,
    FP8_W8A16_KERNEL,
    SCALED_FP8_KERNEL,
    TABLE_KERNEL,
    W4A16_KERNEL,
    W8A8_KERNEL,
    W8A16_KERNEL,
)

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


SHAPES = ("4096x4096", "6144x4096", "28672x4096", "4096x14336", "8192x8192")
TOKENS = (1, 4, 16, 64, 256, 2048)
KERNELS = {
    "int4 g128": (W4A16_KERNEL, Int(4, 128)),
    "int2 g64": (W4A16_KERNEL, Int(2, 64)),
    "int8": (W8A16_KERNEL, Int(8, None)),
    "w8a8": (W8A8_KERNEL, Int(8, None, True, Activations.INT8)),
    "fp8": (FP8_W8A16_KERNEL, Fp8()),
    "fp8 w8a8": (SCALED_FP8_KERNEL, Fp8(Activations.FP8)),
    "fp8 w8a8 without torch": (FP8_KERNEL, Fp8(Activations.FP8)),
    "fp8 blocks": (FP8_W8A16_KERNEL, BlockFp8()),
    "mxfp8": (FP8_W8A16_KERNEL, Mxfp8()),
    "nvfp4": (TABLE_KERNEL, Nvfp4()),
    "nf4": (TABLE_KERNEL, Nf4()),
    "iq4_nl": (TABLE_KERNEL, Iq4Nl()),
    "exl3": (EXL3_KERNEL, Exl3(4, "mul1")),
    "humming int4 g128": (humming.KERNEL, Int(4, 128)),
    "humming int8": (humming.KERNEL, Int(8, None)),
}
INSTEAD_OF = {"humming int4 g128": "int4 g128", "humming int8": "int8", FLASHINFER: "pages 16bit"}
"""Optional kernels, and our own that they may replace."""
DENSE = "cuBLAS bf16"


def linears(name: str, rows: int, columns: int, device: torch.device) -> list[Callable[[Tensor], Tensor]]:
    """Copies of one linear that together exceed the cache."""
    first = make_linear(name, rows, columns, device)
    others = range(num_copies(weight_bytes(name, rows, columns)) - 1)
    return [first, *(make_linear(name, rows, columns, device) for _ in others)]


def make_linear(name: str, rows: int, columns: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    if name == DENSE:
        return DenseLinear(torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 0.02, None)
    if name in PEERS:
        return PEERS[name](rows, columns, device)
    kernel, scheme = KERNELS[name]
    return kernel.prepare(random_weight(rows, columns, scheme, device), None, Target(device, torch.bfloat16))


def default_kernels() -> list[str]:
    """Returns all kernels but those of packages that are not installed."""
    return [name for name in KERNELS if name not in INSTEAD_OF or humming.is_installed()]


def weight_bytes(name: str, rows: int, columns: int) -> int:
    if name == DENSE:
        return rows * columns * 2
    if name == SPARSE:
        return semi_structured_bytes(rows, columns)
    if name in PEERS:  # a scale and a zero point in 16 bits for each group
        return Int(4, 128).stored_bits(rows, columns, scale_bits=32) // 8
    return KERNELS[name][1].stored_bits(rows, columns) // 8


def measure(shape: str, tokens: int, name: str, device: torch.device) -> Measured:
    rows, columns = map(int, shape.split("x"))
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    calls = [lambda linear=linear: linear(x) for linear in linears(name, rows, columns, device)]
    nbytes = weight_bytes(name, rows, columns) + 2 * tokens * (rows + columns)
    return Measured(shape, tokens, name, seconds_per_call(calls), nbytes)


def call_once(name: str, shape: str, tokens: Sequence[int], device: torch.device) -> None:
    """Multiplies each number of tokens by one linear."""
    rows, columns = map(int, shape.split("x"))
    linear = make_linear(name, rows, columns, device)
    for number in tokens:
        linear(torch.randn(number, columns, device=device, dtype=torch.bfloat16))


def measure_or_say(
    shape: str, tokens: int, name: str, device: torch.device, say: Callable[[str], None]
) -> Measured | None:
    """None where a kernel cannot: then it says why."""
    try:
        return measure(shape, tokens, name, device)
    except Exception as error:  # whatever a kernel raises is the finding
        say(f"{name} cannot do {shape} for {tokens} tokens: {first_line(error)}")
        return None


def table(measured: Sequence[Measured], stream: float, first: str = DENSE) -> list[Row]:
    """Rows with the speed-up over one of them, `first`."""
    dense = {(each.shape, each.tokens): each.seconds for each in measured if each.name == first}
    return [
        {
            "shape": each.shape,
            "tokens": str(each.tokens),
            "kernel": each.name,
            "microseconds": f"{each.seconds * 1e6:.1f}",
            f"x {first}": _ratio(dense.get((each.shape, each.tokens)), each.seconds),
            "GB/s": f"{each.nbytes / each.seconds / 1e9:.0f}",
            "of the stream": f"{each.nbytes / each.seconds / stream:.0%}",
        }
        for each in sorted(measured, key=lambda each: (each.shape, each.tokens))
    ]


def _ratio(dense: float | None, seconds: float) -> str:
    return "-" if dense is None else f"{dense / seconds:.2f}"


def speedups(measured: Sequence[Measured]) -> Speedups:
    """Returns the speed of optional kernels over those that they may replace, by scheme, as the registry reads it."""
    seconds = {(each.name, each.shape, each.tokens): each.seconds for each in measured}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (name, shape, tokens), taken in seconds.items():
        if own := seconds.get((INSTEAD_OF.get(name, ""), shape, tokens)):
            scheme = flashinfer.MEASURED if name == FLASHINFER else str(KERNELS[name][1])
            by_shape = found.setdefault(scheme, {})
            by_shape.setdefault(shape, {})[str(tokens)] = round(own / taken, 3)
    return found


def write_tables(measured: Sequence[Measured], folder: Path) -> Path:
    """Writes the table by which the registry chooses an optional kernel on this GPU, and returns its path."""
    gpu = torch.cuda.get_device_name()
    path = table_path(folder, gpu)
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_json(gpu, speedups(measured), torch.cuda.get_device_capability()), encoding="utf-8")
    return path


def candidates(tokens: int) -> Iterator[KernelConfig]:
    """Yields configurations of the int4 kernels worth measuring for a number of tokens."""
    if tokens <= 128:
        block_m = min(64, max(8, tokens))
        for (block_n, num_warps), num_stages, splits in product(((64, 2), (64, 4), (128, 4)), (3, 4, 5), SPLITS):
            yield KernelConfig(SKINNY, block_n, block_m, num_warps, num_stages, splits)
    if tokens >= 64:
        few_splits = [splits for splits in SPLITS if splits * tokens <= 1024]
        for (block_m, num_warps), num_stages, splits in product(
            ((64, 4), (128, 8), (256, 8)), (2, 3), few_splits or [1]
        ):
            yield KernelConfig(GEMM, 128, block_m, num_warps, num_stages, splits)
    if tokens >= 256:
        yield KernelConfig(EXPAND)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x columns")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kernels", nargs="*", default=default_kernels(), choices=list(KERNELS))
    parser.add_argument("--no-peers", action="store_true", help="leave out kernels of other projects")
    parser.add_argument("--contexts", nargs="*", type=int, default=(4096, 32768), help="keys of a step of attention")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 16), help="sequences of a step of attention")
    parser.add_argument("--pages", nargs="*", default=PAGES_BY_WORTH, choices=FORMS, help="forms of keys and values")
    parser.add_argument("--span", type=int, default=2048, help="tokens of a chunk of a prompt after a cached prefix")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to see whether it works")
    parser.add_argument("--rows", type=Path, help="append each figure here, as a line of JSON")
    parser.add_argument("--write-tables", action="store_true", help="let the registry choose by these figures")


@dataclass
class Figures:
    """Figures so far, each written as it is measured.

    Attributes:
        failed: our own kernels that could not.
    """

    out: Rows
    stream: float
    linears: list[Measured] = field(default_factory=list)
    attention: list[Measured] = field(default_factory=list)
    spans: list[Measured] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, found: Measured | None, rows: list[Measured], name: str) -> None:
        if found is not None:
            rows.append(found)
            self.out.add(**asdict(found))
        elif name not in (*PEERS, *INSTEAD_OF, SDPA):
            self.failed.append(name)

    def show(self, console: Console) -> None:
        tables = {
            "Linears: medians over replays": (self.linears, DENSE),
            "Attention of one layer": (self.attention, SDPA),
            "Attention of one layer: the last tokens of a sequence": (self.spans, SDPA),
        }
        for title, (rows, first) in tables.items():
            if rows:
                print_with_markdown(title, table(rows, self.stream, first), console)


def run(options: argparse.Namespace) -> int:
    console = Console(width=160, highlight=False)
    device = require_gpu() if options.device == "cuda" else torch.device("cpu")
    figures = Figures(Rows(options.rows), read_stream(device))
    figures.out.add(**environment(), stream=figures.stream)

    def time_linears(names: Sequence[str]) -> None:
        ours = [name for name in names if name in KERNELS and name not in INSTEAD_OF]
        sizes = [
            partial(call_once, name, shape, options.tokens, device) for name, shape in product(ours, options.shapes)
        ]
        if device.type == "cuda":
            compile_ahead(sizes, device)
        for name, tokens, shape in product(names, options.tokens, options.shapes):
            figures.add(measure_or_say(shape, tokens, name, device, console.print), figures.linears, name)

    def time_attention(names: Sequence[str], batches: Sequence[int], rows: list[Measured], tokens: int = 1) -> None:
        for name, context, batch in product(names, options.contexts, batches):
            if context >= tokens:
                found = measure_attention(Case(batch, context), name, device, console.print, tokens)
                figures.add(found, rows, name)

    # What matters most comes first.
    if options.kernels:
        time_linears([*options.kernels[:1], DENSE])
    if options.pages:
        optional = [FLASHINFER] if flashinfer.is_installed() else []
        pages = [f"{PAGES}{form}" for form in options.pages]
        time_attention([*pages, SDPA, *optional], options.batches, figures.attention)
        copied = [f"{GATHERED}{name}" for name in pages]
        time_attention([*pages, SDPA, *copied, *optional], [1], figures.spans, options.span)
    if options.kernels:
        time_linears([*options.kernels[1:], *([] if options.no_peers else peers())])
    figures.show(console)
    if options.write_tables:
        for folder, rows in ((humming.TABLES, figures.linears), (flashinfer.TABLES, figures.spans)):
            console.print(f"written: {write_tables(rows, folder)}")
    return int(bool(figures.failed))
