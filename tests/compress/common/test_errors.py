"""Messages of errors: whole sentences, whatever their parts end with."""

import pytest
import torch

from compress.common.errors import CheckpointError, OutOfMemoryError, ToolkitError, is_out_of_memory


@pytest.mark.parametrize("end", ["", ".", " ", ". "])
def test_each_sentence_has_one_full_stop(end: str) -> None:
    assert str(ToolkitError(f"a is 1{end}", f"Set it to 2{end}")) == "a is 1. Set it to 2."
    assert str(ToolkitError(f"a is 1{end}", "Did you mean b?")) == "a is 1. Did you mean b?"


def test_unknown_names_come_with_the_nearest_and_all() -> None:
    error = CheckpointError.unknown("device", "cud", ["auto", "cpu", "cuda"], "Use --device", "Ask for help")
    assert isinstance(error, CheckpointError)
    assert "'cud'" in error.problem
    assert "'cuda'?" in error.remedy
    assert "--device: auto, cpu, cuda. Ask" in error.remedy
    assert "?" not in ToolkitError.unknown("device", None, ["auto"]).remedy


def test_missing_paths_are_named() -> None:
    error = CheckpointError.missing("model folder", "nowhere", "Check the path")
    assert isinstance(error, CheckpointError)
    assert "nowhere" in error.problem
    assert error.remedy == "Check the path"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), True),
        (ImportError("failed to map segment from shared object"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
    ids=repr,
)
def test_lack_of_memory_is_recognized(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    assert "8 GB" in OutOfMemoryError("keys need 8 GB", "Allow less").problem
