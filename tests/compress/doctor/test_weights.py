"""Damaged weights: dead and far scales, saturated and constant codes, digests, layers that stand out, other models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from folders import change_tensors, private_copy
from torch import Tensor

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.doctor.checks.neighbours import standing_out
from compress.doctor.codes import expected_saturation
from compress.doctor.examine import examine

pytestmark = pytest.mark.full

Find = Callable[..., set[tuple[str, str]]]
MODULE = "model.layers.2.mlp.up_proj"
SCALE, CODES = f"{MODULE}.weight_scale", f"{MODULE}.weight_packed"


def change(folder: Path, name: str, edit: Callable[[Tensor], object]) -> Path:
    """Edits one tensor in place."""
    return change_tensors(folder, lambda tensors: edit(tensors[name]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(packed: Path, kinds: Find, value: float) -> None:
    change(packed, SCALE, lambda scale: scale[3, :2].fill_(value))
    assert kinds(packed) == {("error", "dead-scales"), ("error", "non-finite")}


def test_scales_of_zero(packed: Path, kinds: Find) -> None:
    change(packed, SCALE, lambda scale: scale[3].zero_())
    assert kinds(packed) == {("error", "dead-scales")}


def test_all_scales_of_zero(packed: Path, kinds: Find) -> None:
    change(packed, SCALE, Tensor.zero_)
    assert kinds(packed) == {("error", "dead-scales")}


def test_denormal_scales(packed: Path, kinds: Find) -> None:
    change(packed, SCALE, lambda scale: scale[:8].fill_(1e-39))
    assert kinds(packed) == {("warning", "denormal-scales")}


def test_a_scale_far_from_the_others(packed: Path, kinds: Find) -> None:
    change(packed, SCALE, lambda scale: scale[3, 0].fill_(1e4))
    assert kinds(packed) == {("warning", "far-scales"), ("warning", "standing-out")}


def test_saturated_codes(packed: Path, kinds: Find) -> None:
    # Codes 15 and 0 in turn.
    change(packed, CODES, lambda words: words.fill_(0x0F0F0F0F))
    assert kinds(packed) == {("warning", "saturated-codes")}


def test_groups_of_one_code(packed: Path, kinds: Find) -> None:
    change(packed, CODES, lambda words: words[:100].fill_(0x33333333))
    assert kinds(packed) == {("warning", "constant-groups")}


def test_groups_of_zeros_are_no_finding(packed: Path, kinds: Find) -> None:
    change(packed, CODES, lambda words: words[:100].fill_(-0x77777778))
    assert kinds(packed) == set()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_expected_saturation_holds_for_normal_and_uniform_weights(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for weight in (torch.randn(64, 256, generator=generator), torch.rand(64, 256, generator=generator) - 0.5):
        rounded = Int(bits, 64).round(weight)
        assert 0 < expected_saturation(rounded) < 1


def test_codes_with_another_digest(packed_demo: Path, tmp_path: Path, kinds: Find) -> None:
    folder = private_copy(packed_demo, tmp_path / "packed")
    change(folder, CODES, lambda words: words[5, 0].bitwise_xor_(1))
    assert kinds(folder) == {("error", "digest")}


def test_nan_in_a_dense_tensor(dense: Path) -> None:
    change(dense, "model.layers.4.input_layernorm.weight", lambda norm: norm[7].fill_(float("nan")))
    (found,) = examine(dense).findings
    assert (found.severity, found.kind, found.where) == ("error", "non-finite", "model.layers.4.input_layernorm.weight")


def test_a_matrix_of_zeros(dense: Path, kinds: Find) -> None:
    change(dense, f"{MODULE}.weight", Tensor.zero_)
    assert kinds(dense) == {("warning", "zeros")}


@pytest.mark.parametrize("factor", [16.0, 1 / 16])
def test_a_layer_that_stands_out(dense: Path, factor: float) -> None:
    change(dense, f"{MODULE}.weight", lambda weight: weight.mul_(factor))
    (found,) = examine(dense).findings
    assert (found.kind, found.where) == ("standing-out", f"{MODULE}.weight")


def test_growth_over_depth_does_not_stand_out() -> None:
    sizes = [(f"layers.{at}", 1.4**at) for at in range(30)]
    assert standing_out(sizes) == []
    sizes[12] = ("layers.12", 100 * sizes[12][1])
    assert [name for (name, _), _ in standing_out(sizes)] == ["layers.12"]


def test_the_source_shows_a_shuffled_layer(packed: Path) -> None:
    change(packed, CODES, lambda words: words.copy_(words.flip(0)))
    assert not examine(packed).findings
    found = examine(packed, against=demo_model_path()).findings
    assert [(each.kind, each.where) for each in found] == [("large-error", MODULE)]


def test_another_model_as_the_source(packed: Path, tmp_path: Path, kinds: Find) -> None:
    other = private_copy(demo_model_path(), tmp_path / "other")
    generator = torch.Generator().manual_seed(0)

    def replace(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.float().std())

    change_tensors(other, replace)
    assert ("warning", "unrelated") in kinds(packed, against=other)
