"""Runs every Triton kernel at tiny shapes, for compute-sanitizer.

compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from benchmarking.cpu.attention import Case, decoder_config
from benchmarking.cpu.kernels import random_weight
from benchmarking.gpu.ahead import compile_ahead
from benchmarking.gpu.attention import FORMS, last_tokens, paged_calls
from benchmarking.gpu.kernels import INSTEAD_OF, KERNELS, linears
from benchmarking.gpu.timing import require_gpu
from benchmarking.machine import leave_with
from torch import Tensor

from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.weights import Int
from compress.common.errors import ToolkitError
from compress.models.linear import Linear
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from compress.models.norm import Norm
from runtime.backends.base import NormWeights, Target
from runtime.backends.kv_pages import TokenPages
from runtime.backends.state_kernels import DeltaWeights, Mamba2Weights
from runtime.backends.state_memory import StateMemory
from runtime.core.batch import SamplingMetadata
from runtime.core.request import SamplingParams
from runtime.core.state_rows import build_state_rows
from runtime.core.step import NO_STATE, ScheduledSequence

ROWS, COLUMNS = 128, 256
TOKENS, MANY_TOKENS = (1, 20, 70), 1100
"""Tokens for each kind of tile: skinny with one block of tokens, with two, and a whole GEMM; and for which weights of 2
to 4 bits are dequantized."""
OURS = [name for name in KERNELS if name not in INSTEAD_OF]
EXPANDED = (OURS[0], "fp8", "nvfp4")
"""A form for each kernel that dequantizes."""
CASE = Case(2, 64, heads=4, kv_heads=2, head_dim=32)
Outputs = dict[str, Tensor]


def numbers(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def linear_outputs(device: torch.device) -> Outputs:
    found = {}
    for name in OURS:
        linear = linears(name, ROWS, COLUMNS, device)[0]
        counts = (*TOKENS, MANY_TOKENS) if name in EXPANDED else TOKENS
        found |= {f"{name}, {tokens} tokens": linear(numbers(device, tokens, COLUMNS)) for tokens in counts}
    return found


def attention_outputs(device: torch.device) -> Outputs:
    """Returns those of single tokens, and of several at the end of each sequence, whose context is cut in two."""
    counts = (1, 5)
    return {
        f"attention of {tokens} tokens over {form} pages": paged_calls(CASE, form, 132, device, tokens).calls[0]()
        for form in FORMS
        for tokens in counts
    }


def page_outputs(device: torch.device) -> Outputs:
    """Queries of three tokens after head norm and rotary embedding; two of the tokens have slots."""
    from runtime.backends.triton.attention import layer_pages
    from runtime.backends.triton.fused_linear import finished
    from runtime.backends.triton.kernels.rope_kv_write import qk_norm_rope_kv_write

    config, found = decoder_config(CASE, 1), {}
    heads = CASE.heads + 2 * CASE.kv_heads
    weight, angles = numbers(device, heads - CASE.kv_heads, CASE.head_dim), numbers(device, 3, 1, CASE.head_dim)
    slots = torch.tensor([17, -1, 3], device=device)
    for form in FORMS:
        scheme = KVCacheScheme(form, rotate=form == "int4")
        pages = TokenPages(config, scheme, CASE.num_blocks, CASE.block_size, torch.bfloat16, device)
        qkv = finished(numbers(device, 3, heads * CASE.head_dim))
        rotation = angles.cos(), angles.sin()
        into = layer_pages(pages, scheme, 0)
        found[f"queries while writing {form} pages"] = qk_norm_rope_kv_write(qkv, weight, 1e-6, *rotation, slots, into)
    return found


def op_outputs(device: torch.device) -> Outputs:
    from runtime.backends.triton.fused_linear import Q8_FLOAT, Q8_INT, ROWS, SUMS, ActivationLayout, finished
    from runtime.backends.triton.kernels.norm_act import add_rms_norm, convert_input, silu_and_mul

    found, weight = {}, torch.ones(COLUMNS, device=device, dtype=torch.bfloat16)
    for layout in (ActivationLayout(ROWS), ActivationLayout(SUMS, 128, 2), *map(ActivationLayout, (Q8_INT, Q8_FLOAT))):
        hidden, update = numbers(device, 3, COLUMNS), finished(numbers(device, 3, COLUMNS))
        found[f"norm, {layout}"] = add_rms_norm(hidden, update, weight, 1e-5, layout).rows
        gate_up = finished(numbers(device, 3, 2 * COLUMNS))
        found[f"gate, {layout}"] = silu_and_mul(gate_up, layout, torch.bfloat16).rows
        found[f"input, {layout}"] = convert_input(hidden, layout).rows
    return found


def sampling_outputs(device: torch.device) -> Outputs:
    from runtime.backends.triton.layers import TritonSampling
    from runtime.sampling.sampler import Sampler

    kinds = (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5))
    draws = [SamplingMetadata(kind, row, row) for row, kind in enumerate(kinds)]
    tokens = Sampler(fused=TritonSampling())(torch.randn(len(draws), 5000, device=device), draws)
    return {"tokens": torch.tensor([token.token_id for token in tokens])}


def latent_outputs(device: torch.device) -> Outputs:
    from runtime.backends.triton.attention import HeadPages
    from runtime.backends.triton.kernels.latent_attention import attend_latents
    from runtime.backends.triton.kernels.tile_list import tile_list
    from runtime.backends.triton.tiling import Tiling

    heads, rank, rotated, found = 4, 128, 32, {}
    sizes = [(CASE.num_blocks, CASE.block_size, 1, width) for width in (rotated, rank)]
    ragged = last_tokens(torch.arange(8, device=device).view(2, 4), 1, 64)
    tiles = tile_list(ragged, 2, Tiling(16, heads, 1, 8, least=32))
    for form in ("16bit", "int8"):
        exact = tuple(numbers(device, *size) for size in sizes)
        codes = tuple(torch.randint(0, 256, size, dtype=torch.uint8, device=device) for size in sizes)
        scales = tuple(torch.full((*size[:3], 2), 0.01, dtype=torch.float16, device=device) for size in sizes)
        pages = HeadPages(*((exact, exact) if form == "16bit" else (codes, scales)), (form, form), False)
        queries = numbers(device, heads, 2, rank), numbers(device, 2, heads, rotated)
        found[f"latents, {form}"] = attend_latents(*queries, pages, ragged, tiles, 16, 0.1, None)
    return found


def mixture_outputs(device: torch.device) -> Outputs:
    from runtime.backends.triton.kernels.grouped_gemm import GroupedWeight, block_rows
    from runtime.backends.triton.kernels.weight_layout import interleave

    weights = [interleave(random_weight(ROWS, COLUMNS, Int(4, 128), device), device) for _ in range(4)]
    chosen = torch.tensor([[0, 3], [3, 0], [2, 3]], device=device)
    return {"experts": GroupedWeight(weights).product(numbers(device, 3, COLUMNS), block_rows(chosen, 4), 2)}


def state_outputs(device: torch.device) -> Outputs:
    """Returns those of steps of single tokens and of a step with a long span, by both mixers."""
    from runtime.backends.triton.states import STATE_KERNELS

    kernels, found = {kernel.mixer: kernel for kernel in STATE_KERNELS}, {}
    steps = {"decode": [(1, 1, ((0, 2),)), (1, NO_STATE, ((0, 3),))], "span": [(70, NO_STATE, ((6, 2), (69, 3)))]}
    for mixer, weights, widths in (delta_net(device), mamba2(device)):
        compute = kernels[type(mixer)].prepare(mixer, weights, Target(device, torch.bfloat16))
        for name, spans in steps.items():
            memory = StateMemory({0: mixer.state_fields}, 4, torch.bfloat16, device).tensors[0]
            for states in memory.values():
                states.zero_()
            entries = [ScheduledSequence(None, 0, count, read, writes) for count, read, writes in spans]
            inputs = [numbers(device, sum(span[0] for span in spans), width) for width in widths]
            found[f"{type(mixer).__name__}, {name}"] = compute(inputs, memory, build_state_rows(entries, 4, device))
    return found


def delta_net(device: torch.device) -> tuple[GatedDeltaNet, DeltaWeights, list[int]]:
    """A mixer, its weights and the widths of what its linears give."""
    heads, keys, values = 2, 16, 32
    out, gates = Linear("out", 8, heads * values), (Linear("gates", 2 * heads, 8),)
    mixer = GatedDeltaNet(heads, 1, keys, values, (), gates, out, Norm("norm", values, 1e-6), 4, True)
    weights = DeltaWeights(*vectors(device, 4, mixer.conv_size, heads), norm_weights(device, values))
    return mixer, weights, [mixer.conv_size + heads * values, 2 * heads]


def mamba2(device: torch.device) -> tuple[Mamba2, Mamba2Weights, list[int]]:
    heads, size = 4, 16
    mixer = Mamba2(heads, 2, size, 32, (), Linear("out", 8, heads * size), Norm("norm", heads * size, 1e-5), 3)
    mixer = replace(mixer, step_limits=(0.01, 0.9))
    conv, decay, bias = vectors(device, 3, mixer.conv_size, heads)
    norm = norm_weights(device, heads * size)
    weights = Mamba2Weights(conv, torch.zeros(mixer.conv_size, device=device), decay, bias, decay, norm)
    return mixer, weights, [sum(mixer.sizes)]


def vectors(device: torch.device, taps: int, channels: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 convolution, decay and bias of steps."""
    return (
        torch.randn(taps, channels, device=device),
        -torch.rand(heads, device=device),
        torch.rand(heads, device=device),
    )


def norm_weights(device: torch.device, size: int) -> NormWeights:
    return NormWeights(torch.ones(size, device=device, dtype=torch.bfloat16), 1e-5)


def column_outputs(device: torch.device) -> Outputs:
    """Returns errors of the loop of GPTQ over columns of a weight, which feed theirs to later ones."""
    from compress.checkpoint.grids import IntegerGrid
    from compress.checkpoint.scale_search import search_scales
    from compress.methods.shared.column_solver import GPTQSolver

    weight, scheme = torch.randn(40, 64, device=device), Int(4, 32)
    feedback = (torch.eye(64) + 0.1 * torch.rand(64, 64).triu(1)).to(device)
    grid = IntegerGrid(search_scales(weight, scheme), scheme)
    solver = GPTQSolver(weight, torch.arange(64, device=device), feedback, grid, on_gpu=True)
    solver.run()
    return {"columns": solver.errors}


def search_outputs(device: torch.device) -> Outputs:
    """Returns the states of a short stream of trellis codes."""
    from compress.checkpoint.trellis_search_triton import search_in_triton

    values, table = torch.randn(1, 32, device=device), torch.randn(1 << 16, device=device)
    return {"states": search_in_triton(values, table, 5, 8, 1 << 16)}


GROUPS: tuple[Callable[[torch.device], Outputs], ...] = (
    *(linear_outputs, attention_outputs, page_outputs, op_outputs, sampling_outputs),
    *(latent_outputs, mixture_outputs, state_outputs, column_outputs, search_outputs),
)


def run(device: torch.device) -> Outputs:
    """Outputs by name. Raises ToolkitError: an output is not finite."""
    found: Outputs = {}
    for outputs in GROUPS:
        found |= outputs(device)
        print(f"{outputs.__name__}: {len(found)} outputs", flush=True)
    if broken := [name for name, output in found.items() if not bool(torch.isfinite(output.float()).all())]:
        raise ToolkitError(
            f"outputs are not finite: {', '.join(broken)}", "Run the tests of tests/runtime/backends/triton"
        )
    return found


LAUNCHING = linear_outputs, attention_outputs, page_outputs, op_outputs, mixture_outputs, state_outputs
"""Groups that launch the same kernels whatever those before have computed."""


def main() -> int:
    device = require_gpu()
    compiled = compile_ahead([partial(outputs, device) for outputs in LAUNCHING], device)
    print(f"{compiled} kernels compiled, {len(run(device))} outputs are finite")
    return 0


if __name__ == "__main__":
    leave_with(main)
