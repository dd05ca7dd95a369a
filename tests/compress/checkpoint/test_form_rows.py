"""Forms of codes under scales that this file alone adds, as one row each, go all the way: rounded, packed, verified,
exported densely and served by the kernel of their kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import compress, foreseen_bytes
from safetensors.torch import load_file
from tiny_models import random_weight

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import FORMS, register, targets
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Nf4, Scheme
from compress.checkpoint.weights.base import StoredTensors, digest
from compress.checkpoint.weights.coded import INT, Coded, Scales
from compress.checkpoint.weights.forms import FRACTIONS
from compress.checkpoint.weights.layouts import PackedCodes
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import SchemeError
from compress.cpu.binding import absence, library
from compress.evaluate.scorers import open_scorer
from compress.pipeline.finish import compare_with_report
from compress.stages.quantize import QuantizeStage
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.model.loader import load_model

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 48,
}


class Cubes(PackedCodes):
    """5-bit codes of cubic numbers with 16-bit scales of 48 columns."""

    word = "cubes"
    bits = 5
    code_values = tuple((code / 16 - 1) ** 3 for code in range(32))
    group_size = 48
    scales = Scales("", "any scales", FRACTIONS)


class Fives(PackedCodes):
    """5-bit integers around the midpoint, with 16-bit scales of 32 columns."""

    word = "fives"
    bits = 5
    numbers = INT
    group_size = 32
    scales = Scales("", "integers")


ROWS: dict[type[Coded], str] = {Cubes: "cpu_table", Fives: "cpu"}
"""Kernels that serve them on CPUs."""


@pytest.fixture(params=ROWS)
def form(request) -> type[Coded]:
    return request.param


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for form in ROWS:
        register(form.word)(form)
    yield
    for form in ROWS:
        FORMS.pop(form.word)


@pytest.fixture
def packed(tiny_model, tmp_path, form) -> Path:
    return compress(tiny_model("llama", **SIZES), tmp_path / "packed", QuantizeStage("rtn", form())).out


def test_it_is_written_verified_and_read(packed, form) -> None:
    assert verify_structure(packed).ok
    assert compare_with_report(packed) == []
    checkpoint = PackedCheckpoint.open(packed)
    assert checkpoint.modules
    assert set(checkpoint.schemes.values()) == {form()}
    for module in checkpoint.modules:
        weight = checkpoint.packed_weight(module)
        rows, columns = weight.shape
        assert checkpoint.files.shape(f"{module}.weight_packed") == (rows, columns * 5 // 8)
        assert 8 * checkpoint.weight_bytes(module) == weight.scheme.stored_bits(rows, columns)
        assert weight.nbytes == weight.scheme.unpacked_bytes(rows, columns)


def test_every_code_survives_packing(form) -> None:
    weight = random_weight((20, 96), form())
    stored = weight.tensors(torch.bfloat16)
    again = form().read(StoredTensors("", stored.__getitem__))
    assert len(weight.qweight.unique()) == 32
    assert torch.equal(again.qweight, weight.qweight)
    assert digest(again) == digest(weight)
    fused = weight.fuse([again])
    assert torch.equal(fused.dequantize(), weight.dequantize().repeat(2, 1))


@pytest.mark.skipif(library() is None, reason=absence())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_its_kind_multiplies_it(dtype, form) -> None:
    weight, target = random_weight((70, 192), form()), Target(torch.device("cpu"), dtype)
    kernel = choose_linear(form(), 192, target).kernel
    assert kernel.name == ROWS[form]
    linear = kernel.prepare(weight, None, target)
    assert linear.nbytes == kernel.nbytes(form(), 70, 192, target)
    assert torch.equal(linear(torch.eye(192, dtype=dtype)).T, weight.dequantize(dtype))
    assert torch.equal(linear.rows(torch.tensor([69, 3]), dtype), weight.dequantize(dtype)[[69, 3]])
    x = torch.randn(9, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(kernel.layout.restore(linear.prepared(), None)(x), linear(x))


def test_its_dense_export_has_its_values(packed, tmp_path) -> None:
    checkpoint, dense = PackedCheckpoint.open(packed), export_checkpoint(packed, "dense", tmp_path / "dense")
    values = load_file(dense / "model.safetensors")
    for module in checkpoint.modules:
        stored = values[f"{module}.weight"]
        assert torch.equal(stored, checkpoint.packed_weight(module).dequantize(stored.dtype))


def test_it_is_served_packed(packed, form) -> None:
    decoder = load_model(packed, device="cpu", dtype="float32")
    kernel = "dequantized" if library() is None else ROWS[form]
    lines = [line for line in decoder.description if f": {form()}, kernel " in line]
    assert lines
    assert all(f"kernel {kernel} " in line for line in lines)
    assert decoder.nbytes == foreseen_bytes(packed, torch.float32)
    tokens = torch.randint(10, 4000, (1, 24), generator=torch.Generator().manual_seed(0))
    reference = open_scorer(packed, dtype="float32", kernels="reference").logits(tokens)
    found = open_scorer(packed, dtype="float32").logits(tokens)
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)


def test_other_formats_refuse_it(packed, tmp_path) -> None:
    for format in ("compressed-tensors", "gptq", "awq"):
        with pytest.raises(SchemeError, match="--format dense"):
            export_checkpoint(packed, format, tmp_path / format)


def test_options_and_descriptions_know_its_word() -> None:
    assert QuantizeStage.build({"weights": "cubes", "method": "rtn"}) == QuantizeStage("rtn", Cubes())
    assert Scheme.from_dict(Cubes().to_dict()) == Cubes()
    with pytest.raises(SchemeError, match="group_size=32"):
        Scheme.from_dict({**Cubes().to_dict(), "group_size": 32})


def test_a_row_taken_out_and_put_back_is_all_that_changes() -> None:
    before = list(targets())
    form = FORMS.pop("nf4")
    assert set(before) - set(targets()) == {"nf4"}
    with pytest.raises(TypeError):
        Scheme.from_dict(Nf4().to_dict())
    register("nf4")(form)
    assert set(targets()) == set(before)
    assert Scheme.from_dict(Nf4().to_dict()) == Nf4()
