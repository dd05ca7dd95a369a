"""Models whose modeling code the pipeline does not know: compressed, or refused in one line before the work."""

import shutil
from pathlib import Path

import pytest
import runs
import torch
from folders import change_tensors, private_copy
from safetensors.torch import load_file
from tiny_wrappers import save_tiny_wrapper
from transformers import AutoConfig, AutoModelForCausalLM

from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.recipe import CalibrationOptions
from compress.stages.quantize import QuantizeStage

SIZES = {"vocab_size": 8192, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
FEW = CalibrationOptions(samples=2, length=16)


def save_model(folder: Path, model_type: str, **options: object) -> Path:
    """A random model with the tokenizer of the demo model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | options)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return folder


def test_blocks_that_need_more_than_hidden_states_are_refused_by_methods_with_calibration(tmp_path: Path) -> None:
    """A block of RWKV returns its state, which its model passes to the next one."""
    model = save_model(tmp_path / "model", "rwkv", attention_hidden_size=32)
    with pytest.raises(CheckpointError) as refused:
        runs.compress(model, tmp_path / "gptq", QuantizeStage("gptq", Int(4, 16)), calibration=FEW)
    assert "--method rtn" in refused.value.remedy
    runs.compress(model, tmp_path / "rtn", QuantizeStage("rtn", Int(4, 16)))
    assert verify_structure(tmp_path / "rtn").ok


def test_a_configuration_class_without_tied_embeddings(tmp_path: Path) -> None:
    """Inkling's has no `tie_word_embeddings`; its experts are stored in one tensor."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = save_model(tmp_path / "model", "inkling_text", **sizes, **experts)
    with pytest.raises(CheckpointError, match="experts"):
        runs.prepared(model, tmp_path / "out", QuantizeStage("rtn", Int(4, 16)))


def test_hidden_states_in_another_order_are_refused_by_methods_with_calibration(tmp_path: Path) -> None:
    """Those of XLNet are `[tokens, sequences, channels]`."""
    model = save_model(tmp_path / "model", "xlnet", d_model=32, n_layer=2, n_head=4, d_inner=48)
    with pytest.raises(CheckpointError) as refused:
        runs.compress(model, tmp_path / "gptq", QuantizeStage("gptq", Int(4, 16)), calibration=FEW)
    assert "--method rtn" in refused.value.remedy


def test_names_of_parts_of_packed_weights_are_refused_before_the_work(tmp_path: Path) -> None:
    """A packed folder whose config.json lost its quantization_config."""
    model = private_copy(demo_model_path(), tmp_path / "model")
    change_tensors(model, lambda tensors: tensors.update({"model.layers.1.mlp.other.weight_scale": torch.ones(8)}))
    with pytest.raises(CheckpointError, match="weight_scale"):
        runs.prepared(model, tmp_path / "out", QuantizeStage("rtn", Int(4, 32)))


def test_infinite_masks_that_are_only_copied(tmp_path: Path) -> None:
    model, mask = save_tiny_wrapper(tmp_path / "model", "gemma3"), torch.full((4, 4), float("-inf"))
    change_tensors(model, lambda tensors: tensors.update({"model.vision_tower.mask": mask}))
    runs.compress(model, tmp_path / "out", QuantizeStage("rtn", Int(4, 16)))
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["model.vision_tower.mask"], mask)
    assert verify_structure(tmp_path / "out").ok
