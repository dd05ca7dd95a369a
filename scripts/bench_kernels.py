"""Packed linears and attention on a GPU beside what PyTorch has, and gemlite where it is installed.

Linears: one shape and number of tokens after the other, beside cuBLAS, PyTorch's int4 product and its 2:4 product.
Attention: one token over a long context, by the form of keys and values, beside PyTorch's own.

Every time is the median of replays of one CUDA graph over copies that do not fit in the cache. Bytes are those of
weights, inputs and outputs; the last column is their rate over the measured read stream of the card.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --shapes 8192x8192 --tokens 1 16 256 2048 --json kernels.json
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarking.entry import leave_with
from benchmarking.gpu_timing import num_copies, read_stream, require_gpu, seconds_per_call
from benchmarking.kernel_peers import PEERS, SPARSE, peers
from benchmarking.machine import environment
from benchmarking.tables import Row, describe, print_with_markdown, write_json
from rich.console import Console
from torch import Tensor

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import CodedWeight
from compress.checkpoint.weights.fp8 import FP8, Fp8Weight
from compress.checkpoint.weights.integer import IntegerWeight
from runtime.backends.base import Target
from runtime.backends.torch.linear import DenseLinear
from runtime.backends.torch.semi_structured import semi_structured_bytes
from runtime.backends.triton.linear import BYTES, LEVELS, NATIVE, PLANES, WIDENED

SHAPES = ("4096x4096", "6144x4096", "28672x4096", "4096x14336", "8192x8192")
TOKENS = (1, 4, 16, 64, 256, 2048)
KERNELS = {
    "int4 g128": (PLANES, Scheme(4, 128)),
    "int2 g64": (PLANES, Scheme(2, 64)),
    "int8": (BYTES, Scheme(8, None)),
    "w8a8": (LEVELS, Scheme(8, None, True, 8)),
    "fp8": (WIDENED, Scheme(8, None, fp8=True)),
    "fp8 w8a8": (NATIVE, Scheme(8, None, activation_bits=8, fp8=True)),
}
DENSE = "cuBLAS bf16"


@dataclass(frozen=True)
class Measured:
    shape: str
    tokens: int
    name: str
    seconds: float
    nbytes: int


def random_codes(rows: int, columns: int, scheme: Scheme, device: torch.device) -> CodedWeight:
    groups = rows, scheme.num_groups(columns)
    scale = torch.rand(groups, device=device).mul_(0.01).add_(0.001).bfloat16()
    if scheme.fp8:
        return Fp8Weight(torch.randn(rows, columns, device=device).to(FP8), scale, scheme)
    codes = torch.randint(0, scheme.max_code + 1, (rows, columns), dtype=torch.uint8, device=device)
    zero = torch.full(groups, scheme.midpoint, dtype=torch.uint8, device=device)
    return IntegerWeight(codes, scale, zero, scheme)


def linears(name: str, rows: int, columns: int, device: torch.device) -> list[Callable[[Tensor], Tensor]]:
    """Copies of one linear, enough to leave the cache behind."""
    target = Target(device, torch.bfloat16)

    def make() -> Callable[[Tensor], Tensor]:
        if name == DENSE:
            return DenseLinear(torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 0.02, None)
        if name in PEERS:
            return PEERS[name](rows, columns, device)
        kernel, scheme = KERNELS[name]
        return kernel.prepare(random_codes(rows, columns, scheme, device), None, target)

    first = make()
    return [first, *(make() for _ in range(num_copies(weight_bytes(name, rows, columns)) - 1))]


def weight_bytes(name: str, rows: int, columns: int) -> int:
    if name == DENSE:
        return rows * columns * 2
    if name == SPARSE:
        return semi_structured_bytes(rows, columns)
    scheme = Scheme(4, 128) if name in PEERS else KERNELS[name][1]
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
    from benchmarking.cpu_attention import Case
    from benchmarking.gpu_attention import FORMS, SDPA, paged_calls, sdpa_calls

    from runtime.backends.triton.device import num_processors

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


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x columns")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=list(KERNELS))
    parser.add_argument("--contexts", nargs="*", type=int, default=(4096, 32768), help="keys of a step of attention")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 16), help="sequences of a step of attention")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
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


if __name__ == "__main__":
    leave_with(main)
