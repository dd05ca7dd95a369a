"""Readers of every container refuse truncated, inconsistent and invalid files with one line."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from bitsandbytes_files import CASES
from folders import change_tensors
from safetensors.torch import save_file
from shared_store import SharedStore
from tiny_models import random_weight, save_tiny_model
from torch import Tensor

from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import BlockFp8, Exl3, Fp8, Int, Mxfp4, Mxfp8, Nf4, NMSparsity, Nvfp4, Scheme
from compress.checkpoint.weights.exl3 import Exl3Weight
from compress.common.cli import demo_model_path
from compress.common.errors import ToolkitError
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

MODULES = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")
JUNK = (None, True, -1, 0, 3, 2**40, 2**70, 1e308, float("nan"), "", "x", "I64", "../../x", [], [[1]], {}, {"a": None})
FORMS: dict[str, tuple[str, Scheme]] = {
    "int4": ("compressed-tensors", Int(4, 32)),
    "int3 asymmetric": ("compressed-tensors", Int(3, 32, symmetric=False)),
    "fp8": ("compressed-tensors", Fp8()),
    "fp8 blocks": ("compressed-tensors", BlockFp8((32, 32))),
    "mxfp4": ("compressed-tensors", Mxfp4()),
    "mxfp8": ("compressed-tensors", Mxfp8()),
    "nvfp4": ("compressed-tensors", Nvfp4()),
    "gptq": ("gptq", Int(4, 32)),
    "awq": ("awq", Int(4, 32)),
    "published fp8": ("fp8", BlockFp8((32, 32))),
    "exl3": ("exl3", Exl3(3, "mul1")),
    "nf4": ("compress-runtime", Nf4()),
    "own": ("compress-runtime", Int(4, 32)),
}
STAGES = {
    "2:4": (PruneStage("magnitude", pattern=NMSparsity(2, 4)), QuantizeStage("rtn", Int(4, 32))),
    "low rank": (FactorizeStage("svd", keep=0.5), QuantizeStage("rtn", Int(4, 8))),
    "outlier columns": (QuantizeStage("rtn", Int(4, 16), outlier_columns=4),),
}

BITSANDBYTES = {f"bitsandbytes {case}": case for case in ("nf4 twice", "fp4", "int8")}


def write(folder: Path, format: str, scheme: Scheme) -> None:
    """Three packed layers of a model of no family."""
    weights: dict[str, Any] = {module: random_weight((128, 128), scheme) for module in MODULES if format != "exl3"}
    if format == "exl3":
        trellis = torch.randint(-(2**15), 2**15, (8, 8, 48)).to(torch.int16)
        weights = dict.fromkeys(MODULES, Exl3Weight(trellis, torch.ones(128).half(), torch.ones(128).half(), scheme))
    codec = COMPRESS_RUNTIME if format == "exl3" else CONTAINERS.find(format)
    tensors = {"model.norm.weight": torch.ones(128)}
    for module, weight in weights.items():
        tensors |= codec.encode(module, weight, torch.float16)
    block = {"quant_method": "exl3", "bits": 3.0}
    if format != "exl3":
        block = codec.quantization_config(dict.fromkeys(MODULES, scheme), ["lm_head"])
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "of_nobody", "dtype": "float16", "quantization_config": block}
    (folder / "config.json").write_text(json.dumps(config))


def write_bitsandbytes(folder: Path, case: str) -> None:
    pack, entries = CASES[case]
    weights = {module: pack(torch.randn(128, 128)) for module in MODULES}
    tensors = {module + suffix: tensor for module, own in weights.items() for suffix, tensor in own.items()}
    folder.mkdir()
    save_file(tensors | {"model.norm.weight": torch.ones(128)}, folder / "model.safetensors")
    block = {"quant_method": "bitsandbytes", **entries}
    config = {"model_type": "of_nobody", "dtype": "bfloat16", "quantization_config": block}
    (folder / "config.json").write_text(json.dumps(config))


def write_dense(folder: Path) -> None:
    save_tiny_model(folder, vocab_size=8192)
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, folder)


@pytest.fixture(scope="session")
def source(shared_store: SharedStore) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        if name in FORMS:
            return shared_store.folder("damaged", name, lambda folder: write(folder, *FORMS[name]))
        if name in BITSANDBYTES:
            return shared_store.folder("damaged", name, lambda folder: write_bitsandbytes(folder, BITSANDBYTES[name]))
        dense = shared_store.folder("dense", "damaged", write_dense)
        return shared_store.folder("damaged", name, lambda folder: runs.compress(dense, folder, *STAGES[name]))

    return make


def read_everything(folder: Path) -> None:
    packed = PackedCheckpoint.open(folder)
    for module in packed.modules:
        packed.shape(module)
        packed.values(module, torch.float32)
    for name in packed.dense_names():
        packed.tensor(name)
    verify_structure(folder)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = list(items)
    return [(value, key) for key, _ in found] + [place for _, each in found for place in places(each)]


def put_junk(value: Any, chance: random.Random) -> str:
    container, key = chance.choice(places(value))
    junk = chance.choice((*JUNK, "removed"))
    if junk == "removed":
        del container[key]
    else:
        container[key] = junk
    return f"{key} = {junk!r}"


def damage_config(folder: Path, chance: random.Random) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    said = put_junk({"quantization_config": config["quantization_config"]}, chance)
    path.write_text(json.dumps(config))
    return said


def damage_header(folder: Path, chance: random.Random) -> str:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    said = put_junk(header, chance)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return said


def damage_bytes(folder: Path, chance: random.Random) -> str:
    path = folder / chance.choice(("model.safetensors", "model.safetensors", "config.json"))
    data = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        kept = chance.choice((0, 7, 8, 100, len(data) // 2, len(data) - 1))
        path.write_bytes(data[:kept])
        return f"{path.name} cut to {kept} bytes"
    place = chance.randrange(min(len(data), chance.choice((8, 2000, len(data)))))
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return f"{path.name} bit in byte {place}"


def damage_tensor(folder: Path, chance: random.Random) -> str:
    said = []

    def edit(tensors: dict[str, Tensor]) -> None:
        name = chance.choice(sorted(tensors))
        kind, tensor = (
            chance.choice(("drop", "cut", "flat", "deep", "empty", "bytes", "float", "ones")),
            tensors.pop(name),
        )
        changes: dict[str, Callable[[], Tensor]] = {
            "cut": lambda: tensor[: len(tensor) // 2] if tensor.dim() else tensor,
            "flat": tensor.flatten,
            "deep": lambda: tensor.unsqueeze(0).unsqueeze(-1),
            "empty": lambda: tensor.flatten()[:0],
            "bytes": lambda: tensor.contiguous().reshape(-1).view(torch.uint8),
            "float": lambda: tensor.to(torch.float32),
            "ones": lambda: (
                torch.full_like(tensor.contiguous().reshape(-1).view(torch.uint8), 255)
                .view(tensor.dtype)
                .view(tensor.shape)
            ),
        }
        kind = chance.choice(("drop", *changes))
        said.append(f"{name} {kind}")
        if kind != "drop":
            tensors[name] = changes[kind]()

    change_tensors(folder, edit)
    return said[0]


DAMAGES = (damage_config, damage_header, damage_bytes, damage_tensor)


def check(source: Path, folder: Path, seed: int) -> bool:
    """Whether a damaged copy was refused; anything but a refusal with one line fails."""
    chance = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    said = chance.choice(DAMAGES)(folder, chance)
    refusal = ""
    try:
        read_everything(folder)
    except ToolkitError as error:
        refusal = str(error).strip()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {said}") from error
    assert "\n" not in refusal, f"seed {seed}: {said}"
    return bool(refusal)


@pytest.mark.parametrize("name", [*FORMS, *BITSANDBYTES, *STAGES])
def test_damages_are_read_or_refused(source: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    read_everything(source(name))
    refused = [check(source(name), tmp_path / "copy", seed) for seed in range(20)]
    assert any(refused)


@pytest.mark.full
@pytest.mark.parametrize("name", [*FORMS, *BITSANDBYTES, *STAGES])
def test_many_damages_are_read_or_refused(source: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    refused = [check(source(name), tmp_path / "copy", seed) for seed in range(20, 220)]
    assert sum(refused) > 50
