"""Files of llm-compressor, AutoRound and torchao: weights and logits are those of the tools, with inputs rounded so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.checkpoint.activations import AS_STORED
from compress.checkpoint.reader import PackedCheckpoint
from runtime.backends.registry import REFERENCE
from runtime.model.loader import load_model
from runtime.model.scoring import score

PEERS = Path(__file__).parents[2] / "data" / "peers"
EXPECTED = {
    folder.name: load_file(folder / "expected.safetensors") for folder in sorted(PEERS.iterdir()) if folder.is_dir()
}
WITH_LOGITS = [name for name, expected in EXPECTED.items() if "logits" in expected]
LIMIT = 1e-5
"""Largest error relative to the logits."""


def error(name: str, kernels: str) -> float:
    expected = EXPECTED[name]
    model = load_model(PEERS / name, device="cpu", dtype="float32", kernels=kernels)
    found = score(model, expected["tokens"]).flatten()
    return float((found - expected["logits"].flatten()).norm() / expected["logits"].norm())


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_inputs_are_rounded_as_the_file_says(name: str) -> None:
    assert error(name, AS_STORED) < LIMIT
    assert error(name, REFERENCE) < LIMIT
    assert error(name, "auto") > 1000 * LIMIT


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in WITH_LOGITS])
def test_weights_are_those_of_the_tool(name: str) -> None:
    packed = PackedCheckpoint.open(PEERS / name)
    for module, weight in EXPECTED[name].items():
        assert torch.equal(packed.values(module, weight.dtype), weight)
    load_model(PEERS / name, device="cpu", dtype="float32")
