"""Compression on a device that is not the host: everything a block needs moves there, and nothing else does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from second_device import SECOND, SecondDevice

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Activations, Int, NMSparsity
from compress.checkpoint.weights.sparse_nm import SparseWeight
from compress.common.workers import Workers
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

SEQUENCES, LENGTH = 6, 32
STAGES = {
    "gptq": [QuantizeStage("gptq", Int(4, 64))],
    "awq": [QuantizeStage("awq", Int(4, 64))],
    "gptaq": [QuantizeStage("gptaq", Int(3, 64))],
    "hqq": [QuantizeStage("hqq", Int(4, 64))],
    "smoothquant": [QuantizeStage("smoothquant", Int(8, None, True, Activations.INT8))],
    "sparsegpt": [PruneStage("sparsegpt", NMSparsity(2, 4)), QuantizeStage("gptq", Int(4, 64))],
}


def compress(source: Path, out: Path, name: str, device: torch.device):
    recipe = Recipe(tuple(STAGES[name]), CalibrationOptions(samples=SEQUENCES, length=LENGTH))
    request = RunRequest(source, str(source), recipe, out, measure=False, dtype="float32", micro_batch=2)
    prepared = replace(prepare(request), workers=Workers([device]))
    return run(prepared, quiet=True)


def first_codes(folder: Path) -> torch.Tensor:
    """Tolerance in the first block: differences in the last bits grow in later blocks."""
    packed = PackedCheckpoint.open(folder)
    first = [module for module in packed.modules if module.startswith("model.layers.0.")]
    weights = [packed.weight(module) for module in first]
    integers = [weight.values if isinstance(weight, SparseWeight) else weight for weight in weights]
    return torch.cat([weight.qweight.flatten() for weight in integers])


@pytest.mark.parametrize(
    "name", ["gptq", *(pytest.param(name, marks=pytest.mark.slow) for name in STAGES if name != "gptq")]
)
def test_a_run_elsewhere_gives_what_one_on_the_host_gives(tiny_model, tmp_path: Path, name: str) -> None:
    source = tiny_model(num_hidden_layers=2)
    compress(source, tmp_path / "host", name, torch.device("cpu"))
    with SecondDevice() as device:
        compress(source, tmp_path / "second", name, SECOND)
    # The loop over columns adds in another order than compiled code, so codes on the verge of two may differ.
    assert (first_codes(tmp_path / "host") != first_codes(tmp_path / "second")).float().mean() < 0.02
    assert device.arrivals


def test_tensors_of_two_devices_are_refused() -> None:
    with SecondDevice() as device:
        there = torch.ones(3).to(SECOND)
        assert torch.equal((there + 1).cpu(), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match=r"add.*\(3,\).*\(3,\)"):
            there + torch.ones(3)
    assert device.arrivals == [3]


def test_calibration_stays_on_the_host_but_for_a_micro_batch(tiny_model, tmp_path: Path) -> None:
    with SecondDevice() as device:
        compress(tiny_model(num_hidden_layers=1), tmp_path / "out", "gptq", SECOND)
    hidden, vocabulary = 128, 8192
    assert max(device.arrivals) == vocabulary * hidden
    assert 2 * LENGTH * hidden in device.arrivals
    assert SEQUENCES * LENGTH * hidden not in device.arrivals
