"""NF4 as a target: its table, the codes and scales that rounding finds, and the way through a checkpoint."""

import json

import pytest
import torch
from runs import compress
from safetensors.torch import save_file
from tiny_models import random_weight
from torch import Tensor

from compress.checkpoint.float_scales import Codebook
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Nf4, Scheme
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.forms import NF4_VALUES
from compress.common.errors import CheckpointError, SchemeError
from compress.stages.quantize import QuantizeStage

BF16 = torch.bfloat16
M = "model.layers.0.mlp.up_proj"


def heavy_tailed(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) ** 3 * 0.01


def test_the_table_has_quantiles_of_the_normal_distribution() -> None:
    """Appendix E of QLoRA: 8 quantiles up to the middle, 9 from it on, and 0 for the one that both have."""
    end = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    below, above = (torch.linspace(1 - end, 0.5, count, dtype=torch.float64) for count in (8, 9))
    quantiles = torch.cat((torch.special.ndtri(below), -torch.special.ndtri(above[:-1]).flip(0)))
    expected = quantiles / quantiles.abs().max()
    torch.testing.assert_close(torch.tensor(NF4_VALUES, dtype=torch.float64), expected, rtol=0, atol=1e-6)


def test_codes_are_the_nearest() -> None:
    numbers, x = Codebook(NF4_VALUES), torch.linspace(-1.2, 1.2, 4001)
    table = torch.tensor(NF4_VALUES)
    distance = (x.unsqueeze(1) - table).abs()
    assert torch.equal((x - numbers.nearest(x)).abs(), distance.amin(1))
    assert torch.equal(numbers.codes(table), torch.arange(16, dtype=torch.uint8))
    assert torch.equal(table[numbers.codes(numbers.nearest(x)).int()], numbers.nearest(x))
    shuffled = Codebook(tuple(NF4_VALUES[place] for place in (3, 0, 7, 15, 8)))
    assert torch.equal(shuffled.nearest(x).unique().sort().values, torch.tensor(sorted(shuffled.values)))
    assert shuffled.codes(torch.tensor(shuffled.values)).tolist() == [0, 1, 2, 3, 4]


def test_scales_have_less_error_than_the_largest_magnitude() -> None:
    weight = heavy_tailed(32, 256)
    spanning = (weight.view(32, 4, 64).abs().amax(-1) / 1.0).to(BF16)
    steps = spanning.float().repeat_interleave(64, 1)
    plain = Codebook(NF4_VALUES).nearest(weight / steps) * steps
    assert torch.equal(Nf4().round_in_range(weight), plain)
    found = Nf4().round(weight)
    errors = [(values - weight).square().view(-1, 64).sum(1) for values in (found.dequantize(), plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert errors[0].sum() < 0.97 * errors[1].sum()


def test_zeros_and_extremes_stay_finite() -> None:
    weight = heavy_tailed(32, 128)
    weight[:, :64] = 0
    weight[0] *= 1e6
    weight[1] *= 1e-6
    rounded = Nf4().round(weight)
    assert torch.isfinite(rounded.dequantize()).all()
    assert (rounded.dequantize()[:, :64] == 0).all()
    assert list(rounded.problems(M)) == []


def test_the_container_keeps_it(tmp_path) -> None:
    scheme, weight = Nf4(), random_weight((64, 128), Nf4())
    tensors = COMPRESS_RUNTIME.encode(M, weight, BF16)
    assert sum(tensor.nbytes * 8 for tensor in tensors.values()) == scheme.stored_bits(64, 128) == 64 * 128 * 4.25
    save_file(tensors, tmp_path / "model.safetensors")
    block = COMPRESS_RUNTIME.quantization_config({M: scheme}, [])
    config = {"model_type": "of_nobody", "dtype": "bfloat16", "quantization_config": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed = PackedCheckpoint.open(tmp_path)
    assert packed.schemes == {M: scheme}
    assert packed.shape(M) == (64, 128)
    assert digest(packed.packed_weight(M)) == digest(weight)
    assert verify_structure(tmp_path).problems == ()
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    save_file(tensors | {f"{M}.weight_packed": torch.zeros(64, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{M} should hold"):
        PackedCheckpoint.open(tmp_path).packed_weight(M)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SchemeError, match="nf4 layout"):
        COMPRESSED_TENSORS.check(Nf4(), (64, 128))
    with pytest.raises(SchemeError, match="groups of 64 do not divide 96"):
        Nf4().check((64, 96))
    with pytest.raises(SchemeError, match=r"scales \(64, 1\) must be \(64, 2\)"):
        CodedWeight(torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 1), Nf4())


@pytest.mark.parametrize("method", ["rtn", pytest.param("gptq", marks=pytest.mark.full)])
def test_methods_take_it(method: str, tiny_model, tmp_path) -> None:
    source = tiny_model(hidden_size=64, intermediate_size=128)
    result = compress(source, tmp_path / "packed", QuantizeStage(method, Nf4()))
    assert result.structure.ok
    checkpoint = PackedCheckpoint.open(tmp_path / "packed")
    assert checkpoint.format == "compress-runtime"
    assert set(checkpoint.schemes.values()) == {Nf4()}
