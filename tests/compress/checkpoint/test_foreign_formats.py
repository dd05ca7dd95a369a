"""GPTQ v1/v2 and AWQ GEMM checkpoints built by hand, one element at a time, from their published layouts."""

import json

import pytest
import torch
from safetensors.torch import save_file

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int, Scheme
from compress.common.errors import CheckpointError

ROWS, COLUMNS = 32, 64  # outputs, inputs
MODULE = "model.layers.0.mlp.up_proj"
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def stream_words(codes: list[int], bits: int) -> list[int]:
    """Little-endian bit stream of one line of codes, as signed 32-bit words."""
    stream = sum(code << (index * bits) for index, code in enumerate(codes))
    words = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(len(codes) * bits // 32)]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def awq_words(outputs: list[int]) -> list[int]:
    words = []
    for start in range(0, len(outputs), 8):
        word = sum(outputs[start + output] << (4 * nibble) for nibble, output in enumerate(AWQ_NIBBLES))
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def codes_and_zeros(bits: int, groups: int, symmetric: bool) -> tuple[list[list[int]], list[list[int]]]:
    codes = [[(7 * o + 3 * i + o * i) % 2**bits for i in range(COLUMNS)] for o in range(ROWS)]
    zeros = [[2 ** (bits - 1) if symmetric else (5 * o + g) % 2**bits for g in range(groups)] for o in range(ROWS)]
    return codes, zeros


def scales(groups: int) -> torch.Tensor:
    return (torch.arange(groups * ROWS).view(groups, ROWS) / 64 - 3).to(torch.float16)


def int32(words: list[list[int]]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32)


def save(folder, tensors: dict[str, torch.Tensor], block: dict | None, file_name="model.safetensors", legacy=False):
    folder.mkdir(parents=True, exist_ok=True)
    full = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file({**full, f"{MODULE}.bias": torch.ones(ROWS)}, folder / file_name)
    config = {"model_type": "llama", "torch_dtype": "float16"}
    if legacy:
        (folder / "quantize_config.json").write_text(json.dumps(block))
    elif block:
        config["quantization_config"] = block
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def zero_words(zeros: list[int], bits: int, offset: int) -> list[int]:
    """Words of zero points, as GPTQModel writes v1: 1 less in all fields of a word at once, so that a 0 borrows from
    the next field; fields of 3 bits, which cross words, one by one."""
    if bits == 3:
        return stream_words([(zero - offset) % 8 for zero in zeros], bits)
    ones = offset * sum(1 << place for place in range(0, 32, bits))
    return [(word - ones + 2**31) % 2**32 - 2**31 for word in stream_words(zeros, bits)]


def gptq_tensors(bits: int, group_size: int, symmetric: bool, zero_offset: int) -> dict[str, torch.Tensor]:
    groups = COLUMNS // group_size
    codes, zeros = codes_and_zeros(bits, groups, symmetric)
    columns = [stream_words([codes[o][i] for i in range(COLUMNS)], bits) for o in range(ROWS)]
    lines = [[zeros[o][g] for o in range(ROWS)] for g in range(groups)]
    return {
        "qweight": int32(columns).T,
        "qzeros": int32([zero_words(line, bits, zero_offset) for line in lines]),
        "scales": scales(groups),
        "g_idx": torch.tensor([i // group_size for i in range(COLUMNS)], dtype=torch.int32),
    }


def assert_reads(folder, scheme: Scheme) -> None:
    weight = PackedCheckpoint.open(folder).packed_weight(MODULE)
    groups = scheme.num_groups(COLUMNS)
    codes, zeros = codes_and_zeros(scheme.bits, groups, bool((weight.zero_points == scheme.zero).all()))
    assert weight.qweight.tolist() == codes
    assert weight.zero_points.tolist() == zeros
    assert torch.equal(weight.scales, scales(groups).T)
    assert weight.scheme == scheme
    assert PackedCheckpoint.open(folder).tensor(f"{MODULE}.bias").tolist() == [1.0] * ROWS


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("version", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq(tmp_path, bits, symmetric, version, offset):
    block = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric, "checkpoint_format": version}
    save(tmp_path, gptq_tensors(bits, 32, symmetric, offset), {**block, "desc_act": False, "meta": {"any": 1}})
    assert_reads(tmp_path, Int(bits, 32, symmetric))


def test_gptq_v1_that_stores_v2_zeros(tmp_path):
    """A widely used writer said v1 and stored v2; symmetric codes show it."""
    block = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}
    save(tmp_path, gptq_tensors(4, 32, True, 0), block)
    assert_reads(tmp_path, Int(4, 32))


def test_gptq_v1_of_3_bits_as_gptqmodel_wrote_it_before_7_0(tmp_path):
    """It took 1 from the places of fields in the third word of three, then the second, then the first."""
    block = {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": True, "checkpoint_format": "gptq"}
    tensors = gptq_tensors(3, 32, True, 0)
    ones = 0b00100100100100100100100100100100, 0b10010010010010010010010010010010, 0b01001001001001001001001001001001
    words = [
        [(word - one + 2**31) % 2**32 - 2**31 for word, one in zip(line, ones, strict=True)]
        for line in tensors["qzeros"].tolist()
    ]
    save(tmp_path, tensors | {"qzeros": int32(words)}, block)
    assert_reads(tmp_path, Int(3, 32))
    words[0][1] += 4
    save(tmp_path, tensors | {"qzeros": int32(words)}, block)
    with pytest.raises(CheckpointError, match="not all 4"):
        PackedCheckpoint.open(tmp_path).packed_weight(MODULE)


def test_gptq_per_channel_in_an_old_folder(tmp_path):
    """Separate quantize_config.json, a file name of its own, group size -1."""
    tensors = gptq_tensors(4, COLUMNS, True, 1)
    tensors.pop("g_idx")
    save(tmp_path, tensors, {"bits": 4, "group_size": -1, "sym": True}, "gptq_model-4bit--1g.safetensors", legacy=True)
    assert_reads(tmp_path, Int(4, None))


def test_gptq_dynamic_overrides(tmp_path):
    block = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
    dynamic = {r"-:.*lm_head": {}, r"+:.*\.up_proj$": {"bits": 8, "group_size": 32}, r".*": {"bits": 2}}
    save(tmp_path, gptq_tensors(8, 32, True, 1), {**block, "dynamic": dynamic})
    assert_reads(tmp_path, Int(8, 32))


def test_gptq_activation_order_is_refused(tmp_path):
    tensors = gptq_tensors(4, 32, True, 1)
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    save(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True})
    with pytest.raises(CheckpointError, match=f"^{MODULE} .*desc_act"):
        PackedCheckpoint.open(tmp_path).weight(MODULE)


def test_gptq_sorted_index_with_desc_act_is_read(tmp_path):
    block = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    save(tmp_path, gptq_tensors(4, 32, True, 1), block)
    assert_reads(tmp_path, Int(4, 32))


@pytest.mark.parametrize(("group_size", "symmetric"), [(32, False), (64, True), (-1, False)])
def test_awq(tmp_path, group_size, symmetric):
    groups = 1 if group_size < 0 else COLUMNS // group_size
    codes, zeros = codes_and_zeros(4, groups, symmetric)
    tensors = {
        "qweight": int32([awq_words([codes[o][i] for o in range(ROWS)]) for i in range(COLUMNS)]),
        "qzeros": int32([awq_words([zeros[o][g] for o in range(ROWS)]) for g in range(groups)]),
        "scales": scales(groups),
    }
    block = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    save(tmp_path, tensors, block)
    assert_reads(tmp_path, Int(4, None if group_size < 0 else group_size, symmetric=False))


def test_awq_as_older_tools_and_gptqmodel_describe_it(tmp_path):
    codes, zeros = codes_and_zeros(4, 2, False)
    tensors = {
        "qweight": int32([awq_words([codes[o][i] for o in range(ROWS)]) for i in range(COLUMNS)]),
        "qzeros": int32([awq_words([zeros[o][g] for o in range(ROWS)]) for g in range(2)]),
        "scales": scales(2),
    }
    old = save(tmp_path / "old", tensors, None)
    (old / "quant_config.json").write_text('{"zero_point": true, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}')
    assert_reads(old, Int(4, 32, symmetric=False))
    block = {"quant_method": "awq", "method": "awq", "bits": 4, "group_size": 32, "sym": False, "pack_dtype": "int32"}
    new = save(tmp_path / "new", tensors, {**block, "format": "gemm", "checkpoint_format": "gemm"})
    assert_reads(new, Int(4, 32, symmetric=False))
    save(new, tensors, {**block, "format": "gemv", "checkpoint_format": "gemv"})
    with pytest.raises(CheckpointError, match="layout 'gemv'"):
        PackedCheckpoint.open(new)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"checkpoint_format": "gptq_p"}, "'gptq_p'"),
        ({"format": "marlin"}, "'marlin'"),
        ({"pack_dtype": "int16"}, "int16 words"),
    ],
)
def test_other_words_of_gptq_are_refused(tmp_path, entry, problem):
    save(tmp_path, gptq_tensors(3, 32, True, 0), {"quant_method": "gptq", "bits": 3, "group_size": 32, **entry})
    with pytest.raises(CheckpointError, match=problem):
        PackedCheckpoint.open(tmp_path)


def test_unreadable_kinds_are_named(tmp_path):
    tensors = gptq_tensors(4, 32, True, 1)
    save(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"})
    with pytest.raises(CheckpointError, match="4-bit"):
        PackedCheckpoint.open(tmp_path)
    save(tmp_path, tensors, {"quant_method": "exl9", "bits": 4})
    with pytest.raises(CheckpointError, match="'exl9'"):
        PackedCheckpoint.open(tmp_path)
    save(tmp_path, {**tensors, "scales": scales(3)}, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(CheckpointError, match=rf" {MODULE} .*, 3\)"):
        PackedCheckpoint.open(tmp_path).weight(MODULE)
