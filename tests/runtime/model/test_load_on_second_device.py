"""A checkpoint is unpacked on the device that serves it, and is the same there."""

import threading

import pytest
import torch
from second_device import SECOND, OnSecond, SecondDevice
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Activations, Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.common.errors import CheckpointError
from runtime.backends.base import Target
from runtime.model import device_files
from runtime.model.device_files import DeviceReader
from runtime.model.weight_reader import WeightReader

FORMS = {
    "compressed-tensors": [Int(4, 32), Int(3, 32, symmetric=False), Int(8, None, activations=Activations.INT8)],
    "gptq": [Int(4, 32), Int(8, 32)],
}
"""Without AWQ: the second device of these tests cannot index by a list."""


@pytest.fixture(params=[device_files.PIECE_BYTES, 256], ids=["whole", "pieces"], autouse=True)
def _piece_bytes(request, monkeypatch):
    """Tensors smaller than a piece come from the memory map, others through buffers of several threads."""
    monkeypatch.setattr(device_files, "PIECE_BYTES", request.param)


@pytest.mark.parametrize(
    ("format", "scheme"), [(format, scheme) for format, schemes in FORMS.items() for scheme in schemes], ids=str
)
def test_weights_are_unpacked_there(format, scheme, tmp_path):
    dense = save_tiny_model(tmp_path / "dense", num_hidden_layers=1, intermediate_size=128)
    weights = pack_model(dense, tmp_path / "packed", lambda module: scheme, format, torch.float16)
    checkpoint = PackedCheckpoint.open(tmp_path / "packed")
    with SecondDevice() as device:
        target = Target(SECOND, torch.float16)
        reader = WeightReader(checkpoint, target, "auto", {}, device_reader=DeviceReader(SECOND))
        for module, expected in weights.items():
            device.arrivals.clear()
            found = reader.weight(module)
            assert isinstance(found, CodedWeight)
            for name in ("qweight", "scales", "zero_points"):
                tensor = getattr(found, name)
                assert isinstance(tensor, OnSecond)
                assert torch.equal(tensor.numbers, getattr(expected, name))
            if scheme.bits < 8 and device.arrivals:
                assert max(device.arrivals) < expected.qweight.numel() // 2, "codes were unpacked before they came"


def test_dense_tensors_come_as_they_are_stored(tmp_path):
    files = TensorFiles.open(save_tiny_model(tmp_path / "dense", dtype=torch.bfloat16, num_hidden_layers=1))
    with SecondDevice():
        reader = DeviceReader(SECOND)
        for name in files.names():
            found = reader.tensor(files[name])
            assert isinstance(found, OnSecond)
            assert torch.equal(found.numbers, files.tensor(name))


def test_a_file_that_was_cut_meanwhile_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(device_files, "PIECE_BYTES", 256)
    files = TensorFiles.open(save_tiny_model(tmp_path / "dense", num_hidden_layers=1))
    name = max(files.names(), key=files.tensor_nbytes)
    path, start = files[name].place
    with path.open("r+b") as stream:
        stream.truncate(start + 1000)
    with pytest.raises(CheckpointError, match=str(start + 1000)):
        DeviceReader(torch.device("cpu")).tensor(files[name])


def test_buffers_are_filled_while_another_one_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(device_files, "PIECE_BYTES", 64)
    content = torch.arange(2048, dtype=torch.int32).view(torch.uint8)
    (tmp_path / "weights").write_bytes(content.numpy().tobytes())
    fill, copy_to = device_files._Buffer.fill, device_files._Buffer.copy_to
    is_first, copying, filled = threading.Lock(), threading.Event(), threading.Event()

    def fill_and_tell(buffer, *args):
        if copying.is_set():
            filled.set()
        fill(buffer, *args)

    def copy_slowly_at_first(buffer, *args):
        if is_first.acquire(blocking=False):
            copying.set()
            assert filled.wait(30)
        copy_to(buffer, *args)

    monkeypatch.setattr(device_files._Buffer, "fill", fill_and_tell)
    monkeypatch.setattr(device_files._Buffer, "copy_to", copy_slowly_at_first)
    found = DeviceReader(torch.device("cpu")).read(tmp_path / "weights", 4, len(content) - 4)
    assert torch.equal(found, content[4:])
