"""Prepared weights: the same bits as packed ones, taken only where they belong to checkpoint and machine."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from folders import change_config, private_copy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import pack_model, random_weight, save_tiny_model

from compress.checkpoint.safetensors import MappedFile, TensorFiles
from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Int, Mxfp4, Mxfp8, Nf4, Nvfp4, Scheme
from compress.common.errors import CheckpointError, ToolkitError
from compress.cpu.binding import INSTRUCTION_SETS, best_instruction_set, library
from runtime.backends.cpu import huge_pages
from runtime.backends.cpu.linear import CpuLinear
from runtime.backends.prepared_weight import LAYOUT_VERSION
from runtime.backends.registry import is_fast
from runtime.model import prepared_key
from runtime.model.loader import load_model
from runtime.model.prepare import check_prepared_files, prepare_model
from runtime.model.prepared import HEADER_DIGEST, find_prepared, header_digest
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (2, 21), generator=torch.Generator().manual_seed(5))
SIZES = {"hidden_size": 128, "intermediate_size": 256}
NUM_PREPARED = 2 * 4 + is_fast(torch.bfloat16)
"""Four of each layer, and the head where the processor has vectors for it in 16 bits."""
pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled library")


def data_start(file: Path) -> int:
    """Bytes before the tensors of a file."""
    return min(entry.place[1] for entry in MappedFile.open(file).entries.values() if entry.place)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    return save_tiny_model(folder, dtype=torch.bfloat16, tie_word_embeddings=True, attention_bias=True, **SIZES)


@pytest.fixture(scope="module")
def packed(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "packed"
    pack_model(dense, folder, lambda module: Int(4, 32))
    return folder


@pytest.fixture
def model(packed: Path, tmp_path: Path) -> Path:
    """A copy that a test may change, prepared."""
    copy = private_copy(packed, tmp_path / "model")
    prepare_model(copy)
    return copy


def prepared_file(model: Path) -> Path:
    return model / "prepared" / f"{INSTRUCTION_SETS[best_instruction_set()]}.safetensors"


def rewrite(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a prepared file with the digest of its header."""
    save_file(tensors, file, metadata)
    found = {name: (entry.dtype, entry.shape) for name, entry in MappedFile.open(file).entries.items()}
    save_file(tensors, file, metadata | {HEADER_DIGEST: header_digest(found, metadata)})


def flip(file: Path, place: int, bit: int = 0) -> None:
    """Changes one bit of a file, and not the time of its last change."""
    content, times = bytearray(file.read_bytes()), file.stat()
    content[place] ^= 1 << bit
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def note_of(model: Path, **options: str) -> str:
    """Returns what a start says of prepared weights."""
    lines = load_model(model, **options).description
    return next((line for line in lines if line.startswith("prepared: ")), "")


def refuse_to_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was packed")

    monkeypatch.setattr(CpuLinear, "_pack_codes", refuse)
    monkeypatch.setattr(CpuLinear, "_pack_numbers", refuse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernels", ["auto", "8bit"])
def test_same_bits_and_nothing_is_packed(dtype, kernels, packed, tmp_path, monkeypatch):
    model = private_copy(packed, tmp_path / "model")
    options = {"dtype": dtype, "kernels": kernels}
    before = load_model(model, **options)
    _, number = prepare_model(model)
    assert number == NUM_PREPARED
    after = load_model(model, **options)
    assert torch.equal(score(after, TOKENS), score(before, TOKENS))
    assert after.nbytes == before.nbytes
    assert after.description[: len(before.description) - 1] == before.description[:-1]
    if dtype == "bfloat16":  # the head in 16 bits is prepared for it
        refuse_to_pack(monkeypatch)
        assert torch.equal(score(load_model(model, **options), TOKENS), score(before, TOKENS))


FORMS: dict[str, Scheme] = {
    "2 bits": Int(2, 32),
    "3 bits asymmetric": Int(3, 64, symmetric=False),
    "8 bits of a channel": Int(8, None),
    "8-bit activations": Int(8, None, True, Activations.INT8),
    "4-bit floats": Mxfp4(),
    "4-bit floats in small groups": Nvfp4(),
    "4-bit normal floats": Nf4(),
    "8-bit floats": Fp8(),
    "8-bit floats in blocks": BlockFp8((64, 32)),
    "8-bit floats in groups": Mxfp8(),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name, dense, tmp_path):
    format = "compress-runtime" if FORMS[name].structure else "compressed-tensors"
    pack_model(dense, tmp_path / "model", lambda module: FORMS[name], format)
    before = score(load_model(tmp_path / "model"), TOKENS)
    prepare_model(tmp_path / "model")
    assert "are mapped from" in note_of(tmp_path / "model")
    assert torch.equal(score(load_model(tmp_path / "model"), TOKENS), before)


def test_siblings_of_different_schemes(dense, tmp_path):
    def scheme(module: str) -> Scheme | None:
        return {"q_proj": Int(4, 32), "k_proj": Int(8, 32), "up_proj": Int(2, 32)}.get(module.rpartition(".")[2])

    pack_model(dense, tmp_path / "model", scheme)
    before = score(load_model(tmp_path / "model"), TOKENS)
    prepare_model(tmp_path / "model")
    assert torch.equal(score(load_model(tmp_path / "model"), TOKENS), before)


def test_experts_stay_in_the_file(tmp_path):
    save_tiny_model(tmp_path / "dense", "qwen3_moe", dtype=torch.bfloat16, num_experts=4, num_experts_per_tok=2)
    pack_model(tmp_path / "dense", tmp_path / "model", lambda module: Int(4, 32))
    before = score(load_model(tmp_path / "model"), TOKENS)
    prepare_model(tmp_path / "model")
    after = load_model(tmp_path / "model")
    assert after.layers[0].experts.experts[0].down.is_prepared
    assert torch.equal(score(after, TOKENS), before)


def test_where_files_have_no_huge_pages_they_are_read_into_some(model, packed, monkeypatch):
    monkeypatch.setattr(huge_pages, "HUGE_PAGE", 1)
    monkeypatch.setattr(huge_pages, "_is_in_huge_pages", lambda *_: False)
    refuse_to_pack(monkeypatch)
    assert huge_pages.map_file(prepared_file(model))[:] == prepared_file(model).read_bytes()
    found = score(load_model(model), TOKENS)
    monkeypatch.undo()
    assert torch.equal(found, score(load_model(packed), TOKENS))


def test_a_copy_is_known_by_its_bytes(model, tmp_path):
    copy = private_copy(model, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    assert "are mapped from" in note_of(copy)


def test_changed_weights_are_packed_anew(model):
    file, content = model / "model.safetensors", bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "the checkpoint has changed" in note_of(model)


def test_a_changed_config_is_another_checkpoint(model):
    assert "config.json has" in note_of(change_config(model, rope_theta=123456.0))


def test_another_machine_packs_anew(model, monkeypatch):
    names = tuple(f"new_{name}" for name in INSTRUCTION_SETS)
    monkeypatch.setattr(prepared_key, "INSTRUCTION_SETS", names)
    prepared_file(model).rename(prepared_file(model).with_stem(names[best_instruction_set()]))
    note = note_of(model)
    assert f"prepared for {INSTRUCTION_SETS[best_instruction_set()]}" in note
    assert f"this machine has {names[best_instruction_set()]}" in note


def test_damaged_files_are_not_used(model, packed):
    file = prepared_file(model)
    whole, expected = file.read_bytes(), score(load_model(packed), TOKENS)
    for content in (b"", whole[:100], whole[:-1], b"\xff" * len(whole)):
        file.write_bytes(content)
        assert "packed again" in note_of(model)
        assert torch.equal(score(load_model(model), TOKENS), expected)


def test_tensors_that_contradict_the_shape_are_not_used(model, packed):
    """The kernels read as many bytes as the shape says."""
    file, tensors = prepared_file(model), load_file(prepared_file(model))
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    short = {name: t[:64].clone() if name.endswith("words") else t for name, t in tensors.items()}
    no_scales = {name: t for name, t in tensors.items() if not name.endswith("scales")}
    wide_scales = {name: t.double() if name.endswith("scales") else t for name, t in tensors.items()}
    expected = score(load_model(packed), TOKENS)
    for changed in (short, no_scales, wide_scales):
        rewrite(file, changed, metadata)
        found = load_model(model)
        assert sum("packed again" in line for line in found.description) > 0
        assert torch.equal(score(found, TOKENS), expected)


@pytest.mark.parametrize("bits", [0, 5, 1 << 40])
def test_lying_metadata(bits, model, packed):
    file, tensors = prepared_file(model), load_file(prepared_file(model))
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    rewrite(file, tensors, metadata | {"linears": metadata["linears"].replace('"bits": 4', f'"bits": {bits}')})
    assert "are mapped from" in note_of(model)
    assert torch.equal(score(load_model(model), TOKENS), score(load_model(packed), TOKENS))


def test_every_bit_of_the_header_counts(model):
    file = prepared_file(model)
    whole = file.read_bytes()
    length = 8 + len(whole[8 : data_start(file)].rstrip(b" "))
    places = [*range(8), *range(8, length, 61), length, length + 1]
    for index, place in enumerate(places):
        flip(file, place, index % 8)
        assert "packed again" in find_prepared(model).note, place
        file.write_bytes(whole)
    assert "are mapped from" in find_prepared(model).note


def test_a_check_finds_a_bit_that_a_start_does_not(model):
    file = prepared_file(model)
    assert check_prepared_files(model) == [(file, NUM_PREPARED)]
    whole = file.read_bytes()
    for place in (data_start(file), len(whole) // 2, len(whole) - 1):
        flip(file, place, 6)
        assert "are mapped from" in note_of(model)
        with pytest.raises(CheckpointError, match="bytes of its weights"):
            check_prepared_files(model)
        file.write_bytes(whole)
    assert check_prepared_files(model) == [(file, NUM_PREPARED)]


def test_a_check_reads_the_checkpoint_too(model):
    flip(model / "model.safetensors", -1)
    assert "are mapped from" in note_of(model)
    with pytest.raises(CheckpointError, match="the checkpoint has changed"):
        check_prepared_files(model)


def test_a_check_of_nothing_is_refused(packed, tmp_path):
    model = private_copy(packed, tmp_path / "model")
    with pytest.raises(ToolkitError, match="no prepared weights"):
        check_prepared_files(model)
    file, _ = prepare_model(model, in_cache=True)
    assert check_prepared_files(model) == [(file, NUM_PREPARED)]


def test_a_folder_that_cannot_be_written_uses_the_cache(packed, tmp_path, cache):
    model = private_copy(packed, tmp_path / "model")
    (model / "prepared").write_text("in the way")
    file, _ = prepare_model(model)
    assert file.is_relative_to(cache)
    assert f"are mapped from {file}" in note_of(model)


def test_no_folder_can_be_written(packed, tmp_path, cache):
    model = private_copy(packed, tmp_path / "model")
    (model / "prepared").write_text("in the way")
    cache.write_text("in the way")
    with pytest.raises(ToolkitError, match="can be written"):
        prepare_model(model)
    assert note_of(model) == ""


def test_a_run_that_fails_leaves_nothing_behind(packed, tmp_path, monkeypatch):
    model = private_copy(packed, tmp_path / "model")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.model.prepared.digest_of", fail)
    with pytest.raises(ToolkitError, match="no space left"):
        prepare_model(model)
    assert not (model / "prepared").exists()


def test_exports_and_copies_leave_it_out(model):
    files = TensorFiles.open(model)
    assert [file for file in files.side_files() if "prepared" in file.parts] == []
    assert all(not name.endswith("words") for name in files.names())


def test_the_layout_has_its_version():
    """Whoever changes the bytes of packed weights raises `LAYOUT_VERSION`, and writes their digest here."""
    digest = hashlib.sha256()
    integers = (random_weight((80, 128), scheme) for scheme in (Int(2, 32), Int(4, 32, symmetric=False), Int(8, 64)))
    for weight in (*integers, torch.arange(80 * 128).view(80, 128).bfloat16()):
        for name, tensor in CpuLinear(weight).prepared().tensors.items():
            digest.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
    assert (LAYOUT_VERSION, digest.hexdigest()[:16]) == (2, "f5cb13ca7c7a3f9a")
