"""Experts that are stored as one tensor, by names of their own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_configs import SIZES

from compress.checkpoint.expert_files import split_experts, split_stacks
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import CheckpointError
from compress.models.stacks import Slice, Stack

E, ROWS, COLUMNS = 3, 4, 5


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_slices_of_a_stack(transposed: bool, interleaved: bool, tmp_path: Path) -> None:
    parts = torch.randn(E, 2, ROWS, COLUMNS)
    rows = parts.transpose(1, 2).flatten(1, 2) if interleaved else parts.flatten(1, 2)
    stored = rows.mT if transposed else rows
    save_file({"all": stored.contiguous(), "alone": torch.ones(2)}, tmp_path / "model.safetensors")
    stack = Stack("all", ("gate", "up"), transposed, interleaved)
    slices = {f"{expert}.{name}": Slice(stack, expert, i) for expert in range(E) for i, name in enumerate(stack.parts)}
    files = split_stacks(TensorFiles.open(tmp_path), slices)
    assert files.names() == sorted([*slices, "alone"])
    assert len(files) == len(slices) + 1
    assert "all" not in files.names()
    assert sum(files.tensor_nbytes(name) for name in files) == files.nbytes
    for name, place in slices.items():
        assert files.shape(name) == (ROWS, COLUMNS)
        assert torch.equal(files.tensor(name), parts[place.expert, place.part])


def test_a_stack_holds_as_many_experts_as_the_config_says(tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    save_file({name: torch.zeros(3, 8, 4)}, tmp_path / "model.safetensors")
    config = {"model_type": "granitemoe", **SIZES, "num_local_experts": 4}
    with pytest.raises(CheckpointError, match="4 experts"):
        split_experts(TensorFiles.open(tmp_path), config)
