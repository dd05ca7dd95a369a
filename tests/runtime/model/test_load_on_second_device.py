"""A checkpoint is unpacked on the device that serves it, and is the same there."""

import pytest
import torch
from second_device import SECOND, OnSecond, SecondDevice
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Activations, Int
from compress.checkpoint.weights.integer import IntegerWeight
from runtime.backends.base import Target
from runtime.model.weight_reader import WeightReader

FORMS = {
    "compressed-tensors": [Int(4, 32), Int(3, 32, symmetric=False), Int(8, None, activations=Activations.INT8)],
    "gptq": [Int(4, 32), Int(8, 32)],
}
"""Without AWQ: the second device of these tests cannot index by a list."""


@pytest.mark.parametrize(
    ("format", "scheme"), [(format, scheme) for format, schemes in FORMS.items() for scheme in schemes], ids=str
)
def test_weights_are_unpacked_there(format, scheme, tmp_path):
    dense = save_tiny_model(tmp_path / "dense", num_hidden_layers=1, intermediate_size=128)
    weights = pack_model(dense, tmp_path / "packed", lambda module: scheme, format, torch.float16)
    checkpoint = PackedCheckpoint.open(tmp_path / "packed")
    with SecondDevice() as device:
        target = Target(SECOND, torch.float16)
        reader = WeightReader(checkpoint, target, "auto", {})
        for module, expected in weights.items():
            device.arrivals.clear()
            found = reader.weight(module)
            assert isinstance(found, IntegerWeight)
            for name in ("qweight", "scales", "zero_points"):
                tensor = getattr(found, name)
                assert isinstance(tensor, OnSecond)
                assert torch.equal(tensor.numbers, getattr(expected, name))
            if scheme.bits < 8:
                assert max(device.arrivals) < expected.qweight.numel() // 2, "codes were unpacked before they came"
