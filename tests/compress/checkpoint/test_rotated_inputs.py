"""Integers of rotated weights: the function of the weight, its tensors, its parts, and what is refused."""

from pathlib import Path

import pytest
import torch
from tiny_models import load_reference, pack_model, put_checkpoint, reference_logits, save_tiny_model
from typer.testing import CliRunner

from compress.checkpoint.config import read_config
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights import NM, Activations, Fp8, Int, LowRank, NMSparsity, OutlierColumns, RotatedInputs
from compress.checkpoint.weights.base import StoredTensors, digest
from compress.checkpoint.weights.rotated_inputs import RotatedWeight, hadamard_matrix, rotate
from compress.checkpoint.writer import export_checkpoint
from compress.cli import make_app
from compress.common.errors import CheckpointError, SchemeError
from runtime.model.loader import load_model
from runtime.model.scoring import score

MODULE = "model.layers.0.mlp.down_proj"
TOKENS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(2))
SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 32}
FORMS = [RotatedInputs(Int(4, 32), 64), RotatedInputs(Int(3, 64, symmetric=False), 32), RotatedInputs(Int(8, None), 16)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def packed(folder: Path, scheme: Int) -> Path:
    """A model of these integers, with rotated inputs in front of each `down_proj`."""
    dense = save_tiny_model(folder.with_name(f"{folder.name}-dense"), **SIZES)
    rotated = RotatedInputs.for_inputs(scheme, 192)
    pack_model(dense, folder, lambda module: rotated if "down" in module else scheme, "compress-runtime")
    return folder


@pytest.mark.parametrize("order", [2, 32, 128])
def test_both_rotations_together_change_nothing(order: int) -> None:
    weight, x = random(48, 256, dtype=torch.float64), random(5, 256, dtype=torch.float64)
    found = rotate(x, order) @ rotate(weight, order).T
    assert torch.allclose(found, x @ weight.T, rtol=0, atol=1e-12)
    matrix = torch.block_diag(*[hadamard_matrix(order, torch.float64) / order**0.5] * (256 // order))
    assert torch.allclose(rotate(x, order), x @ matrix, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", FORMS, ids=str)
def test_values_are_those_of_the_rotated_codes(scheme: RotatedInputs) -> None:
    weight = scheme.round(random(48, 192))
    found, codes = weight.dequantize(torch.float64), weight.codes.dequantize(torch.float64)
    assert torch.allclose(rotate(found, scheme.hadamard), codes, rtol=0, atol=1e-12)
    assert float((found - random(48, 192)).square().mean()) < (0.1 if scheme.bits == 3 else 0.02)
    spanned = scheme.round_in_range(random(48, 192))
    assert float((spanned - random(48, 192)).square().mean()) < 0.2


@pytest.mark.parametrize("scheme", FORMS, ids=str)
def test_tensors_come_back(scheme: RotatedInputs) -> None:
    weight = scheme.round(random(48, 192))
    tensors = COMPRESS_RUNTIME.encode(MODULE, weight, torch.bfloat16)

    def get(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"no {name}")
        return tensors[name]

    again = scheme.read(StoredTensors(MODULE, get))
    assert digest(again) == digest(weight) != digest(weight.codes)
    assert Scheme.from_dict(scheme.to_dict()) == scheme
    assert scheme.stored_bits(48, 192) == scheme.inner.stored_bits(48, 192)


def test_parts_keep_their_matrices_whole() -> None:
    scheme = RotatedInputs(Int(4, 32), 128)
    weight = scheme.round(random(40, 512))
    values = weight.dequantize(torch.float64)
    assert scheme.column_multiple == 128
    for columns in (slice(0, 128), slice(128, 512)):
        assert torch.equal(weight.some_columns(columns).dequantize(torch.float64), values[:, columns])
    assert torch.equal(weight.some_rows((slice(3, 9),)).dequantize(torch.float64), values[3:9])
    with pytest.raises(SchemeError, match="128 do not divide 64"):
        weight.some_columns(slice(0, 64))


@pytest.mark.parametrize(
    ("inner", "order", "reason"),
    [
        (Int(4), 96, "96 is not a power of two"),
        (Int(4), 256, "256 is not a power of two from 2 to 128"),
        (Int(4), 1, "power of two"),
        (Fp8(), 64, "cannot be combined with rotated inputs"),
        (None, 64, "16-bit values cannot be combined"),
        (OutlierColumns(Int(4), 2), 64, "cannot be combined"),
    ],
)
def test_other_forms_and_orders_are_refused(inner: Scheme | None, order: int, reason: str) -> None:
    with pytest.raises(SchemeError, match=reason):
        RotatedInputs.of(inner, order)


def test_no_form_wraps_rotated_inputs() -> None:
    rotated = RotatedInputs(Int(4), 64)
    for form, entry in ((NM, NMSparsity()), (LowRank, 8), (OutlierColumns, 2)):
        with pytest.raises(SchemeError, match="cannot be combined"):
            form.of(rotated, entry)
    with pytest.raises(SchemeError, match="rotated inputs"):
        rotated.wrap(random(8, 64))
    with pytest.raises(SchemeError, match="do not divide 96"):
        rotated.check((8, 96))


def test_formats_without_a_word_for_it_refuse() -> None:
    with pytest.raises(SchemeError, match="gptq cannot hold the rotation of inputs"):
        GPTQ.check(RotatedInputs(Int(4, 64), 64), (64, 192))
    with pytest.raises(SchemeError, match="compressed-tensors cannot hold"):
        COMPRESSED_TENSORS.check(OutlierColumns(Int(4, 64), 2), (64, 192))


@pytest.mark.parametrize("scheme", [Int(4, 64), Int(4, 32, activations=Activations.INT8)], ids=str)
def test_exports_compute_the_same(scheme: Int, tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", scheme)
    export_checkpoint(source, "compressed-tensors", tmp_path / "other")
    described = read_config(tmp_path / "other")["quantization_config"]
    assert described["config_groups"].keys() == {"group_0"}
    assert described["transform_config"]["config_groups"]["hadamard64"]["apply"][0]["targets"] == [r"re:.*\bdown_proj$"]
    own, other = PackedCheckpoint.open(source), PackedCheckpoint.open(tmp_path / "other")
    assert other.schemes == own.schemes
    assert digest(other.packed_weight(MODULE)) == digest(own.packed_weight(MODULE))
    export_checkpoint(tmp_path / "other", "compress-runtime", tmp_path / "again")
    assert digest(PackedCheckpoint.open(tmp_path / "again").packed_weight(MODULE)) == digest(own.packed_weight(MODULE))
    expected = score(load_model(source, dtype="float64", kernels="stored"), TOKENS)
    assert torch.equal(score(load_model(tmp_path / "other", dtype="float64", kernels="stored"), TOKENS), expected)


def test_the_model_is_that_of_its_values(tmp_path: Path) -> None:
    source = packed(tmp_path / "packed", Int(4, 64))
    values = load_model(source, dtype="float64", as_dense=True)
    found = score(load_model(source, dtype="float64"), TOKENS)
    # The dense view rounds its values to bfloat16.
    assert torch.allclose(score(values, TOKENS), found, rtol=0, atol=0.05)
    assert isinstance(PackedCheckpoint.open(source).weight(MODULE), RotatedWeight)
    model = put_checkpoint(load_reference(tmp_path / "packed-dense"), PackedCheckpoint.open(source))
    assert torch.allclose(reference_logits(model, TOKENS), found, rtol=0, atol=1e-9)


def test_compressed_tensors_computes_the_same(tmp_path: Path) -> None:
    transform = pytest.importorskip("compressed_tensors.transform")
    from transformers import AutoModelForCausalLM

    source = packed(tmp_path / "packed", Int(4, 64))
    arguments = ["export", str(source), "--format", "compressed-tensors", "--out", str(tmp_path / "other")]
    assert "call apply_transform_config" in CliRunner().invoke(make_app(), arguments).output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.float32)
    config = read_config(tmp_path / "other")["quantization_config"]["transform_config"]
    for group in config["config_groups"].values():
        group["apply"] = group["apply"][:1]  # the stored weights have the other one
    transform.apply_transform_config(model, transform.TransformConfig.model_validate(config))
    with torch.no_grad():
        found = model(TOKENS).logits
    expected = score(load_model(tmp_path / "packed", dtype="float32"), TOKENS)
    assert torch.allclose(found, expected, rtol=0, atol=1e-3)
