"""Calls of every host wrapper of a Triton kernel over empty tensors: dtypes, forms, sizes and numbers of tokens.

The functions have effects only while launches are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarking.launches import Launch, Recorder, recorded
from compress.checkpoint.kv_cache import EXACT, KV_FORMATS, KVCacheScheme
from compress.models.linear import Linear
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.mixers.mamba2 import Mamba2
from compress.models.norm import Norm
from runtime.backends.base import NormWeights, Target
from runtime.backends.span_attention import PLAIN_LAYER, LayerScores
from runtime.backends.state_kernels import DeltaWeights, Mamba2Weights
from runtime.backends.triton.attention import (
    HEAD_DIMS,
    LATENT_FORMATS,
    LATENT_RANKS,
    ROTATED_CHANNELS,
    HeadPages,
    SinkTokens,
    block_rows,
)
from runtime.backends.triton.fused_linear import (
    Q8_FLOAT,
    Q8_INT,
    ROWS,
    SUMS,
    ActivationLayout,
    PartialSums,
    QuantizedInput,
    finished,
)
from runtime.backends.triton.latent import BLOCK_ROWS
from runtime.core.state_rows import StateRows

if TYPE_CHECKING:
    from runtime.backends.triton.kernels.configs import KernelConfig
    from runtime.backends.triton.kernels.weight_layout import InterleavedWeight


PROCESSORS = 132
"""Multiprocessors of an H200; an A100 has fewer."""
DTYPES = (torch.bfloat16, torch.float16)
MULTIPLIES_FP8 = 89
"""First architecture with products of 8-bit floats."""
TOKENS = (1, 32, 64, 128, 2048)
HEADS, KV_HEADS = 32, 8
ROWS_OF_WEIGHT, INPUTS = 8192, 8192
MAX_SPLITS = 16
NUM_EXPERTS, NUM_CHOSEN = 128, 8
ATTENTION_SPLITS = (1, 8, 64)
VOCABULARIES = (2048, 32000, 128256, 262144, 50257)
"""The last one is no multiple of 16."""


@dataclass(frozen=True)
class PackedForm:
    """A packed weight of 2 to 4 bits.

    Attributes:
        group_size: 0 is one group per row.
        even: whether inputs fill the last tile.
    """

    bits: int
    group_size: int
    has_zero: bool = False
    has_bias: bool = False
    even: bool = True


MEASURED = PackedForm(4, 128)
"""The form that `tune_kernels.py` measures."""
PACKED_FORMS = (
    MEASURED,
    PackedForm(4, 64, has_bias=True),
    PackedForm(4, 32, True),
    PackedForm(4, 32, has_bias=True, even=False),
    PackedForm(4, 0),
    PackedForm(2, 128, has_bias=True),
    PackedForm(2, 64, True),
    PackedForm(2, 32, even=False),
    PackedForm(2, 0, True, has_bias=True),
)
BYTE_GROUPS = ((0, False), (0, True), (128, True), (64, False), (32, True))
"""Group sizes of 8-bit codes, and whether zero points are stored."""


def all_launches(arch: int) -> list[Launch]:
    """Distinct launches of every kernel on an architecture."""
    with recorded(arch) as recorder:
        for dtype in DTYPES:
            _w4a16(dtype, recorder)
            _grouped_gemm(dtype)
            _int8(dtype)
            _fp8(dtype, arch)
            _norm_act(dtype)
            _rope_kv_write(dtype)
            _attention(dtype)
            _latent_attention(dtype)
            _states(dtype)
        _column_solver()
        _sampling()
    return list(recorder.launches)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _w4a16(dtype: torch.dtype, recorder: Recorder) -> None:
    from runtime.backends.triton.kernels.configs import all_configs

    for form in PACKED_FORMS:
        for config in all_configs(form.bits):
            _w4a16_product(form, config, dtype)
    if dtype == torch.bfloat16:
        recorder.tried = True
        for config in _tried_configs():
            _w4a16_product(MEASURED, config, dtype)
        recorder.tried = False


def _tried_configs() -> list[KernelConfig]:
    from benchmarking.gpu_kernels import candidates
    from runtime.backends.triton.kernels.configs import BUCKETS

    return list(dict.fromkeys(replace(config, splits=1) for tokens in BUCKETS for config in candidates(tokens)))


def _w4a16_product(form: PackedForm, config: KernelConfig, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.configs import BUCKETS
    from runtime.backends.triton.kernels.norm_act import convert_input
    from runtime.backends.triton.kernels.w4a16 import W4A16Linear

    bias = _empty(ROWS_OF_WEIGHT, dtype=dtype) if form.has_bias else None
    linear = W4A16Linear(_packed(form, dtype), bias, dict.fromkeys(BUCKETS, config))
    x = _empty(config.block_m, linear.weight.shape[1], dtype=dtype)
    linear.product(convert_input(x, linear.activation_layout(len(x))))


def _packed(form: PackedForm, dtype: torch.dtype) -> InterleavedWeight:
    from runtime.backends.triton.kernels.weight_layout import InterleavedWeight, tile_inputs

    tile = tile_inputs(form.bits)
    inputs = INPUTS if form.even else INPUTS - tile // 2
    tiles, groups = -(-inputs // tile), -(-inputs // (form.group_size or inputs))
    words = _empty(tiles, ROWS_OF_WEIGHT, 32, dtype=torch.int16)
    zero = _empty(groups, ROWS_OF_WEIGHT, dtype=torch.uint8) if form.has_zero else None
    scale, shape = _empty(groups, ROWS_OF_WEIGHT, dtype=dtype), (ROWS_OF_WEIGHT, inputs)
    return InterleavedWeight(words, scale, zero, form.bits, 1 << form.bits - 1, form.group_size, shape)


def _grouped_gemm(dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.grouped_gemm import BLOCKS_M, GroupedWeight, RowBlocks

    for form, block_m in product(PACKED_FORMS, BLOCKS_M):
        weight = _packed(form, dtype)
        grouped = GroupedWeight([weight] * NUM_EXPERTS)
        rows, experts = (_empty(size, dtype=torch.int32) for size in (NUM_EXPERTS * block_m, NUM_EXPERTS))
        blocks = RowBlocks(rows, experts, NUM_EXPERTS * block_m)
        for rows_per_token in (1, NUM_CHOSEN):
            grouped.product(_empty(len(rows), weight.shape[1], dtype=dtype), blocks, rows_per_token)


def _int8(dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.int8_gemm import W8A8Linear, W8A16Linear

    codes, bias = _empty(ROWS_OF_WEIGHT, INPUTS, dtype=torch.int8), _empty(ROWS_OF_WEIGHT, dtype=dtype)
    for (group_size, has_zero), tokens in product(BYTE_GROUPS, TOKENS):
        groups = INPUTS // (group_size or INPUTS), ROWS_OF_WEIGHT
        zero = _empty(*groups, dtype=torch.int8) if has_zero else None
        weight = codes, _empty(*groups, dtype=dtype), zero, group_size, bias, PROCESSORS
        W8A16Linear(*weight).product(QuantizedInput(_empty(tokens, INPUTS, dtype=dtype)))
        rounded = QuantizedInput(_empty(tokens, INPUTS, dtype=torch.int8), _empty(tokens, dtype=torch.float32))
        W8A8Linear(*weight).product(rounded)


def _fp8(dtype: torch.dtype, arch: int) -> None:
    from runtime.backends.triton.kernels.fp8 import Fp8Linear

    codes, numbers = _empty(ROWS_OF_WEIGHT, INPUTS, dtype=torch.uint8), _empty(ROWS_OF_WEIGHT, dtype=dtype)
    for rounds, tokens, with_bias in product((False, True), TOKENS, (False, True)):
        bias = numbers if with_bias else None
        linear = Fp8Linear(codes, numbers, bias, rounds, arch >= MULTIPLIES_FP8, PROCESSORS, dtype)
        x = _empty(tokens, INPUTS, dtype=torch.uint8 if rounds else dtype)
        scale = _empty(tokens, dtype=torch.float32) if rounds else None
        linear.product(QuantizedInput(x, scale))


def _products(rows: int, dtype: torch.dtype, level_splits: int = MAX_SPLITS) -> Iterator[PartialSums]:
    """Every kind of product that a linear returns."""
    bias, scales = _empty(rows, dtype=dtype), (_empty(4, dtype=torch.float32), _empty(rows, dtype=dtype))
    yield finished(_empty(4, rows, dtype=dtype))
    yield PartialSums(_empty(MAX_SPLITS, 4, rows, dtype=torch.float32), rows, bias)
    yield PartialSums(_empty(level_splits, 4, rows, dtype=torch.int32), rows, bias, scales)
    yield PartialSums(_empty(1, 4, rows, dtype=torch.float32), rows, None, scales)


def _norm_act(dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.norm_act import add_rms_norm, convert_input, silu_and_mul, split_k_reduce

    for unit in (32, 64, 128, 256):
        convert_input(_empty(4, 4096, dtype=dtype), ActivationLayout(SUMS, unit, 4096 // unit))
    for kind, size in product((Q8_INT, Q8_FLOAT), (4096, 16384, 32768)):
        convert_input(_empty(4, size, dtype=dtype), ActivationLayout(kind))
    for size in (4096, 8192, 16384):
        for form in (
            ActivationLayout(ROWS),
            ActivationLayout(SUMS, 128, size // 128),
            ActivationLayout(Q8_INT),
            ActivationLayout(Q8_FLOAT),
        ):
            for update in (None, *_products(size, dtype, _level_splits(size))):
                add_rms_norm(_empty(4, size, dtype=dtype), update, _empty(size, dtype=dtype), 1e-5, form)
            for gate_up in _products(2 * size, dtype):
                silu_and_mul(gate_up, form, dtype)
                split_k_reduce(gate_up, dtype)


def _level_splits(rows: int) -> int:
    """Splits of an 8-bit product with this many outputs: the longer a row, the fewer fill a GPU."""
    from runtime.backends.triton.kernels.int8_gemm import int8_tile, split_inputs

    return split_inputs(rows, 2**16, 1, int8_tile(1), PROCESSORS)[0]


def _pages(cache: str, dims: tuple[int, int], dtype: torch.dtype, kv_heads: int = KV_HEADS) -> HeadPages:
    """Pages of keys and values of these dimensions."""
    scheme = KVCacheScheme.named(cache)
    stored = dtype if scheme.is_exact else torch.uint8
    key, value = (_empty(64, 16, kv_heads, dim, dtype=stored) for dim in dims)
    scales = _empty(64, 16, kv_heads, 2, dtype=torch.float16)
    formats = scheme.key_format, scheme.value_format
    return HeadPages((key, value), (key, value) if scheme.is_exact else (scales, scales), formats, scheme.rotate)


def _rope_kv_write(dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.rope_kv_write import qk_norm_rope_kv_write

    for cache, head_dim, has_norm in product(KV_FORMATS, HEAD_DIMS, (False, True)):
        norm, angles = _empty(HEADS + KV_HEADS, head_dim, dtype=dtype), _empty(4, 1, head_dim, dtype=dtype)
        for qkv in _products((HEADS + 2 * KV_HEADS) * head_dim, dtype):
            slots, into = _empty(4, dtype=torch.int64), _pages(cache, (head_dim, head_dim), dtype)
            qk_norm_rope_kv_write(qkv, norm if has_norm else None, 1e-5, angles, angles, slots, into)


@dataclass(frozen=True)
class AttentionForm:
    """Options of a step of attention: a stream has a window and plain scores, exact tokens stand beside quantized
    pages, and chunks of tokens have no window."""

    windowed: bool
    streaming: bool
    exact: bool
    tree: bool
    scores: LayerScores = PLAIN_LAYER

    def fits(self, cache: str) -> bool:
        if (self.streaming and self.scores != PLAIN_LAYER) or (self.windowed and self.scores.chunk):
            return False
        return (self.windowed or not self.streaming) and (cache != EXACT or not self.exact)


def _attention(dtype: torch.dtype) -> None:
    sizes = [(head_dim, rows) for head_dim in HEAD_DIMS for rows in block_rows(head_dim)]
    changed = PLAIN_LAYER, LayerScores(softcap=50.0), LayerScores(chunk=8192)
    forms = [AttentionForm(*flags) for flags in product(*((False, True),) * 4, changed)]
    for cache, (head_dim, rows), form in product(KV_FORMATS, sizes, forms):
        if form.fits(cache):
            _attend(_pages(cache, (head_dim, head_dim), dtype), head_dim, rows, form, dtype)


def _attend(into: HeadPages, head_dim: int, rows: int, form: AttentionForm, dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.paged_attention import attend

    tokens = rows // (HEADS // KV_HEADS)
    query, exact = _empty(tokens, HEADS, head_dim, dtype=dtype), _empty(2, 4, KV_HEADS, head_dim, dtype=dtype)
    blocks, places = _empty(1, 64, dtype=torch.int64), _empty(tokens, dtype=torch.int64)
    front = SinkTokens(
        4 if form.streaming else 0,
        query if form.streaming else None,
        (exact, exact) if form.exact else None,
        blocks[:, 0] if form.exact else None,
    )
    window, ancestors = 512 if form.windowed else None, places if form.tree else None
    if form != AttentionForm(False, False, False, False):
        attend(query, into, blocks, places, window, rows, ATTENTION_SPLITS[-1], front, ancestors, form.scores)
        return
    logits = LayerScores(sink_logits=_empty(HEADS, dtype=dtype))
    for splits, scores in product(ATTENTION_SPLITS, (PLAIN_LAYER, logits)):
        attend(query, into, blocks, places, window, rows, splits, front, ancestors, scores)


def _latent_attention(dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.latent_attention import attend_latents

    sizes = product(LATENT_FORMATS, LATENT_RANKS, ROTATED_CHANNELS, BLOCK_ROWS, (None, 512), (False, True))
    for cache, rank, rotated, rows, window, tree in sizes:
        pages, heads = _pages(cache, (rotated, rank), dtype, 1), 2 * rows
        absorbed, query = _empty(heads, 1, rank, dtype=dtype), _empty(1, heads, 128 + rotated, dtype=dtype)
        blocks, places = _empty(1, 64, dtype=torch.int64), _empty(1, dtype=torch.int64)
        ancestors, options = places if tree else None, (0.1, window, rows, ATTENTION_SPLITS[-1])
        attend_latents(absorbed, query[..., 128:], pages, blocks, places, *options, ancestors)


def _delta_net(keys: int, heads: int, size: int, grouped: bool) -> GatedDeltaNet:
    gates, output = Linear("gates", 2 * heads, 1), Linear("output", 1, heads * size)
    return GatedDeltaNet(heads, keys, size, size, (), (gates,), output, Norm("norm", size, 1e-6), 4, grouped)


def _mamba(heads: int, groups: int, size: int, state: int, **options: Any) -> Mamba2:
    norm = Norm("norm", heads * size, 1e-5)
    return replace(Mamba2(heads, groups, size, state, (), Linear("output", 1, heads * size), norm, 4), **options)


STATE_MIXERS = (
    _delta_net(16, 32, 128, True),
    _delta_net(16, 16, 128, False),
    _delta_net(16, 64, 128, False),
    _mamba(128, 1, 64, 128),
    _mamba(128, 8, 64, 128),
    _mamba(24, 1, 64, 256, norms_before_gate=True, norm=None),
    _mamba(80, 1, 64, 128, has_conv_bias=False, norms_before_gate=True),
)
"""Qwen3-Next, Qwen3.5, Granite 4, Nemotron-H, Falcon-H1 and Codestral-Mamba, or mixers like theirs."""


def _states(dtype: torch.dtype) -> None:
    from runtime.backends.triton.states import STATE_KERNELS

    prepare = {kernel.mixer: kernel.prepare for kernel in STATE_KERNELS}
    for mixer, has_wide_norm in product(STATE_MIXERS, (False, True)):
        heads, channels = _empty(mixer.num_heads, dtype=torch.float32), mixer.conv_size
        conv = _empty(mixer.kernel, channels, dtype=torch.float32)
        size, norm_dtype = 0 if mixer.norm is None else mixer.norm.size, torch.float32 if has_wide_norm else dtype
        norm = NormWeights(_empty(size, dtype=norm_dtype), 1e-6) if size else None
        if isinstance(mixer, GatedDeltaNet):
            weights: Any = DeltaWeights(conv, heads, heads, norm)
            widths = channels + mixer.num_heads * mixer.value_dim, 2 * mixer.num_heads
        else:
            bias = _empty(channels, dtype=torch.float32) if mixer.has_conv_bias else None
            weights, widths = Mamba2Weights(conv, bias, heads, heads, heads, norm), (sum(mixer.sizes),)
        step = prepare[type(mixer)](mixer, weights, Target(torch.device("meta"), dtype))
        exact = {name: torch.float32 if field.is_exact else dtype for name, field in mixer.state_fields.items()}
        states = {name: _empty(4, *field.shape, dtype=exact[name]) for name, field in mixer.state_fields.items()}
        for rows in (1, 128):
            step([_empty(rows, width, dtype=dtype) for width in widths], states, _state_rows(rows))


def _state_rows(count: int) -> StateRows:
    """A sequence of this many rows."""
    slots, starts = _empty(1, dtype=torch.int64), _empty(2, dtype=torch.int32)
    return StateRows(slots, slots, starts, starts, starts, (count,), (1,))


def _column_solver() -> None:
    from compress.cpu.gptq import ColumnGrid
    from compress.methods.shared.column_solver_triton import GpuColumns

    weight, feedback = _empty(256, 4096, dtype=torch.float32), _empty(256, 256, dtype=torch.float32)
    codes, kept = _empty(256, 4096, dtype=torch.uint8), _empty(256, 4096, dtype=torch.bool)
    scale = _empty(2, 4096, dtype=torch.float32)
    grid = ColumnGrid(scale, scale, _empty(256, dtype=torch.int64), 15)
    for has_kept, has_grid in ((False, True), (True, True), (True, False)):
        columns = GpuColumns(weight, weight, feedback, codes, kept if has_kept else None, grid if has_grid else None)
        for count in (4, 16, 23, 33, 64):
            columns.change(64, 64 + count)


def _sampling() -> None:
    from runtime.backends.triton.kernels.sampling import sample_from_listed, sample_rows
    from runtime.core.batch import SamplingTensors
    from runtime.sampling.logits_processors import NUM_LIKELY

    numbers, tokens = _empty(4, dtype=torch.int64), _empty(4, dtype=torch.int64)
    floats = _empty(4, dtype=torch.float64)
    tensors = SamplingTensors(numbers, numbers, numbers, floats, floats, floats)
    for vocab_size in VOCABULARIES:
        logits = _empty(4, vocab_size, dtype=torch.float32)
        sample_rows(logits, logits, tensors, tokens)
    scores, ids = _empty(4, NUM_LIKELY, dtype=torch.float32), _empty(4, NUM_LIKELY, dtype=torch.int64)
    is_truncated = _empty(4, dtype=torch.bool)
    sample_from_listed(scores, ids, is_truncated, is_truncated, tensors, tokens)
