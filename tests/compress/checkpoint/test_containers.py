"""The rule of exports: what a container cannot hold is refused with the nearest form that it can, and listed."""

import pytest
from folders import change_tensors
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.containers import containers
from compress.checkpoint.formats import check_held, nearest_held
from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import targets
from compress.checkpoint.weights import Q2K, Q4K, BlockFp8, Bnb4, Fp8, Int, Mxfp4, Nf4, Nvfp4, Scheme
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import CheckpointError, SchemeError
from compress.stages.quantize import QuantizeStage

SHAPE = 128, 256
READ_ONLY = {"mxfp4", "bitsandbytes", "auto-round", "torchao", "modelopt"}


def test_every_container_names_its_engines_and_those_that_are_written_come_first() -> None:
    assert {each.name for each in CONTAINERS.values() if not each.is_written} == READ_ONLY
    assert list(CONTAINERS)[:2] == ["compressed-tensors", "gptq"]
    assert set(list(CONTAINERS)[-len(READ_ONLY) :]) == READ_ONLY
    assert all("this runtime" in each.engines for each in CONTAINERS.values())


@pytest.mark.parametrize(
    ("format", "scheme", "nearest"),
    [
        ("gptq", Nvfp4(), Int(4, 32)),
        ("gptq", Int(5, 128), Int(4, 32)),
        ("gptq", Int(4, 64, symmetric=False), Int(4, 64)),
        ("awq", Int(3, 64), Int(4, None)),
        ("awq", BlockFp8(), Int(4, 32)),
        ("fp8", Fp8(), BlockFp8()),
        ("fp8", Mxfp4(), BlockFp8()),
        ("mxfp4", Mxfp4(), None),
        ("compressed-tensors", Q4K(), Int(4, 32)),
        ("gptq", Q2K(), Int(2, 32)),
    ],
    ids=str,
)
def test_the_nearest_form_is_named(format: str, scheme: Scheme, nearest: Scheme | None) -> None:
    codec = CONTAINERS.find(format)
    assert nearest_held(codec, scheme, SHAPE) == nearest
    with pytest.raises(SchemeError) as caught:
        check_held(codec, scheme, SHAPE)
    said, _, command = caught.value.remedy.partition(f"the nearest form that {format} holds is ")[2].partition(": ")
    assert said == str(nearest or "")
    assert bool(command) == bool(nearest)
    if nearest:
        quantize, _, export = command.removeprefix("compress quantize SOURCE ").partition(", then ")
        words = quantize.replace("--", "").replace("-size", "_size").split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        keys = {name: text if name == "weights" else int(text) for name, text in given.items()}
        assert QuantizeStage.build(keys).scheme == nearest
        assert export == (
            "" if format == "compressed-tensors" else f"compress export packed --format {format} --out OTHER"
        )


@pytest.mark.parametrize(
    ("scheme", "packed"),
    [
        (Int(4, 32), "compressed-tensors"),
        (Nvfp4(), "compressed-tensors"),
        (Nf4(), "compress-runtime"),
        (Bnb4("nf4", 32), "compress-runtime"),
    ],
    ids=str,
)
def test_formats_that_hold_it_are_named(scheme: Scheme, packed: str) -> None:
    with pytest.raises(SchemeError) as caught:
        check_held(CONTAINERS.find("fp8"), scheme, SHAPE)
    assert caught.value.remedy.startswith(f"Use --format {packed} or --format dense; the nearest")


@pytest.mark.parametrize("format", ["compressed-tensors", "compress-runtime", "dense"])
def test_targets_are_held_by_the_usual_containers(format: str) -> None:
    others = [form for form in targets().values() if not form.target().structure]
    for form in others if format == "compressed-tensors" else targets().values():
        check_held(CONTAINERS.find(format), form.target(), SHAPE)


def test_what_is_listed_is_what_exports_do(tmp_path) -> None:
    dense = save_tiny_model(tmp_path / "source")
    pack_model(dense, tmp_path / "packed", lambda module: Nvfp4() if "mlp" in module else Int(4, 32))
    found = containers(tmp_path / "packed")
    assert [each.format for each in found] == [name for name in CONTAINERS if name not in READ_ONLY]
    for each in found:
        assert bool(each.refusal) != bool(each.readers)
        out = tmp_path / each.format
        if each.format == "gguf":
            assert "--gguf-type" in each.refusal
        elif each.refusal:
            with pytest.raises(SchemeError) as caught:
                export_checkpoint(tmp_path / "packed", each.format, out)
            assert str(caught.value) == each.refusal
        else:
            export_checkpoint(tmp_path / "packed", each.format, out)
        assert out.exists() == (not each.refusal)
    with pytest.raises(CheckpointError, match="no quantized weights"):
        containers(dense)


def test_a_damaged_checkpoint_is_no_matter_of_formats(tmp_path) -> None:
    pack_model(save_tiny_model(tmp_path / "source"), tmp_path / "packed", lambda module: Int(4, 32))
    module = PackedCheckpoint.open(tmp_path / "packed").modules[0]
    change_tensors(tmp_path / "packed", lambda tensors: tensors.pop(f"{module}.weight_shape"))
    with pytest.raises(CheckpointError, match=f"no tensor '{module}.weight_shape'"):
        containers(tmp_path / "packed")
