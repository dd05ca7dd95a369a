"""The skeleton: parameters without memory, buffers as float32 computes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import SIZES
from transformers import AutoConfig

from compress.pipeline.skeleton import open_skeleton


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
