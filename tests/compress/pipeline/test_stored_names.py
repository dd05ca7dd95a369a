"""Models whose files have other names than transformers are packed under the names of the files."""

import shutil
from pathlib import Path

import pytest
import torch
from folders import change_tensors
from runs import compress
from tiny_models import auto_class

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError
from compress.evaluate.scorers import load_dequantized
from compress.stages.quantize import QuantizeStage

LEFT_OUT = "model.layers.3.mixer.up_proj"


@pytest.mark.full
def test_files_keep_their_names_and_transformers_finds_what_was_left_out(tiny_model, tmp_path: Path) -> None:
    source, out = tiny_model("nemotron_h", torch.float32), tmp_path / "out"
    assert compress(source, out, QuantizeStage("rtn", Int(4, 16), ignore=(LEFT_OUT,))).structure.ok
    packed = PackedCheckpoint.open(out)
    assert LEFT_OUT not in packed.schemes
    assert "model.layers.3.mixer.down_proj" in packed.schemes
    stored = {name.partition(".weight_")[0] for name in TensorFiles.open(out).names()}
    dense = {name.removesuffix(".weight") for name in TensorFiles.open(source).names()}
    assert {name.removesuffix(".weight") for name in stored} == dense
    options = {"dtype": torch.float32, "experts_implementation": "eager", "output_loading_info": True}
    model, loading = auto_class("nemotron_h").from_pretrained(out, **options)
    assert not loading["missing_keys"]
    assert torch.equal(model.get_submodule(LEFT_OUT).weight, packed.tensor(f"{LEFT_OUT}.weight"))
    with pytest.raises(CheckpointError, match="compressed-tensors"):
        export_checkpoint(out, "gptq", tmp_path / "gptq")


@pytest.mark.full
def test_multi_token_prediction_is_carried_along(tiny_model, tmp_path: Path) -> None:
    ahead = "mtp.layers.0.norm.weight"
    source = Path(shutil.copytree(tiny_model("nemotron_h", torch.float32), tmp_path / "source"))
    change_tensors(source, lambda tensors: tensors.update({ahead: torch.full((64,), 2.0)}))
    result = compress(source, tmp_path / "out", QuantizeStage("rtn", Int(4, 16)))
    assert result.structure.ok
    assert any("multi-token prediction" in note for note in result.report["plan"]["notes"])
    assert torch.equal(TensorFiles.open(tmp_path / "out").tensor(ahead), torch.full((64,), 2.0))
    assert load_dequantized(tmp_path / "out", dtype="float32").config.model_type == "nemotron_h"
