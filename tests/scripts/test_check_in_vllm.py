"""The check of a checkpoint in vLLM: what counts as random, and what it says where vLLM is missing."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor


@pytest.mark.parametrize(
    ("dtype", "is_random"),
    [(torch.bfloat16, True), (torch.int32, True), (torch.uint8, True), (torch.float8_e4m3fn, True)],
)
def test_what_torch_leaves_uninitialized_is_found(dtype: torch.dtype, is_random: bool) -> None:
    from check_in_vllm import is_random as found

    torch.use_deterministic_algorithms(True)
    try:
        values = torch.empty(4, 8, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found(values) == is_random
    values[1:].copy_(torch.ones(3, 8))
    assert found(values) == is_random
    values[:1].copy_(torch.ones(1, 8))
    assert not found(values)


@pytest.mark.parametrize(
    "values", [torch.empty(0), torch.zeros(3), torch.full((2, 2), 255, dtype=torch.int32)], ids=str
)
def test_other_values_are_not(values: Tensor) -> None:
    from check_in_vllm import is_random

    assert not is_random(values)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    from check_in_vllm import main

    assert main(["folder"]) == 2
    assert "pip install vllm==" in capsys.readouterr().err
