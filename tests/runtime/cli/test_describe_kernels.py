"""Lines that a server prints about its kernels."""

from pathlib import Path

import pytest
from tiny_models import save_tiny_model

from runtime.cli.serve import describe_engine
from runtime.core.config import RuntimeConfig
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_every_linear_has_a_kernel_and_a_reason(tmp_path: Path, kernels: str) -> None:
    config = RuntimeConfig(num_blocks=32, max_num_seqs=5)
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32", kernels=kernels)
    lines = list(describe_engine(Engine(build_runner(decoder, config), None, config)))
    for name in ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj", "head"):
        (line,) = [line for line in lines if f"{name}: " in line or f"{name} (" in line]
        assert ", kernel " in line
        assert "(" in line
