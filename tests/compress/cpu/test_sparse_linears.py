"""2:4 sparse codes in three bits per weight: the products and bytes of the same weight with its zeros in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from tiny_models import random_weight

from compress.checkpoint.weights import Int, NMSparsity, Scheme
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import SchemeError
from compress.cpu.binding import INSTRUCTION_SETS, absence, best_instruction_set, library, set_threads
from runtime.backends.cpu import kept_codes
from runtime.backends.cpu.kept_codes import kept_unsupported_reason
from runtime.backends.cpu.linear import CpuLinear

pytestmark = pytest.mark.skipif(library() is None, reason=absence())
SETS = range(best_instruction_set() + 1)
TWO_OF_FOUR = NMSparsity(2, 4)


def sparse_weight(shape: tuple[int, int], bits: int = 4, group: int | None = 32, seed: int = 0) -> CodedWeight:
    """Two of every four codes are kept, sometimes fewer because a kept one is zero, too."""
    weight = random_weight(shape, Int(bits, group), seed, dtype=torch.float16)
    order = torch.rand(shape[0], shape[1] // 4, 4, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    codes = weight.qweight.clone().masked_fill_((order >= 2).flatten(1), weight.scheme.zero)
    return weight.scheme.weight(codes, weight.scales, weight.zero_points)


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@examples(60)
@given(
    bits=st.integers(3, 4),
    group=st.sampled_from([32, 64, 96, 128, 160, None]),
    groups=st.integers(1, 3),
    out_features=st.integers(1, 150),
    rows=st.sampled_from([1, 2, 3, 5, 6, 7, 12, 13, 40]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    instruction_set=st.sampled_from(SETS),
    seed=st.integers(0, 99),
)
def test_any_sparse_weight(bits, group, groups, out_features, rows, dtype, instruction_set, seed) -> None:
    shape = out_features, (group or 32 * (1 + seed % 9)) * groups
    weight, x = sparse_weight(shape, bits, group, seed), numbers(rows, shape[1], dtype, seed)
    bias = numbers(1, out_features, seed=seed)[0] if seed % 2 else None
    linear = CpuLinear(weight, bias, sparse=True, instruction_set=instruction_set)
    found = linear(x)
    expected = x.double() @ weight.dequantize(torch.float64).T + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.dequantize(torch.float64).abs().T + 1e-6
    rounding = 2**-8 * expected.abs() if dtype == torch.bfloat16 else 0
    assert bool(((found.double() - expected).abs() <= 4e-6 * magnitude + rounding).all())
    assert linear.nbytes < CpuLinear(weight, instruction_set=instruction_set).nbytes


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("rows", [1, 4, 13, 150])
def test_the_bits_of_the_expanded_weight(rows: int, instruction_set: int) -> None:
    weight, x = sparse_weight((200, 384), group=128), numbers(rows, 384)
    dense = CpuLinear(weight, instruction_set=instruction_set)
    assert torch.equal(CpuLinear(weight, sparse=True, instruction_set=instruction_set)(x), dense(x))


@pytest.mark.parametrize("instruction_set", SETS)
def test_every_code_in_every_place(instruction_set: int) -> None:
    """Identity activations read the weight back: all pairs of places and of codes."""
    pairs = torch.tensor([(a, b) for a in range(4) for b in range(a + 1, 4)])
    codes = torch.full((96, 24, 4), 8, dtype=torch.uint8)
    for row in range(96):
        for quad in range(24):
            codes[row, quad, pairs[(row + quad) % 6]] = torch.tensor(
                [row % 16, (row // 6 + quad) % 16], dtype=torch.uint8
            )
    base = sparse_weight((96, 96))
    weight = base.scheme.weight(codes.flatten(1), base.scales, base.zero_points)
    linear = CpuLinear(weight, sparse=True, instruction_set=instruction_set)
    assert torch.equal(linear(torch.eye(96)).T, weight.dequantize(torch.float32))
    indices = torch.tensor([95, 0, 63, 64])
    assert torch.equal(linear.rows(indices, torch.float32), weight.dequantize(torch.float32)[indices])


def test_a_row_depends_on_itself_alone() -> None:
    linear, x = CpuLinear(sparse_weight((200, 384)), sparse=True), numbers(150, 384, torch.bfloat16)
    alone = torch.cat([linear(row) for row in x.split(1)])
    try:
        for threads in (1, 3):
            set_threads(threads)
            assert torch.equal(linear(x), alone)
            assert torch.equal(linear(x[3:9]), alone[3:9])
    finally:
        set_threads(0)


def test_what_keeps_more_than_it_says_is_refused() -> None:
    weight = random_weight((64, 64), Int(4, 32))
    with pytest.raises(SchemeError, match=r"2:4.*--linear-backend"):
        CpuLinear(weight, sparse=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"bits": 3}, ""),
        ({"sparsity": None}, "2:4"),
        ({"sparsity": "4:8"}, "2:4"),
        ({"bits": 8}, "3 and 4 bits"),
        ({"symmetric": False}, "symmetric"),
    ],
    ids=str,
)
@pytest.mark.parametrize("best", range(len(INSTRUCTION_SETS)))
def test_where_it_is_chosen(changed: dict, said: str, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_codes, "best_instruction_set", lambda: best)
    fields = {"bits": 4, "group_size": 32, "sparsity": "2:4"}
    refusal = kept_unsupported_reason(Scheme.from_dict(fields | changed))
    faster = INSTRUCTION_SETS[best] in ("avx2", "avx512")
    assert (said or ("" if faster else "was not seen to be faster")) in refusal
    assert bool(refusal) == bool(said or not faster)
