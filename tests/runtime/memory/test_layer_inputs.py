"""Matrices that are looked up for each layer are part of the estimate."""

import torch
from runs import foreseen_bytes
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from runtime.model.loader import load_model


def test_the_estimate_counts_what_is_looked_up_for_each_layer(tmp_path):
    folder = save_tiny_model(tmp_path / "model", "gemma4_text", **VARIANTS["gemma4_text"])
    loaded = load_model(folder, kernels="reference")
    assert loaded.layer_inputs is not None
    assert foreseen_bytes(folder, torch.float32, "reference") == loaded.nbytes
