"""Lines that a server prints about its kernels and its GPU, with a fake GPU in the runner."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import random_weight, save_tiny_model
from unrecorded_steps import capture_nothing

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from runtime.backends.base import Target
from runtime.backends.registry import choose_attention
from runtime.backends.triton import device as triton_device
from runtime.core.config import RuntimeConfig
from runtime.describe import describe_engine, describe_gpu, join_equal
from runtime.engine.engine import Engine
from runtime.memory.plan import plan_memory
from runtime.model.loader import load_model
from runtime.model.weight_reader import WeightReader
from runtime.runner.runner import build_runner

GIB = 2**30


@pytest.fixture
def engine(tmp_path) -> Engine:
    config = RuntimeConfig(num_blocks=32, max_num_seqs=5)
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    return Engine(build_runner(decoder, config), None, config)


def test_a_cpu_has_nothing_to_say(engine):
    assert describe_gpu(engine.runner, engine.config) == []
    (attention,) = [line for line in describe_engine(engine) if line.startswith("attention")]
    assert attention.startswith("attention torch: gathers pages; cpu ")
    assert attention.endswith("layer by layer: torch computes no whole layers")


def test_memory_and_recorded_steps_of_a_gpu(engine):
    runner = engine.runner
    runner.capture_steps(capture_nothing)
    runner.memory = plan_memory(runner.decoder.config, GIB, 2, RuntimeConfig(), 4 * GIB)
    runner.decoder = replace(runner.decoder, device=torch.device("cuda"))
    lines = describe_gpu(engine.runner, RuntimeConfig().with_step_sizes(141 * GIB))
    assert "memory    weights  1.0 GiB" in lines
    assert any("what steps leave of 4.0 GiB after the weights" in line for line in lines)
    assert lines[-2].startswith("steps     of at most 8192 tokens, 2048 of one prompt (the default for 141 GiB")
    assert lines[-1].startswith("steps     of one token for each of 1, 2, 4, 5 sequences are captured")
    assert "of up to 512 tokens" in lines[-1]


def test_recorded_drafts_of_a_gpu(engine):
    runner = engine.runner
    runner.memory = replace(runner.memory, num_draft_tokens=5)
    runner.capture_steps(capture_nothing)
    runner.decoder = replace(runner.decoder, device=torch.device("cuda"))
    assert "sequences, with 1, 2, 4, 5 draft tokens or none, are captured" in describe_gpu(runner, engine.config)[-1]


def test_why_nothing_is_recorded(engine):
    runner = engine.runner
    runner.decoder = replace(runner.decoder, device=torch.device("cuda"))
    runner.graphs_reason = "layers run one by one: attention is plain torch"
    assert (
        describe_gpu(engine.runner, engine.config)[-1]
        == "steps     launched kernel by kernel: layers run one by one: attention is plain torch"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_device, "device_unsupported_reason", lambda device: "")
        chosen, _, reason = choose_attention(runner.decoder, runner.memory)
    assert (chosen.name, reason) == ("torch", "triton computes in 16 bits")


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_every_linear_has_a_kernel_and_a_reason(tmp_path: Path, kernels: str) -> None:
    config = RuntimeConfig(num_blocks=32, max_num_seqs=5)
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32", kernels=kernels)
    lines = list(describe_engine(Engine(build_runner(decoder, config), None, config)))
    for name in ("q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj", "head"):
        (line,) = [line for line in lines if re.search(rf" x (\S+_)?{re.escape(name)}[,: ]", line)]
        assert ", kernel " in line
        assert "(" in line


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_kernel_has_one_short_line_and_the_log_has_the_others(
    tmp_path: Path, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "runtime")
    checkpoint = PackedCheckpoint.open(demo_model_path())
    reader = WeightReader(checkpoint, Target(torch.device("cpu"), torch.bfloat16), kernels, {})
    for name in ("q_proj", "k_proj"):
        for _ in range(3):
            reader.prepare(random_weight((256, 256), Int(4, 128)), name)
    (line,) = join_equal(reader.description())
    assert "3 x q_proj, 3 x k_proj: " in line
    assert len(line) < 160
    full = [message for message in caplog.messages if "_proj" in message]
    assert len(full) == 2
    assert all(len(message) >= len(line.partition(": ")[2]) for message in full)
