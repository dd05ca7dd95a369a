"""EXL3: tiles decoded bit by bit, weights turned by explicit matrices, models served and quantized again."""

import hashlib
import json
import math
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from folders import private_copy
from runs import compress
from safetensors.torch import load_file, save_file
from shared_store import SharedStore
from tiny_models import load_reference, put_checkpoint, random_weight, reference_logits, save_tiny_model
from torch import Tensor

from compress.checkpoint.config import is_embedding
from compress.checkpoint.dequantized import open_source
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Exl3, Int, Scheme
from compress.checkpoint.weights.base import digest
from compress.checkpoint.weights.exl3 import codebook_values, decode_tiles
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, SchemeError
from compress.cpu.binding import absence, library
from compress.stages.quantize import QuantizeStage
from runtime.backends.base import Target
from runtime.backends.registry import choose_linear
from runtime.backends.torch import quantized_linear
from runtime.memory.estimate import Weights
from runtime.model import loader
from runtime.model.loader import load_model
from runtime.model.prepare import prepare_model
from runtime.model.scoring import score

CODEBOOKS = ("3inst", "mcg", "mul1")
MULTIPLIER = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
FLOAT64 = Target(torch.device("cpu"), torch.float64)
needs_library = pytest.mark.skipif(library() is None, reason=absence())
TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(5))


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def number(state: int, codebook: str) -> float:
    """One value of the codebook in Python's float64, in which it is exact, rounded once to 16 bits."""
    if codebook == "mul1":
        total = sum((state * MULTIPLIER["mul1"] % 2**32).to_bytes(4, "little"))
        exact = half(0x6400 + total) * half(0x1EEE) + half(0xC931)
    else:
        hashed = state * MULTIPLIER["mcg"] if codebook == "mcg" else state * 89226354 + 64248484
        mixed = (hashed % 2**32 & 0x8FFF8FFF) ^ 0x3B603B60
        exact = half(mixed & 0xFFFF) + half(mixed >> 16)
    return struct.unpack("<e", struct.pack("<e", exact))[0]


def decode_tile(words: list[int], bits: float, codebook: str) -> list[list[float]]:
    """Decodes one tile bit by bit, as the kernels of exllamav3 hold it: eight values for each of 32 threads."""
    pairs = [words[index + 1] << 16 | words[index] for index in range(0, len(words), 2)]
    stream = "".join(f"{pair:032b}" for pair in pairs)
    tile = [[0.0] * 16 for _ in range(16)]
    for index in range(256):
        end = math.floor((index + 1) * bits) + len(stream)
        state = int((stream * 2)[end - 16 : end], 2)
        thread, place = divmod(index, 8)
        row = (thread % 4) * 2 + (0, 1, 8, 9, 0, 1, 8, 9)[place]
        tile[row][thread // 4 + (0 if place < 4 else 8)] = number(state, codebook)
    return tile


def pseudo_random_words(count: int) -> list[int]:
    state, words = 12345, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        words.append(state >> 16)
    return words


def as_int16(words: list[int]) -> Tensor:
    return torch.tensor(words, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_numbers_of_all_states_that_one_bit_reaches(codebook: str) -> None:
    found = codebook_values(codebook)
    for state in [*range(0, 2**16, 257), 2**16 - 1]:
        assert float(found[state]) == number(state, codebook)
    assert abs(float(found.float().mean())) < 0.02
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("bits", "codebook"), [*product(range(1, 9), CODEBOOKS), *((bits + 0.5, "mul1") for bits in range(1, 5))]
)
def test_a_tile_is_decoded_as_bit_by_bit(bits: float, codebook: str) -> None:
    words = pseudo_random_words(int(16 * bits))
    found = decode_tiles(as_int16(words).view(1, 1, -1), Exl3(bits, codebook))
    assert found.dtype == torch.float16
    assert found.tolist() == decode_tile(words, bits, codebook)


def test_vectors_of_another_implementation() -> None:
    """Digests of tiles decoded by a program in C++ after the published kernels."""
    expected = {
        (2, "3inst"): "79a98943b23fbe8b",
        (5, "3inst"): "a66a57f5cd886232",
        (3, "mcg"): "2dc49f87beff95aa",
        (8, "mcg"): "320c9c1fd34753cf",
        (1, "mul1"): "ae09b039cfe46f5e",
        (4, "mul1"): "8d373d6aab5001a2",
        (6, "mul1"): "fb0a80753ddf303c",
    }
    for (bits, codebook), digest_ in expected.items():
        tile = decode_tiles(as_int16(pseudo_random_words(16 * bits)).view(1, 1, -1), Exl3(bits, codebook))
        assert hashlib.sha256(tile.numpy().tobytes()).hexdigest()[:16] == digest_


@pytest.mark.parametrize("scheme", [Exl3(2.5, "mul1"), Exl3(6)], ids=str)
def test_a_weight_is_turned_by_explicit_matrices(scheme: Exl3) -> None:
    weight = random_weight((256, 384), scheme, 1)
    sides = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=torch.float64)
    tiles = decode_tiles(weight.trellis, scheme).double()
    turns = [torch.block_diag(*[sides / 128**0.5] * (size // 128)) for size in tiles.shape]
    expected = (weight.suh.double()[:, None] * (turns[0] @ tiles @ turns[1]) * weight.svh.double()).T
    torch.testing.assert_close(weight.dequantize(torch.float64), expected, rtol=0, atol=1e-12)
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize(torch.float64).to(torch.bfloat16))
    rows, columns, words = (int(size) for size in weight.trellis.shape)
    assert weight.shape == (columns * 16, rows * 16)
    assert words == 16 * scheme.bits


@pytest.fixture(scope="session")
def published(shared_store: SharedStore) -> Path:
    """A model as exllamav3 writes it: widths, halves too, and codebooks by layer, head with more bits, embedding in 16
    bits."""

    def write(folder: Path) -> None:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 8192, "num_key_value_heads": 4}
        save_tiny_model(folder, "llama", torch.float16, **sizes)
        tensors = load_file(folder / "model.safetensors")
        for count, name in enumerate([name for name in tensors if is_matrix(name)]):
            codebook = CODEBOOKS[count % 3]
            width = 2.5 if codebook == "mul1" else 2 + count % 4
            scheme = Exl3(6 if "lm_head" in name else width, codebook)
            weight = random_weight(tuple(tensors.pop(name).shape), scheme, count)
            stored = weight.tensors(torch.float16)
            if count == 0:
                stored |= signs_alone(stored)
            tensors |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in stored.items()}
        save_file(tensors, folder / "model.safetensors")
        for file in demo_model_path().glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
        block = {"quant_method": "exl3", "version": "0.0.4", "bits": 3.5, "head_bits": 6, "codebook": "mul1"}
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": block}))

    return shared_store.folder("exl3", "published", write)


def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight") or name == "lm_head.weight"


def signs_alone(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The older layout of scales: bits of signs in place of one vector."""
    bits = (stored.pop(".suh") < 0).view(-1, 16).to(torch.int32)
    return {".su": (bits << torch.arange(16)).sum(1).to(torch.int16)}


def dense_logits(checkpoint: Path, dense: Path) -> Tensor:
    return reference_logits(put_checkpoint(load_reference(dense), PackedCheckpoint.open(checkpoint)), TOKENS)


def test_a_published_model_is_served(published: Path, tmp_path: Path) -> None:
    packed = PackedCheckpoint.open(published)
    assert packed.format == "exl3"
    widths = {scheme.bits for scheme in packed.schemes.values()}
    assert (widths, packed.schemes["lm_head"].bits) == ({2, 2.5, 3, 4, 5, 6}, 6)
    assert {scheme.codebook for scheme in packed.schemes.values()} == set(CODEBOOKS)
    assert not any(map(is_embedding, packed.schemes))
    export_checkpoint(published, "dense", tmp_path / "dense")
    decoder = load_model(published, dtype="float64")
    expected = dense_logits(published, tmp_path / "dense")
    torch.testing.assert_close(score(decoder, TOKENS), expected, rtol=0, atol=1e-10)
    assert any("exl3" in line and "dequantized once at load" in line for line in decoder.description)


@needs_library
def test_codes_stay_packed_where_memory_is_short(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = load_model(published, dtype="float32")
    monkeypatch.setattr(loader, "available_bytes", lambda device: 10_000)
    packed = load_model(published, dtype="float32")
    assert all("cpu_exl3" in line for line in packed.description if "exl3" in line)
    assert packed.nbytes < dense.nbytes * 0.6  # the embedding stays dense
    weights = Weights(
        PackedCheckpoint.open(published), packed.config, Target(packed.device, packed.dtype), "auto", 10_000
    )
    assert weights.prepared() == packed.nbytes
    export_checkpoint(published, "dense", tmp_path / "dense")
    expected = dense_logits(published, tmp_path / "dense")
    error = (score(packed, TOKENS).double() - expected).abs().max()
    assert error < 1e-3 * expected.abs().max()


@needs_library
def test_packed_codes_are_prepared_for_the_next_start(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = private_copy(published, tmp_path / "model")
    monkeypatch.setattr(loader, "available_bytes", lambda device: 10_000)
    before = score(load_model(model), TOKENS)
    prepare_model(model)
    after = load_model(model)
    assert any("are mapped from" in line for line in after.description)
    assert torch.equal(score(after, TOKENS), before)


def test_the_reference_kernel_takes_weights_of_several_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles have no row per output, so no rows are cut out of them."""
    monkeypatch.setattr(quantized_linear, "PANEL_ELEMENTS", 2**14)
    weight = random_weight((384, 256), Exl3(3), 2)
    linear = choose_linear(weight.scheme, 256, FLOAT64, "reference").kernel.prepare(weight, None, FLOAT64)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = x @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(linear(x), expected, rtol=0, atol=1e-12)
    assert not linear.reads_rows


def test_it_is_a_source_and_kept_codes_stay(published: Path, tmp_path: Path) -> None:
    out = compress(published, tmp_path / "out", QuantizeStage("rtn", Int(4, 32), ignore=("*.mlp.*",))).out
    before, after = PackedCheckpoint.open(published), PackedCheckpoint.open(out)
    kept = [module for module in after.schemes if ".mlp." in module]
    assert kept
    assert after.format == "compress-runtime"
    assert verify_structure(out).problems == ()
    for module in kept:
        assert after.schemes[module] == before.schemes[module]
        assert digest(after.packed_weight(module)) == digest(before.packed_weight(module))
    assert {after.schemes[module].bits for module in after.schemes if "self_attn" in module} == {4}
    files, config = open_source(published)
    assert "quantization_config" not in config
    assert files.shape("lm_head.weight") == (8192, 128)


def test_a_scheme_survives_its_dictionary() -> None:
    for scheme in (Exl3(3, "mul1"), Exl3(2.5, "mul1"), Exl3(8)):
        assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def change(published: Path, folder: Path, tensors: Callable[[dict[str, Tensor]], object]) -> PackedCheckpoint:
    folder.mkdir()
    (folder / "config.json").write_text((published / "config.json").read_text())
    stored = load_file(published / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")
    return PackedCheckpoint.open(folder)


def test_what_contradicts_itself_is_refused(published: Path, tmp_path: Path) -> None:
    module = "model.layers.1.mlp.up_proj"
    words = load_file(published / "model.safetensors")[f"{module}.trellis"]
    with pytest.raises(CheckpointError, match=r"no whole number of bits for two"):
        change(published, tmp_path / "odd", lambda each: each.update({f"{module}.trellis": words[..., :-4].clone()}))
    with pytest.raises(CheckpointError, match=r"no whole number of bits for two"):
        change(published, tmp_path / "flat", lambda each: each.update({f"{module}.trellis": words.flatten()}))
    long = change(published, tmp_path / "long", lambda each: each.update({f"{module}.suh": torch.ones(129).half()}))
    with pytest.raises(CheckpointError, match=rf"{module}.*\(129,\)"):
        long.packed_weight(module)
    change(published, tmp_path / "short", lambda each: each.update({f"{module}.suh": torch.ones(64).half()}))
    with pytest.raises(CheckpointError, match=rf"{module}.weight has shape \(256, 64\)"):
        load_model(tmp_path / "short")
    other = change(published, tmp_path / "other", lambda each: each.update({f"{module}.mul1": torch.tensor(5)}))
    with pytest.raises(CheckpointError, match=r"0x5, not 0x83dcd12d"):
        other.packed_weight(module)
    for bits, codebook in ((9, "mul1"), (0.5, "mul1"), (5.5, "mul1"), (2.25, "mul1"), (2.5, "mcg")):
        with pytest.raises(SchemeError, match=rf"half bits up to 4\.5 with mul1 alone, not {bits} bits of {codebook}"):
            Exl3(bits, codebook)
    bad = random_weight((128, 128), Exl3(4), 0)
    bad.svh[3] = float("nan")
    assert list(bad.problems(module)) == [f"{module}.svh has 1 scales that are not finite"]


def test_it_is_written_as_it_was_read(published: Path, tmp_path: Path) -> None:
    export_checkpoint(published, "exl3", tmp_path / "again")
    first, second = PackedCheckpoint.open(published), PackedCheckpoint.open(tmp_path / "again")
    assert first.modules == second.modules
    for module in first.modules:
        assert first.packed_weight(module).digest() == second.packed_weight(module).digest()
    with pytest.raises(SchemeError, match="--format dense"):
        export_checkpoint(published, "compressed-tensors", tmp_path / "others")
