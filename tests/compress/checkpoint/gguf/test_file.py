"""GGUF files: written here and read by `gguf`, the other way round, and damaged ones, which are refused in one line."""

import random
import re
import struct

import numpy as np
import pytest
import torch

from compress.checkpoint.gguf.file import GGUFFile
from compress.checkpoint.gguf.metadata import INT32, TEXT, metadata_bytes, text_bytes
from compress.checkpoint.gguf.types.base import BLOCK_TYPES
from compress.checkpoint.gguf.writer import NewTensor, header_bytes, write_gguf
from compress.common.errors import CheckpointError

gguf = pytest.importorskip("gguf")

METADATA = {
    "general.architecture": "llama",
    "general.name": "größe",
    "llama.block_count": 2,
    "llama.big": 2**40,
    "llama.negative": -7,
    "llama.rope.freq_base": 1e4,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "ü", ""],
    "tokenizer.ggml.scores": [0.5, -1.0, 2.0],
    "tokenizer.ggml.token_type": [1, 3, 6],
}


def new_tensor(name: str, kind: str, shape: tuple[int, ...], seed: int = 0) -> NewTensor:
    block_type = BLOCK_TYPES[kind]
    size = (*shape[:-1], block_type.row_bytes(shape[-1]))
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return NewTensor(name, block_type, shape, lambda: data)


def tensors() -> list[NewTensor]:
    return [
        new_tensor("token_embd.weight", "q4_0", (5, 64)),
        new_tensor("blk.0.attn_q.weight", "q6_k", (3, 256)),
        new_tensor("output_norm.weight", "f32", (9,)),
        new_tensor("experts", "q8_0", (2, 3, 32)),
    ]


@pytest.fixture
def written(tmp_path):
    write_gguf(tmp_path / "model.gguf", METADATA, tensors())
    return tmp_path / "model.gguf"


def test_metadata_and_blocks_survive_writing_and_reading(written):
    file = GGUFFile.open(written)
    assert METADATA.items() <= file.metadata.items()
    assert list(file.tensors) == [tensor.name for tensor in tensors()]
    for tensor in tensors():
        assert file.tensors[tensor.name].shape == tensor.shape
        assert torch.equal(file.blocks(tensor.name), tensor.blocks())
    file.release()
    assert torch.equal(file.blocks("experts"), tensors()[3].blocks())


def test_gguf_reads_what_is_written_here(written):
    reader = gguf.GGUFReader(written)
    for key, value in METADATA.items():
        assert reader.fields[key].contents() == value
    for stored, tensor in zip(reader.tensors, tensors(), strict=True):
        assert (stored.name, tuple(reversed(stored.shape.tolist()))) == (tensor.name, tensor.shape)
        assert stored.data.tobytes() == tensor.blocks().numpy().tobytes()


def test_what_gguf_writes_is_read_here(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["x", "y"])
    writer.add_array("nested", [1, 2])
    writer.add_custom_alignment(64)
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("output_norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "model.gguf")
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["tokenizer.ggml.tokens"] == ["x", "y"]
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(file.values("blk.0.ffn_up.weight").numpy(), expected)
    assert np.array_equal(file.values("output_norm.weight").numpy(), values[0])


def test_equal_input_gives_equal_bytes(tmp_path, written):
    write_gguf(tmp_path / "again.gguf", METADATA, tensors())
    assert (tmp_path / "again.gguf").read_bytes() == written.read_bytes()


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail() -> torch.Tensor:
        raise ValueError("no blocks")

    with pytest.raises(ValueError, match="no blocks"):
        write_gguf(tmp_path / "model.gguf", METADATA, [NewTensor("a", BLOCK_TYPES["f32"], (1,), fail)])
    assert not list(tmp_path.iterdir())


def with_header(path, metadata: bytes, keys: int, entries: bytes, count: int, data: bytes = b"", version: int = 3):
    start = b"GGUF" + struct.pack("<IQQ", version, count, keys) + metadata + entries
    path.write_bytes(start.ljust(-(-len(start) // 32) * 32, b"\0") + data)
    return path


def entry(name: str, sizes: tuple[int, ...], code: int, offset: int) -> bytes:
    return text_bytes(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, code, offset)


DAMAGED = {
    "no magic": (lambda path: path.write_bytes(b"GGML" + bytes(60)), "does not begin with GGUF"),
    "empty": (lambda path: path.write_bytes(b""), "does not begin with GGUF"),
    "version 1": (lambda path: with_header(path, b"", 0, b"", 0, version=1), "version 1 is not read"),
    "big-endian": (lambda path: with_header(path, b"", 0, b"", 0, version=0x03000000), "a big-endian file"),
    "huge key count": (lambda path: with_header(path, b"", 2**62, b"", 0), "metadata keys, which"),
    "huge tensor count": (lambda path: with_header(path, b"", 0, b"", 2**62), "tensors, which"),
    "huge array": (
        lambda path: with_header(path, text_bytes("a") + struct.pack("<IIQ", 9, INT32, 2**61), 1, b"", 0),
        "numbers in 'a', which",
    ),
    "huge list of texts": (
        lambda path: with_header(path, text_bytes("a") + struct.pack("<IIQ", 9, TEXT, 2**61), 1, b"", 0),
        "values in 'a', which",
    ),
    "arrays of arrays": (
        lambda path: with_header(
            path, text_bytes("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 99, 1, b"", 0
        ),
        "unknown type 9",
    ),
    "unknown value type": (
        lambda path: with_header(path, text_bytes("a") + struct.pack("<IQ", 77, 0), 1, b"", 0),
        "unknown type 77",
    ),
    "key twice": (
        lambda path: with_header(path, metadata_bytes({"a": 1}) * 2, 2, b"", 0),
        "the metadata key 'a' twice",
    ),
    "alignment": (
        lambda path: with_header(path, metadata_bytes({"general.alignment": 24}), 1, b"", 0),
        "alignment is 24",
    ),
    "no dimension": (lambda path: with_header(path, b"", 0, entry("a", (), 0, 0) + bytes(8), 1), "0 dimensions"),
    "size zero": (lambda path: with_header(path, b"", 0, entry("a", (0, 4), 0, 0), 1), r"shape \[4, 0\]"),
    "overflowing shape": (
        lambda path: with_header(path, b"", 0, entry("a", (2**32, 2**32), 0, 0), 1),
        "impossible shape",
    ),
    "unknown tensor type": (lambda path: with_header(path, b"", 0, entry("a", (4,), 99, 0), 1), "type number 99"),
    "half a block": (lambda path: with_header(path, b"", 0, entry("a", (48,), 2, 0), 1), "not whole blocks of 32"),
    "offset": (lambda path: with_header(path, b"", 0, entry("a", (1,), 0, 4), 1, bytes(64)), "not a multiple of 32"),
    "past the end": (lambda path: with_header(path, b"", 0, entry("a", (9,), 0, 0), 1, bytes(35)), "truncated: 'a'"),
    "overlap": (
        lambda path: with_header(path, b"", 0, entry("a", (9,), 0, 0) + entry("b", (9,), 0, 32), 2, bytes(99)),
        "'b' overlaps 'a'",
    ),
    "name twice": (
        lambda path: with_header(path, b"", 0, entry("a", (1,), 0, 0) + entry("a", (1,), 0, 32), 2, bytes(99)),
        "tensor 'a' twice",
    ),
    "not UTF-8": (
        lambda path: with_header(path, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 7, 1), 1, b"", 0),
        "not UTF-8",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_with_the_reason(tmp_path, case):
    damage, reason = DAMAGED[case]
    damage(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=reason) as refusal:
        GGUFFile.open(tmp_path / "model.gguf")
    assert refusal.value.remedy
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "none.gguf"))):
        GGUFFile.open(tmp_path / "none.gguf")


def read_all(path) -> None:
    file = GGUFFile.open(path)
    for name in file.tensors:
        file.values(name)


def test_every_truncation_is_refused(tmp_path, written):
    data, cut = written.read_bytes(), tmp_path / "cut.gguf"
    stored = GGUFFile.open(written).tensors
    end = max(each.begin + each.nbytes for each in stored.values())  # only padding follows
    header = len(header_bytes(METADATA, tensors()))
    for length in [*range(0, header, 7), *range(header, end, 61)]:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            GGUFFile.open(cut)


def test_flipped_bytes_are_read_or_refused(tmp_path, written):
    data, header = written.read_bytes(), len(header_bytes(METADATA, tensors()))
    choose, flipped = random.Random(0), tmp_path / "flipped.gguf"
    outcomes = set()
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(choose.choice((1, 1, 2, 8))):
            changed[choose.randrange(4, header)] = choose.choice((0, 1, 127, 255, choose.randrange(256)))
        flipped.write_bytes(changed)
        try:
            read_all(flipped)
            outcomes.add("read")
        except CheckpointError as error:
            outcomes.add("refused" if "\n" not in str(error) else str(error))
    assert outcomes == {"read", "refused"}
