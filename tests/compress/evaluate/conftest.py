"""A packed model and what its codes say, made once in a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from folders import change_config, private_copy
from shared_store import SharedStore

from compress.checkpoint.weights import Int, Scheme
from compress.checkpoint.writer import export_checkpoint
from compress.recipe import Recipe
from compress.stages.quantize import QuantizeStage

MakePacked = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="session")
def make_packed(packed_run: Callable[..., Path], shared_store: SharedStore) -> MakePacked:
    """Rounds the blocks of a random model in float32 to nearest: `(packed, the same weights dequantized)`."""

    def make(scheme: Scheme = Int(4, 32), **options) -> tuple[Path, Path]:
        packed = packed_run(Recipe((QuantizeStage("rtn", scheme),)), dtype=torch.float32, **options)
        key = (scheme, *sorted(options.items()))
        return packed, shared_store.folder("dequantized", key, lambda out: export_checkpoint(packed, "dense", out))

    return make


@pytest.fixture
def make_recorded(make_packed: MakePacked, tmp_path: Path) -> Callable[..., Path]:
    """A packed model whose config.json says something else of its origin."""

    def make(**block) -> Path:
        folder = private_copy(make_packed()[0], tmp_path / "packed")
        return change_config(folder, compression_config={"format_version": 1, **block})

    return make
