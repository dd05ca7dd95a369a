"""Models whose files have other names than transformers are packed under the names of the files."""

from pathlib import Path

import pytest
import torch
from runs import compress
from tiny_models import auto_class

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError
from compress.recipe import QuantizeStage

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
