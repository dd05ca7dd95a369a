"""N:M sparse weights on disk: what is kept comes back bit for bit, in the bits that were promised."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples
from torch import Tensor

from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.weights import NM, Int, NMSparsity, Scheme
from compress.checkpoint.weights.base import StoredTensors
from compress.checkpoint.weights.sparse_nm import SparseWeight
from compress.common.errors import CheckpointError, SchemeError

TWO_OF_FOUR, FOUR_OF_EIGHT = NMSparsity(2, 4), NMSparsity(4, 8)
M = "model.layers.0.mlp.down_proj"


def stored(tensors: dict[str, Tensor]):
    def get(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"no {name}")
        return tensors[name]

    return get


def random_mask(rows: int, columns: int, sparsity: NMSparsity, generator: torch.Generator) -> Tensor:
    order = torch.rand(rows, columns // sparsity.m, sparsity.m, generator=generator).argsort(-1)
    return (order < sparsity.n).view(rows, columns)


def make_integers(sparse: NM, rows: int, columns: int, seed: int) -> SparseWeight:
    scheme = sparse.inner
    generator = torch.Generator().manual_seed(seed)
    groups = scheme.num_groups(columns)
    zero = torch.full((rows, groups), scheme.zero, dtype=torch.uint8)
    if not scheme.symmetric:
        zero = torch.randint(0, scheme.max_code + 1, (rows, groups), generator=generator, dtype=torch.uint8)
    codes = torch.randint(0, scheme.max_code + 1, (rows, columns), generator=generator, dtype=torch.uint8)
    kept = random_mask(rows, columns, sparse.pattern, generator)
    codes = torch.where(kept, codes, zero.repeat_interleave(columns // groups, 1))
    scale = torch.rand(rows, groups, generator=generator).bfloat16() + 0.1
    return SparseWeight(scheme.weight(codes, scale, zero), sparse)


@examples(60)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    group_size=st.sampled_from([None, 32]),
    sparsity=st.sampled_from([TWO_OF_FOUR, FOUR_OF_EIGHT, NMSparsity(1, 4)]),
    rows=st.integers(1, 9),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_integers_come_back(bits, symmetric, group_size, sparsity, rows, blocks, seed) -> None:
    scheme = NM(Int(bits, group_size, symmetric), sparsity)
    weight = make_integers(scheme, rows, 32 * blocks, seed)
    tensors = COMPRESS_RUNTIME.encode(M, weight, torch.bfloat16)
    again = scheme.read(StoredTensors(M, stored(tensors)))
    assert torch.equal(again.values.qweight, weight.values.qweight)
    assert torch.equal(again.values.scales, weight.values.scales)
    assert torch.equal(again.values.zero_points, weight.values.zero_points)
    assert scheme.shape(StoredTensors(M, stored(tensors))) == weight.shape


@pytest.mark.parametrize("sparsity", [TWO_OF_FOUR, FOUR_OF_EIGHT])
def test_pruned_values_come_back(sparsity) -> None:
    generator = torch.Generator().manual_seed(0)
    scheme = NM(None, sparsity)
    values = torch.randn(12, 64, generator=generator).bfloat16()
    values = values.masked_fill(~random_mask(12, 64, sparsity, generator), 0)
    tensors = COMPRESS_RUNTIME.encode(M, SparseWeight(values, scheme), torch.bfloat16)
    assert tensors[f"{M}.weight_values"].shape == (12, 32)
    assert torch.equal(scheme.read(StoredTensors(M, stored(tensors))).values, values)
    assert scheme.shape(StoredTensors(M, stored(tensors))) == (12, 64)


def test_worked_example() -> None:
    """The one of docs/checkpoint-format.md."""
    scheme = NM(Int(4, None), TWO_OF_FOUR)
    codes = torch.tensor([[8, 1, 8, 15, 2, 3, 8, 8]], dtype=torch.uint8)
    scale, zero = torch.tensor([[0.5]]).bfloat16(), torch.tensor([[8]], dtype=torch.uint8)
    weight = scheme.wrap(scheme.inner.weight(codes, scale, zero))
    tensors = COMPRESS_RUNTIME.encode(M, weight, torch.bfloat16)
    # Kept: places 1 and 3 of the first group, 0 and 1 of the second.
    assert tensors[f"{M}.weight_packed"].tolist() == [[0x32F1]]
    assert tensors[f"{M}.weight_indices"].tolist() == [[0b01_00_11_01]]
    assert tensors[f"{M}.weight_shape"].tolist() == [1, 8]
    assert weight.dequantize().tolist() == [[0, -3.5, 0, 3.5, -3.0, -2.5, 0, 0]]


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (NM(None, TWO_OF_FOUR), 9.0),
        (NM(None, FOUR_OF_EIGHT), 9.5),
        (NM(Int(4, 128), TWO_OF_FOUR), 3 + 16 / 128),
        (NM(Int(8, 128), TWO_OF_FOUR), 5 + 16 / 128),
        (NM(Int(4, 128, False), TWO_OF_FOUR), 3 + 20 / 128),
    ],
)
def test_bits_per_weight_are_those_promised(scheme, expected) -> None:
    rows, columns = 16, 256
    if scheme.inner is None:
        values = torch.randn(rows, columns).bfloat16()
        kept = random_mask(rows, columns, scheme.sparsity, torch.Generator().manual_seed(0))
        weight = SparseWeight(values.masked_fill(~kept, 0), scheme)
    else:
        weight = make_integers(scheme, rows, columns, 0)
    tensors = COMPRESS_RUNTIME.encode(M, weight, torch.bfloat16)
    nbytes = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("weight_shape"))
    assert 8 * nbytes == scheme.stored_bits(rows, columns) == expected * rows * columns


def test_a_group_that_is_too_full_is_refused() -> None:
    scheme = NM(None, TWO_OF_FOUR)
    values = torch.tensor([[1.0, 2, 3, 0, 1, 1, 1, 1]])
    with pytest.raises(SchemeError, match=r"2 groups.*2:4"):
        COMPRESS_RUNTIME.encode(M, SparseWeight(values, scheme), torch.bfloat16)


def test_kept_values_that_are_zero_keep_their_number() -> None:
    scheme = NM(None, TWO_OF_FOUR)
    values = torch.tensor([[0, 0, 0, 5.0, 0, 0, 0, 0]])
    tensors = COMPRESS_RUNTIME.encode(M, SparseWeight(values, scheme), torch.float32)
    assert tensors[f"{M}.weight_values"].shape == (1, 4)
    assert torch.equal(scheme.read(StoredTensors(M, stored(tensors))).values, values)


def test_places_that_contradict_each_other_are_refused() -> None:
    scheme = NM(None, TWO_OF_FOUR)
    tensors = {f"{M}.weight_values": torch.ones(1, 4), f"{M}.weight_indices": torch.tensor([[0]], dtype=torch.int32)}
    with pytest.raises(CheckpointError, match=f"{M}.weight_indices .*rise"):
        scheme.read(StoredTensors(M, stored(tensors)))
    tensors[f"{M}.weight_indices"] = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(CheckpointError, match="2:4"):
        scheme.read(StoredTensors(M, stored(tensors)))


def test_config_says_every_scheme() -> None:
    schemes = {"a": NM(Int(4, 128), TWO_OF_FOUR), "b": NM(None, FOUR_OF_EIGHT), "c": Int()}
    config = COMPRESS_RUNTIME.quantization_config(schemes, ["lm_head"])
    assert COMPRESS_RUNTIME.schemes(config, schemes) == schemes
    with pytest.raises(CheckpointError, match="quantization_config"):
        COMPRESS_RUNTIME.schemes(config, ["d"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bits": 16, "group_size": None}, "bits=16"),
        ({"bits": 16, "group_size": 32, "sparsity": "2:4"}, "16-bit"),
        ({"bits": 8, "group_size": None, "activation_bits": 8, "sparsity": "2:4"}, "8-bit"),
        ({"bits": 4, "group_size": 6, "sparsity": "2:4"}, " 6 .*2:4.*--group-size"),
    ],
)
def test_schemes_that_cannot_be(options, problem) -> None:
    with pytest.raises(SchemeError, match=problem):
        Scheme.from_dict(options)


def test_other_formats_refuse_to_leave_zeros_out() -> None:
    with pytest.raises(SchemeError, match=r"compressed-tensors.*zeros.*--format dense"):
        COMPRESSED_TENSORS.check(NM(Int(4, 128), TWO_OF_FOUR), (8, 128))


@pytest.mark.parametrize("text", ["2", "2:x", "3:3", "2:16", "0:4", ":"])
def test_patterns_that_are_none(text) -> None:
    with pytest.raises(SchemeError):
        NMSparsity.parse(text)
