"""Factors on disk: they come back bit for bit, in the bits that were promised, or are refused."""

import pytest
import torch
from torch import Tensor

from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.scale_search import encode, search_scales
from compress.checkpoint.weights import Int, LowRank, Scheme
from compress.checkpoint.weights.base import StoredTensors, digest
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.common.errors import CheckpointError, SchemeError

M = "model.layers.0.mlp.down_proj"


def stored(tensors: dict[str, Tensor]):
    def get(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"no {name}")
        return tensors[name]

    return get


def make(scheme: Scheme, rows: int = 48, columns: int = 96) -> LowRankWeight:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, scheme.rank, generator=generator).bfloat16()
    right = torch.randn(scheme.rank, columns, generator=generator).bfloat16()
    if scheme.inner is None:
        return LowRankWeight(left, right, scheme)
    parts = [encode(each.float(), search_scales(each.float(), scheme.inner), scheme.inner) for each in (left, right)]
    return LowRankWeight(*parts, scheme)


@pytest.mark.parametrize(
    "scheme",
    [
        LowRank(None, 24),
        LowRank(Int(8, None), 24),
        LowRank(Int(4, 8), 16),
        LowRank(Int(4, None, False), 8),
        LowRank(Int(3, 32), 32),
    ],
    ids=str,
)
def test_factors_come_back_in_the_bits_promised(scheme) -> None:
    weight = make(scheme)
    tensors = COMPRESS_RUNTIME.encode(M, weight, torch.bfloat16)
    assert {name.split(".")[-2] for name in tensors} == {"left", "right"}
    again = scheme.read(StoredTensors(M, stored(tensors)))
    assert digest(again) == digest(weight)
    assert scheme.shape(StoredTensors(M, stored(tensors))) == weight.shape == (48, 96)
    assert COMPRESS_RUNTIME.modules([*tensors, "model.norm.weight"]) == [M]
    nbytes = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("weight_shape"))
    assert 8 * nbytes == scheme.stored_bits(48, 96)


def test_worked_example() -> None:
    """The one of docs/checkpoint-format.md."""
    scheme = LowRank(Int(4, None), 2)
    zero = torch.full((2, 1), 8, dtype=torch.uint8)
    left = scheme.inner.weight(
        torch.tensor([[9, 8], [7, 10]], dtype=torch.uint8), torch.tensor([[1.0], [0.5]]).bfloat16(), zero
    )
    right = scheme.inner.weight(
        torch.tensor([[9, 10, 11], [4, 8, 12]], dtype=torch.uint8), torch.tensor([[2.0], [0.25]]).bfloat16(), zero
    )
    weight = LowRankWeight(left, right, scheme)
    tensors = COMPRESS_RUNTIME.encode(M, weight, torch.bfloat16)
    assert tensors[f"{M}.left.weight_packed"].tolist() == [[0x89], [0xA7]]
    assert tensors[f"{M}.right.weight_packed"].tolist() == [[0xBA9], [0xC84]]
    assert tensors[f"{M}.left.weight_shape"].tolist() == [2, 2]
    assert tensors[f"{M}.right.weight_shape"].tolist() == [2, 3]
    assert left.dequantize().tolist() == [[1, 0], [-0.5, 1]]
    assert right.dequantize().tolist() == [[2, 4, 6], [-1, 0, 1]]
    assert weight.dequantize().tolist() == [[2, 4, 6], [-2, -2, -2]]


def test_bits_of_a_factorized_weight() -> None:
    assert LowRank(None, 64).stored_bits(256, 256) == 16 * 64 * 512
    assert LowRank(Int(8, None), 64).stored_bits(256, 768) == 8 * 64 * (256 + 768) + 16 * (256 + 64)
    assert LowRank(Int(4, 32), 64).stored_bits(256, 768) == (4 + 0.5) * 64 * (256 + 768)


def test_config_says_every_rank() -> None:
    schemes = {"a": LowRank(None, 8), "b": LowRank(Int(4, 32), 32), "c": Int(), "d": LowRank(None, 9)}
    assert COMPRESS_RUNTIME.schemes(COMPRESS_RUNTIME.quantization_config(schemes, []), schemes) == schemes


def test_factors_that_contradict_each_other_are_refused() -> None:
    scheme, rounded = LowRank(None, 4), LowRank(Int(8, None), 4)
    with pytest.raises(SchemeError, match=r"\(6, 4\) .*\(3, 8\) .*rank 4"):
        LowRankWeight(torch.ones(6, 4), torch.ones(3, 8), scheme)
    with pytest.raises(SchemeError, match=f"^{Int()} "):
        LowRankWeight(torch.ones(6, 4), torch.ones(4, 8), Int())
    with pytest.raises(SchemeError, match=f"^factors .*{rounded}"):
        LowRankWeight(torch.ones(6, 4), torch.ones(4, 8), rounded)
    tensors = COMPRESS_RUNTIME.encode(M, LowRankWeight(torch.ones(6, 4), torch.ones(4, 8), scheme), torch.bfloat16)
    with pytest.raises(SchemeError, match="rank 5"):
        LowRank(None, 5).read(StoredTensors(M, stored(tensors)))
    with pytest.raises(SchemeError, match="40"):
        COMPRESS_RUNTIME.check(LowRank(None, 40), (32, 64))
    with pytest.raises(SchemeError, match=r" 32 .* 24 .*--ignore"):
        COMPRESS_RUNTIME.check(LowRank(Int(4, 32), 24), (64, 64))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bits": 16, "group_size": None, "rank": 0}, "rank .*0 "),
        ({"bits": 16, "group_size": 32, "rank": 8}, "16-bit"),
        ({"bits": 4, "rank": 8, "sparsity": "2:4"}, "2:4"),
        ({"bits": 8, "group_size": None, "activation_bits": 8, "rank": 8}, "8-bit.*activation_bits"),
        ({"bits": 9, "rank": 8}, "bits=9"),
    ],
)
def test_schemes_that_cannot_be(options, problem) -> None:
    with pytest.raises(SchemeError, match=problem):
        Scheme.from_dict(options)


@pytest.mark.parametrize("codec", [COMPRESSED_TENSORS, GPTQ])
def test_other_formats_refuse_factors(codec) -> None:
    with pytest.raises(SchemeError, match=f"^{codec.name} .*factors.*--format dense"):
        codec.check(LowRank(Int(4, 32), 32), (64, 64))
