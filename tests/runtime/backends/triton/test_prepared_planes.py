"""Planes of codes that a file keeps for GPUs: read back through buffers, they are the linear that was written."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from products import activations
from tiny_models import pack_model, random_weight, save_tiny_model

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, Scheme
from compress.common.errors import CheckpointError
from runtime.backends.base import Target
from runtime.backends.triton.kernels.weight_layout import PLANE
from runtime.backends.triton.linear import PLANES, prepare_codes
from runtime.model import device_files
from runtime.model.device_files import DeviceReader
from runtime.model.prepare import check_prepared_files
from runtime.model.prepared import PreparedFile, find_prepared, writing
from runtime.model.prepared_key import CUDA, places
from runtime.model.weight_reader import WeightReader

SCHEMES = [Int(4, 128), Int(4, 96, False), Int(3, 64), Int(2, 32, False), Int(8, None), Int(8, 32, False)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CASES = [(scheme, dtype) for scheme in SCHEMES for dtype in DTYPES]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    dense = save_tiny_model(folder / "dense", dtype=torch.float16, num_hidden_layers=1)
    pack_model(dense, folder / "packed", lambda module: Int(4, 32))
    return folder / "packed"


def weight_of(scheme: Scheme, dtype: torch.dtype):
    weight = random_weight((100, 288 if scheme.group_size in (96, 32) else 384), scheme)
    return replace(weight, scales=weight.scales.to(dtype))


@pytest.mark.parametrize("piece_bytes", [64, device_files.PIECE_BYTES])
def test_what_is_read_is_what_was_written(gpu, checkpoint, piece_bytes, monkeypatch) -> None:
    monkeypatch.setattr(device_files, "PIECE_BYTES", piece_bytes)
    target, biases = Target(gpu, torch.float16), [None, activations(1, 100, torch.float16, gpu)[0]]
    linears = {f"{number}": prepare_codes(weight_of(*case), None, target) for number, case in enumerate(CASES)}
    file = places(checkpoint, CUDA)[0]
    file.parent.mkdir(exist_ok=True)
    with writing(file, PackedCheckpoint.open(checkpoint), CUDA) as writer:
        for name, linear in linears.items():
            writer.keep([name], PLANES, linear, None)
    found = find_prepared(checkpoint, CUDA, DeviceReader(gpu))
    assert isinstance(found, PreparedFile)
    for (name, linear), (scheme, dtype) in zip(linears.items(), CASES, strict=True):
        weight = found.find([name], PLANES)
        for bias in biases:
            restored, made = PLANES.restore(weight, bias), replace(linear, bias=bias)
            numbers = {"words": None, "scales": None}
            assert replace(restored.weight, **numbers) == replace(linear.weight, **numbers)
            assert (restored.plan, restored.weight.scale_dtype) == (linear.plan, dtype)
            assert torch.equal(restored.weight.words, linear.weight.words), scheme
            assert torch.equal(restored.weight.scales, linear.weight.scales), scheme
            if scheme == SCHEMES[0]:
                x = activations(3, linear.weight.shape[1], torch.float16, gpu)
                assert torch.equal(restored(x), made(x))
    assert (file, len(CASES)) in check_prepared_files(checkpoint)


def test_a_model_takes_them_for_the_kernel_of_a_gpu(gpu, checkpoint, tmp_path) -> None:
    opened, module = PackedCheckpoint.open(checkpoint), "model.layers.0.self_attn.o_proj"
    shape, path = opened.shape(module), tmp_path / "cuda.safetensors"
    linear = prepare_codes(opened.weight(module), None, Target(gpu, torch.float16))
    with writing(path, opened, CUDA) as writer:
        writer.keep([module], PLANES, linear, None)
    found = PreparedFile.open(path, checkpoint, CUDA, DeviceReader(gpu))
    reader = WeightReader(opened, Target(torch.device("cuda"), torch.float16), "auto", {}, prepared=found)
    restored = reader.restore([module], shape, "o_proj", None)
    assert torch.equal(restored.weight.words, linear.weight.words)
    assert reader.restore([module], (shape[0], shape[1] + 32), "o_proj", None) is None
    with pytest.raises(CheckpointError):
        PreparedFile.open(path, checkpoint)


def test_files_of_other_kernels_are_not_taken(gpu, checkpoint) -> None:
    weight = prepare_codes(weight_of(*CASES[0]), None, Target(gpu, torch.float16)).prepared()
    rows = weight.tensors["words"].shape[1]
    wrong = [
        {"bits": 3},
        {"group": 48},
        {"group": 64},
        {"shape": (100, 1000)},
        {"shape": (rows + 1, weight.shape[1])},
        {"tensors": {"words": weight.tensors["words"]}},
        {"tensors": weight.tensors | {"words": weight.tensors["words"].view(torch.uint8)}},
        {"tensors": weight.tensors | {"scales": weight.tensors["scales"].double()}},
    ]
    for changes in wrong:
        with pytest.raises(CheckpointError):
            PLANES.restore(replace(weight, **changes), None)
    assert weight.tensors["words"].shape[2] == PLANE
