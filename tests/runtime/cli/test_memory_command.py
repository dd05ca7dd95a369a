"""`runtime memory` as a user runs it."""

import json
from pathlib import Path

from runtime_command import runtime_here


def test_text_says_what_fits_and_how_to_fit_more(tmp_path: Path) -> None:
    result = runtime_here("memory", "--memory", "1GiB", "--dtype", "float32", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for words in (
        "demo_model: dense bfloat16, 6 layers, context 2048",
        "1.0 GiB  as asked for",
        "Keys and values of one token, served as 16bit in float32:",
        "  16bit          6.0 KiB  32.00         174,762",
        "  int4             864 B   4.50       1,242,756",
        "requests of 2,048 tokens (the whole context)",
        "87376 tokens at",
        "To fit more, the cheapest first:",
        "--max-model-len 1024",
    ):
        assert words in result.stdout
    assert result.stderr == ""


def test_json_has_the_same_numbers(tmp_path: Path) -> None:
    result = runtime_here("memory", "--memory", "1GiB", "--dtype", "float32", "--json", cwd=tmp_path)
    found = json.loads(result.stdout)
    assert found["memory_bytes"] == 2**30
    assert found["kv_bytes_per_token"] == {"float64": 12288, "float32": 6144, "bfloat16": 3072, "float16": 3072}
    assert found["fits"] is True
    assert found["concurrency"]["2048"] == found["tokens"] // 2048
    used = found["weights_prepared_bytes"] + found["activation_bytes"] + found["process_bytes"]
    assert found["room_bytes"] == 2**30 - used
    assert found["kv_bytes"] == found["tokens"] * 6144
    # 6 layers, 2 heads of 64: codes, and float16 scale and offset of keys and of values.
    assert found["kv_formats"]["int4"]["bytes_per_token"] == 6 * 2 * (2 * 32 + 8)
    assert found["kv_formats"]["fp8"]["tokens_per_gib"] == 2**30 // (6 * 2 * (2 * 64 + 4))
    assert {"command", "cost", "effect", "tokens", "concurrency", "length"} == found["remedies"][0].keys()


def test_refusals(tmp_path: Path) -> None:
    for arguments, status, words in (
        (["nowhere"], 1, "model folder nowhere does not exist"),
        ([str(tmp_path)], 1, "model.safetensors does not exist"),
        (["--memory", "much"], 1, "is not a size"),
    ):
        result = runtime_here("memory", *arguments, cwd=tmp_path)
        assert result.returncode == status
        assert words in result.stderr.lower()
        assert "Traceback" not in result.stderr
