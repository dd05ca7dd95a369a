"""The check of a checkpoint in vLLM: what counts as random, and what it says where vLLM is missing."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_what_torch_leaves_uninitialized_is_found(dtype: torch.dtype) -> None:
    from check_in_vllm import is_random

    torch.use_deterministic_algorithms(True)
    try:
        values = torch.empty(4, 8, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(False)
    assert is_random(values)
    values[1:].copy_(torch.ones(3, 8))
    assert is_random(values)
    values[:1].copy_(torch.ones(1, 8))
    assert not is_random(values)


@pytest.mark.parametrize("values", [torch.empty(0), torch.zeros(3), torch.full((2, 2), 255, dtype=torch.int32)])
def test_other_values_are_not(values: Tensor) -> None:
    from check_in_vllm import is_random

    assert not is_random(values)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    from check_in_vllm import main

    assert main(["folder"]) == 2
    assert "pip install vllm==" in capsys.readouterr().err
