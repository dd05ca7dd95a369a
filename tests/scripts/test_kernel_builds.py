"""What launches choose is what is compiled. Launches over empty tensors of real sizes are noted instead of made: each
build must be such a launch, and every two choices that a launch makes together must be in one build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.checkpoint.kv_cache import KV_FORMATS, KVCacheScheme
from runtime.backends.base import FLOATS, LEVELS, ROWS, SUMS, InputForm, Prepared, Product, finished
from runtime.backends.triton.attention import HEAD_DIMS, block_rows
from runtime.backends.triton.kernels.page_views import Front, HeadPages

pytest.importorskip("triton")
META, ARCHITECTURE = torch.device("meta"), 90
MAX_SPLITS = 16
TOKENS, HEADS, KV_HEADS = (1, 32, 64, 128, 2048), 32, 8
ROWS_OF_WEIGHT, INPUTS = 8192, 8192
KINDS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1", torch.float64: "*fp64",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Name of a kernel, its choices (compile-time arguments, warps, types of the others), and its numbers."""

    kernel: str
    choices: frozenset[tuple[str, Any]]
    numbers: frozenset[tuple[str, int]] = frozenset()


class Noted:
    """Stands for a kernel and notes its launches."""

    def __init__(self, kernel: Any, launches: set[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert min(grid) > 0
        return self.note

    def note(self, *arguments: Any, **constants: Any) -> None:
        given = dict(zip(self.kernel.arg_names, arguments, strict=False))
        types = {name: _type(value) for name, value in given.items()}
        numbers = frozenset((name, value) for name, value in given.items() if isinstance(value, int))
        self.launches.add(Launch(self.kernel.__name__, _choices(types, constants), numbers))


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return KINDS[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def _choices(types: dict[str, str], constants: dict[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset({**types, "num_warps": 4, **constants, "INTERPRETED": False}.items())


@pytest.fixture(scope="module")
def launches() -> set[Launch]:
    """All that can be chosen, over dtypes, forms, sizes and numbers of tokens."""
    from compress.methods.shared import column_solver_triton
    from runtime.backends.triton.kernels import fp8, int8, norm_act, paged_attention, rope_kv_write, w4a16
    from runtime.backends.triton.kernels import sampling as kernels_sampling

    found: set[Launch] = set()
    modules = column_solver_triton, w4a16, paged_attention, int8, kernels_sampling, fp8, norm_act, rope_kv_write
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if hasattr(value, "arg_names"):
                    patch.setattr(module, name, Noted(value, found))
        for dtype in (torch.bfloat16, torch.float16):
            for each in (_planes, _bytes, _floats, _step, _turns, _attention):
                each(dtype)
        _columns()
        _draws()
    return found


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def _planes(dtype: torch.dtype) -> None:
    from benchmarking.linear_builds import FORMS, _tried

    from runtime.backends.triton.kernels.configs import all_configs
    from runtime.backends.triton.kernels.norm_act import prepared
    from runtime.backends.triton.kernels.w4a16 import input_form, product
    from runtime.backends.triton.kernels.weight_layout import PlanedWeight, tile_inputs

    for form in FORMS:
        tile = tile_inputs(form.bits)
        inputs = INPUTS if form.even else INPUTS - tile // 2
        tiles, groups = -(-inputs // tile), -(-inputs // (form.group_size or inputs))
        words = empty(tiles, ROWS_OF_WEIGHT, 32, dtype=torch.int16)
        zero = empty(groups, ROWS_OF_WEIGHT, dtype=torch.uint8) if form.has_zero else None
        midpoint, shape = 1 << form.bits - 1, (ROWS_OF_WEIGHT, inputs)
        scale, bias = empty(groups, ROWS_OF_WEIGHT, dtype=dtype), empty(ROWS_OF_WEIGHT, dtype=dtype)
        weight = PlanedWeight(words, scale, zero, form.bits, midpoint, form.group_size, shape)
        for config in {*all_configs(form.bits), *(_tried() if form == FORMS[0] and dtype == torch.bfloat16 else ())}:
            x = prepared(empty(config.block_m, inputs, dtype=dtype), input_form(weight, config))
            product(x, weight, bias if form.has_bias else None, config)


def _bytes(dtype: torch.dtype) -> None:
    from benchmarking.linear_builds import GROUPS

    from runtime.backends.triton.kernels.int8 import ByteWeight, byte_parts, level_parts

    codes, bias = empty(ROWS_OF_WEIGHT, INPUTS, dtype=torch.int8), empty(ROWS_OF_WEIGHT, dtype=dtype)
    for (group_size, has_zero), tokens in product(GROUPS, TOKENS):
        groups = INPUTS // (group_size or INPUTS), ROWS_OF_WEIGHT
        zero = empty(*groups, dtype=torch.int8) if has_zero else None
        weight = ByteWeight(codes, empty(*groups, dtype=dtype), zero, group_size)
        byte_parts(Prepared(empty(tokens, INPUTS, dtype=dtype)), weight, bias, 132)
        levels = Prepared(empty(tokens, INPUTS, dtype=torch.int8), empty(tokens, dtype=torch.float32))
        level_parts(levels, weight, bias, 132)


def _floats(dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.fp8 import PlacedFp8, fp8_parts

    codes, bias = empty(ROWS_OF_WEIGHT, INPUTS, dtype=torch.uint8), empty(ROWS_OF_WEIGHT, dtype=dtype)
    for rounds, tokens, with_bias in product((False, True), TOKENS, (False, True)):
        weight = PlacedFp8(codes, bias, rounds, ARCHITECTURE >= 89, 132, dtype)
        x = empty(tokens, INPUTS, dtype=torch.uint8 if rounds else dtype)
        fp8_parts(
            Prepared(x, empty(tokens, dtype=torch.float32) if rounds else None), weight, bias if with_bias else None
        )


def _products(rows: int, dtype: torch.dtype, level_splits: int = MAX_SPLITS) -> Iterator[Product]:
    """Of each kind that some linear gives."""
    bias, scales = empty(rows, dtype=dtype), (empty(4, dtype=torch.float32), empty(rows, dtype=dtype))
    yield finished(empty(4, rows, dtype=dtype))
    yield Product(empty(MAX_SPLITS, 4, rows, dtype=torch.float32), rows, bias)
    yield Product(empty(level_splits, 4, rows, dtype=torch.int32), rows, bias, scales)
    yield Product(empty(1, 4, rows, dtype=torch.float32), rows, None, scales)


def _step(dtype: torch.dtype) -> None:
    from benchmarking.step_builds import level_splits

    from runtime.backends.triton.kernels.norm_act import finish, gate, norm, prepared

    for unit in (32, 64, 128, 256):
        prepared(empty(4, 4096, dtype=dtype), InputForm(SUMS, unit, 4096 // unit))
    for kind, size in product((LEVELS, FLOATS), (4096, 16384, 32768)):
        prepared(empty(4, size, dtype=dtype), InputForm(kind))
    for size in (4096, 8192, 16384):
        forms = InputForm(ROWS), InputForm(SUMS, 128, size // 128), InputForm(LEVELS), InputForm(FLOATS)
        for form in forms:
            for update in (None, *_products(size, dtype, level_splits(size))):
                norm(empty(4, size, dtype=dtype), update, empty(size, dtype=dtype), 1e-5, form)
            for gate_up in _products(2 * size, dtype):
                gate(gate_up, form, dtype)
                finish(gate_up, dtype)


def _pages(cache: str, head_dim: int, dtype: torch.dtype) -> HeadPages:
    scheme = KVCacheScheme.named(cache)
    form = dtype if scheme.is_exact else torch.uint8
    pages = empty(64, 16, KV_HEADS, head_dim, dtype=form)
    scales = pages if scheme.is_exact else empty(64, 16, KV_HEADS, 2, dtype=torch.float16)
    return HeadPages((pages, pages), (scales, scales), (scheme.key_format, scheme.value_format), scheme.rotate)


def _turns(dtype: torch.dtype) -> None:
    from runtime.backends.triton.kernels.rope_kv_write import write_turned

    for cache, head_dim, has_norm in product(KV_FORMATS, HEAD_DIMS, (False, True)):
        norm, angles = empty(HEADS + KV_HEADS, head_dim, dtype=dtype), empty(4, 1, head_dim, dtype=dtype)
        for qkv in _products((HEADS + 2 * KV_HEADS) * head_dim, dtype):
            slots, into = empty(4, dtype=torch.int64), _pages(cache, head_dim, dtype)
            write_turned(qkv, norm if has_norm else None, 1e-5, angles, angles, slots, into)


def _attention(dtype: torch.dtype) -> None:
    from benchmarking.attention_builds import FLAGS, SPLITS, flags_of

    from runtime.backends.triton.kernels.paged_attention import attend

    sizes = [(head_dim, rows) for head_dim in HEAD_DIMS for rows in block_rows(head_dim)]
    for cache, (head_dim, rows) in product(KV_FORMATS, sizes):
        into, tokens = _pages(cache, head_dim, dtype), rows // (HEADS // KV_HEADS)
        query, exact = empty(tokens, HEADS, head_dim, dtype=dtype), empty(2, 4, KV_HEADS, head_dim, dtype=dtype)
        blocks, places = empty(1, 64, dtype=torch.int64), empty(tokens, dtype=torch.int64)
        for flags, splits in product(flags_of(cache), SPLITS):
            windowed, streaming, has_exact, tree = (flag in flags for flag in FLAGS)
            front = Front(
                4 if streaming else 0, query if streaming else None,
                (exact, exact) if has_exact else None, blocks[:, 0] if has_exact else None,
            )  # fmt: skip
            attend(
                query, into.pages, into.scales, into.formats, blocks, places, 512 if windowed else None, rows, splits,
                front, places if tree else None,
            )  # fmt: skip


def _columns() -> None:
    from compress.cpu.gptq import ColumnGrid
    from compress.methods.shared.column_solver_triton import GpuColumns

    weight, feedback = empty(256, 4096, dtype=torch.float32), empty(256, 256, dtype=torch.float32)
    codes, kept = empty(256, 4096, dtype=torch.uint8), empty(256, 4096, dtype=torch.bool)
    scale = empty(2, 4096, dtype=torch.float32)
    grid = ColumnGrid(scale, scale, empty(256, dtype=torch.int64), 15)
    for has_kept, has_grid in ((False, True), (True, True), (True, False)):
        columns = GpuColumns(weight, weight, feedback, codes, kept if has_kept else None, grid if has_grid else None)
        for count in (4, 16, 23, 33, 64):
            columns.change(64, 64 + count)


def _draws() -> None:
    from runtime.backends.triton.kernels.sampling import draw_from_listed, draw_rows
    from runtime.sampling.logits_processors import NUM_LIKELY
    from runtime.sampling.sampling_tensors import RowNoise

    numbers, tokens = empty(4, dtype=torch.int64), empty(4, dtype=torch.int64)
    noise = RowNoise(numbers, numbers, empty(4, dtype=torch.float64))
    for vocab_size in (2048, 32000, 128256, 262144):
        logits = empty(4, vocab_size, dtype=torch.float32)
        draw_rows(logits, logits, noise, tokens)
    scores, ids = empty(4, NUM_LIKELY, dtype=torch.float32), empty(4, NUM_LIKELY, dtype=torch.int64)
    is_truncated = empty(4, dtype=torch.bool)
    draw_from_listed(scores, ids, is_truncated, is_truncated, noise, tokens)


@pytest.fixture(scope="module")
def builds() -> dict[Launch, frozenset[str]]:
    """As launches, with the numbers that must be multiples of 16."""
    from benchmarking.kernel_builds import all_builds

    found = {}
    for build in all_builds(ARCHITECTURE):
        numbers = frozenset(name for name in build.aligned if not build.types[name].startswith("*"))
        found[Launch(build.kernel, _choices(build.types, build.constants))] = numbers
    return found


def test_every_build_is_a_launch(launches: set[Launch], builds: dict[Launch, frozenset[str]]) -> None:
    numbers = {Launch(each.kernel, each.choices): dict(each.numbers) for each in launches}
    for build, aligned in builds.items():
        assert build in numbers, _nearest(build, launches)
        assert all(numbers[build][name] % 16 == 0 for name in aligned), build.kernel


def _nearest(wanted: Launch, launches: set[Launch]) -> str:
    same = [each.choices for each in launches if each.kernel == wanted.kernel]
    best = min(same, key=lambda choices: len(choices ^ wanted.choices), default=frozenset())
    return f"{wanted.kernel}: {dict(wanted.choices - best)} is launched as {dict(best - wanted.choices)}"


def test_every_two_choices_are_built_together(launches: set[Launch], builds: dict[Launch, frozenset[str]]) -> None:
    built: dict[str, set[Any]] = {}
    for build in builds:
        built.setdefault(build.kernel, set()).update(_pairs(build))
    missing = {(w4a16.kernel, pair) for w4a16 in launches for pair in _pairs(w4a16) if pair not in built[w4a16.kernel]}
    assert not missing


def _pairs(w4a16: Launch) -> Iterator[frozenset[Any]]:
    return (frozenset(pair) for pair in combinations(sorted(w4a16.choices, key=str), 2))
