"""Weights against their source: no method is accused, smoothed or not, and damage is found in both."""

from collections.abc import Callable
from pathlib import Path

import pytest
import runs
import torch
from folders import change_tensors, private_copy
from shared_store import SharedStore
from torch import Tensor

from compress.checkpoint.config import read_config
from compress.checkpoint.weights import Int
from compress.common.cli import bundled_path, demo_model_path
from compress.doctor.examine import examine
from compress.methods.base import METHODS
from compress.models.architecture import smoothing_mappings
from compress.models.families.llama import llama
from compress.recipe import CalibrationOptions
from compress.stages.base import STAGES
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

LAYER = "model.layers.2."
UP, VALUE, KEY, DOWN = (
    f"{LAYER}{name}" for name in ("mlp.up_proj", "self_attn.v_proj", "self_attn.k_proj", "mlp.down_proj")
)
Damage = Callable[[Tensor], object]


@pytest.fixture
def smoothed(dense: Path) -> Path:
    """The demo model with scales of up to 64 folded in at every place, which powers of two leave the same function."""
    generator = torch.Generator().manual_seed(0)

    def fold(tensors: dict[str, Tensor]) -> None:
        spec = llama(read_config(dense))
        for index, block in enumerate(spec.blocks):
            for mapping in smoothing_mappings(block):
                before = tensors[f"model.layers.{index}.{mapping.smooth_layer}.weight"]
                scale = 2.0 ** torch.randint(-6, 7, before.shape[:1], generator=generator)
                before.copy_(before.float() / scale.view(-1, *[1] * (before.dim() - 1)))
                heads = scale.view(-1, block.mixer.head_dim) if mapping.smooth_layer.endswith("v_proj") else scale
                for name in mapping.balance_layers:
                    weight = tensors[f"model.layers.{index}.{name}.weight"]
                    shared = weight.shape[1] // scale.numel()
                    weight.mul_(heads.repeat_interleave(shared, 0).flatten() if shared > 1 else scale)

    return change_tensors(dense, fold)


def found(folder: Path) -> list[tuple[str, str, str]]:
    findings = examine(folder, against=demo_model_path()).findings
    return [(str(each.severity), each.kind, each.where) for each in findings if each.check == "against"]


def test_folded_scales_are_no_error(smoothed: Path) -> None:
    assert found(smoothed) == []


def test_folded_scales_of_a_packed_model_are_no_error(smoothed: Path, tmp_path: Path) -> None:
    runs.compress(smoothed, tmp_path / "packed", QuantizeStage("rtn", Int(4, 32)))
    assert found(tmp_path / "packed") == []


DAMAGES: dict[str, tuple[str, Damage]] = {
    "shuffled rows": (UP, lambda weight: weight.copy_(weight.flip(0))),
    "shuffled columns": (DOWN, lambda weight: weight.copy_(weight.flip(1))),
    "a quarter of zeros": (VALUE, lambda weight: weight[:32].zero_()),
    "rows too large": (UP, lambda weight: weight[100:200].mul_(1.5)),
    "heads too large": (VALUE, lambda weight: weight.mul_(2)),
    "too large": (KEY, lambda weight: weight.mul_(1.25)),
    "not a number": (DOWN, lambda weight: weight[3, 4].fill_(float("nan"))),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("start", ["dense", "smoothed"])
def test_a_damaged_layer_is_found(request: pytest.FixtureRequest, start: str, name: str) -> None:
    module, damage = DAMAGES[name]
    folder = change_tensors(request.getfixturevalue(start), lambda tensors: damage(tensors[f"{module}.weight"]))
    assert found(folder) == [("error", "large-error", module)]


@pytest.mark.parametrize("start", ["dense", "smoothed"])
def test_a_damaged_norm_shows_in_its_readers(request: pytest.FixtureRequest, start: str) -> None:
    folder = change_tensors(
        request.getfixturevalue(start), lambda tensors: tensors[f"{LAYER}post_attention_layernorm.weight"].mul_(2)
    )
    assert {where for _, _, where in found(folder)} == {UP, f"{LAYER}mlp.gate_proj"}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "method"), [(kind, name) for kind, known in METHODS.items() for name in known])
def test_methods_with_their_defaults_are_not_accused(tmp_path: Path, kind: str, method: str) -> None:
    stage = STAGES.find(kind).build({"method": method})
    runs.compress(demo_model_path(), tmp_path / "packed", stage, calibration=CalibrationOptions())
    assert found(tmp_path / "packed") == []


@pytest.mark.full
@pytest.mark.parametrize("module", [UP, VALUE, KEY, DOWN])
def test_damaged_layers_of_a_smoothed_model_are_found(shared_store: SharedStore, tmp_path: Path, module: str) -> None:
    def write(out: Path) -> None:
        runs.compress(demo_model_path(), out, QuantizeStage.build({}), calibration=CalibrationOptions())

    packed = shared_store.folder("packed", "doctor-awq", write)
    for part, damage in {
        "weight_packed": lambda words: words.copy_(words.flip(0)),
        "weight_scale": Tensor.neg_,
    }.items():
        folder = private_copy(packed, tmp_path / part)
        change_tensors(folder, lambda tensors, name=f"{module}.{part}", edit=damage: edit(tensors[name]))
        assert found(folder) == [("error", "large-error", module)]


@pytest.mark.full
def test_a_smoothed_mixture_is_not_accused(tmp_path: Path) -> None:
    source = bundled_path("demo-mixture")
    runs.compress(source, tmp_path / "packed", QuantizeStage("awq", Int(4, 32)), calibration=CalibrationOptions())
    assert not examine(tmp_path / "packed", against=source).findings


@pytest.mark.full
def test_a_rotated_model_is_named_once(tmp_path: Path) -> None:
    runs.compress(demo_model_path(), tmp_path / "packed", RotateStage(), QuantizeStage("rtn", Int(4, 32)))
    assert found(tmp_path / "packed") == [("warning", "unrelated", "packed")]
