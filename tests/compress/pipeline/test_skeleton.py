"""The skeleton: parameters without memory, buffers as float32 computes them."""

import json
from pathlib import Path

import pytest
import torch
from folders import change_tensors, private_copy
from runs import prepared
from tiny_configs import SIZES
from transformers import AutoConfig

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.pipeline.run import run
from compress.pipeline.skeleton import open_skeleton
from compress.stages.quantize import QuantizeStage


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_buffers_are_not_rounded_to_the_checkpoints_dtype(tmp_path: Path, dtype: str) -> None:
    """Gemma 3 keeps its embedding scale as a buffer; calibration in float32 has to see it in float32."""
    AutoConfig.for_model("gemma3_text", **SIZES | {"hidden_size": 48}, head_dim=16, dtype=dtype).save_pretrained(
        tmp_path
    )
    skeleton = open_skeleton(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    buffers = dict(skeleton.model.named_buffers())
    assert buffers["model.embed_tokens.embed_scale"].item() == torch.tensor(48**0.5).item()
    assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_a_head_that_differs_from_the_tied_embedding_stays_a_matrix_of_its_own(tiny_model, tmp_path: Path) -> None:
    """As transformers reads such a checkpoint, and not without a word."""
    source = private_copy(tiny_model(tie_word_embeddings=True), tmp_path / "source")
    head = TensorFiles.open(source).tensor("model.embed_tokens.weight").flip(0)
    change_tensors(source, lambda tensors: tensors.update({"lm_head.weight": head}))
    context = prepared(source, tmp_path / "out", QuantizeStage("rtn"))
    assert any("differs from the embedding" in note for note in context.plan.notes)
    assert run(context, quiet=True).structure.ok
    packed = PackedCheckpoint.open(tmp_path / "out")
    assert packed.config["tie_word_embeddings"] is False
    assert torch.equal(packed.weight("lm_head"), head)
