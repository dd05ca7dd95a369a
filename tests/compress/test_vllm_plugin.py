"""vLLM loads checkpoints in our own format by the plugin: its parameters are the dequantized weights, bit for bit.

vLLM is not a requirement of the tests, as it is larger than all of those: to run them, `pip install vllm` as well.
"""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from folders import change_tensors
from runs import compress
from safetensors import safe_open
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, NMSparsity
from compress.common.cli import demo_model_path
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

LOADING = Path(__file__).parents[1] / "support" / "vllm_loading.py"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
STAGES = {
    "2:4 and int4": (PruneStage("magnitude", pattern=NMSparsity(2, 4)), QuantizeStage("rtn", Int(4, 32))),
    "low rank, one dense beside packed ones": (
        FactorizeStage("svd", keep=0.5, targets=("*.mlp.*",)),
        QuantizeStage("rtn", Int(4, 32, symmetric=False), ignore=("*.0.self_attn.v_proj",)),
    ),
    "columns in 16 bits": (QuantizeStage("rtn", Int(3, 32), outlier_columns=4),),
}
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def test_vllm_finds_the_plugin() -> None:
    found = [each.value for each in entry_points(group="vllm.general_plugins") if each.name == "compress_runtime"]
    assert found == ["compress.vllm_plugin:register"]


def load(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LOADING), str(folder), str(out)]
    environment = os.environ | {"VLLM_PLUGINS": "compress_runtime", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def expected(packed: PackedCheckpoint, parameter: str) -> Tensor:
    module = parameter.removesuffix(".weight")
    parent, _, name = module.rpartition(".")
    parts = [f"{parent}.{part}" for part in FUSED[name]] if name in FUSED else [module]
    return torch.cat(
        [
            packed.values(part, packed.dtype) if part in packed.schemes else packed.tensor(f"{part}.weight")
            for part in parts
        ]
    )


@needs_vllm
@pytest.mark.full
@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_parameters_are_the_dequantized_weights(stages: tuple, tmp_path: Path) -> None:
    packed = PackedCheckpoint.open(compress(demo_model_path(), tmp_path / "packed", *stages).out)
    assert packed.format == "compress-runtime"
    result = load(packed.path, tmp_path / "parameters")
    assert result.returncode == 0, result.stderr
    with safe_open(tmp_path / "parameters", "pt") as parameters:
        assert parameters.metadata() == {"quantization": "compress-runtime"}
        linears = [name for name in parameters.keys() if "_proj" in name]  # noqa: SIM118
        assert len(linears) == 4 * packed.config["num_hidden_layers"]
        for name in parameters.keys():  # noqa: SIM118
            values = expected(packed, name)
            assert torch.equal(parameters.get_tensor(name)[: len(values)], values), name


@needs_vllm
@pytest.mark.full
def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    stages = (QuantizeStage("rtn", Int(3, 32), outlier_columns=4),)
    folder = compress(demo_model_path(), tmp_path / "packed", *stages).out
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.down_proj.weight_scale"))
    result = load(folder, tmp_path / "parameters")
    assert result.returncode != 0
    assert ".weight_scale is not stored beside" in result.stderr
