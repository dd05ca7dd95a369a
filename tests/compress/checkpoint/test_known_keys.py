"""Keys of `quantization_config` as tools write them, and the refusal of keys that nothing reads."""

from pathlib import Path
from typing import Any

import pytest
from folders import change_config
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.config import QUANTIZATION_KEY, read_config
from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.formats.known_keys import check_keys
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.errors import CheckpointError

GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "observer": "mse", "observer_kwargs": {}, "actorder": "static"},
}
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llm-compressor 0.14.0.1": (
        "compressed-tensors",
        {"config_groups": {"group_0": GROUP}, "version": "0.19.0", "sparsity_config": {"format": "dense"}},
    ),
    "GPTQModel 7.7.0": (
        "gptq",
        {"bits": 4, "method": "gptq", "format": "gptq", "desc_act": True, "meta": {"mse": 2.0}, "dynamic": {"-:a": {}}},
    ),
    "AutoRound 0.16.1, gptq": (
        "gptq",
        {"bits": 4, "data_type": "int", "iters": 200, "provider": "auto-round", "static_kv_granularity": "tensor"},
    ),
    "AutoRound 0.16.1, awq": ("awq", {"bits": 4, "sym": False, "to_quant_block_names": "model.layers", "seqlen": 128}),
    "AutoAWQ 0.2.9": ("awq", {"w_bit": 4, "q_group_size": 64, "version": "gemm", "do_fuse": False}),
    "DeepSeek": ("fp8", {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "transformers 5.24": ("bitsandbytes", {"_load_in_4bit": True, "llm_int8_threshold": 6.0, "load_in_4bit": True}),
    "exllamav3 1.4.2": (
        "exl3",
        {"version": "1.4.2", "mtp_bits": 3, "original_quantization_config": {"bits": 8}, "vision_bits": 4},
    ),
    "exllamav3 1.6": ("exl3", {"version": "1.6.5", "bits": 4.0, "calibration": {"rows": 250}, "out_scales": "always"}),
}
"""Keys by the tools that write them."""
UNREAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gptq", {"rotation": "hadamard"}),
    ("gptq", {"activation": {"bits": 8}}),
    ("gptq", {"data_type": "mx_fp"}),
    ("gptq", {"dynamic": {"+:.*": {"bits": 8, "adapter": {"rank": 8}}}}),
    ("gptq", {"rotation_config": {"block_size": 32}}),
    ("gptq", {"static_attention_dtype": "fp8"}),
    ("awq", {"act_bits": 8}),
    ("fp8", {"expert_dtype": "fp4"}),
    ("compressed-tensors", {"moe_sparsity_config": {"method": "novice"}}),
    ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    ("compressed-tensors", {"config_groups": {"g": GROUP | {"output_activations": {"num_bits": 8}}}}),
    ("compressed-tensors", {"config_groups": {"g": GROUP | {"weights": {"num_bits": 4, "companding": 2.0}}}}),
    ("exl3", {"rotation_block": 64}),
)


@pytest.mark.parametrize("tool", WRITTEN)
def test_keys_that_tools_write_are_accepted(tool: str) -> None:
    format, written = WRITTEN[tool]
    check_keys(CONTAINERS[format], {"quant_method": format, **written})


@pytest.mark.parametrize(("format", "unread"), UNREAD, ids=lambda case: str(case)[:40])
def test_a_key_that_nothing_reads_is_refused(format: str, unread: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as refused:
        check_keys(CONTAINERS[format], {"quant_method": format, **unread})
    assert refused.value.remedy


def test_an_opened_checkpoint_is_checked(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack_model(save_tiny_model(tmp_path / "dense"), packed, lambda module: Int(4, 16))
    block = read_config(packed)[QUANTIZATION_KEY]
    change_config(packed, quantization_config=block | {"companding": 2.0})
    with pytest.raises(CheckpointError, match="companding"):
        PackedCheckpoint.open(packed)
