"""Blocks that are loaded one by one and replayed with captured arguments compute what the whole model computes."""

import pytest
import torch

from compress.checkpoint.config import read_config
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import CheckpointError, NumericsError
from compress.common.workers import Workers
from compress.pipeline.block import fill, load_block, release
from compress.pipeline.capture import capture_inputs, run_all
from compress.pipeline.skeleton import open_skeleton

CPU = torch.device("cpu")
ONE = Workers([CPU])
TOKENS = torch.randint(10, 8000, (5, 24), generator=torch.Generator().manual_seed(1))


def open_model(path):
    return open_skeleton(path, read_config(path)), TensorFiles.open(path)


@torch.no_grad()
def stream(path, micro_batch: int) -> torch.Tensor:
    """Logits of TOKENS, with one block in memory at a time."""
    skeleton, files = open_model(path)
    inputs = capture_inputs(skeleton, files, TOKENS, micro_batch, CPU, torch.float32)
    for index in range(skeleton.num_blocks):
        block = load_block(skeleton, files, index, set(), CPU, torch.float32)
        inputs.hidden = run_all(block, inputs, index, ONE)
        release(block.module)
        assert all(parameter.is_meta for parameter in block.module.parameters())
    fill(skeleton.model.model.norm, "model.norm", files, CPU, torch.float32)
    fill(skeleton.model.lm_head, "lm_head", files, CPU, torch.float32)
    return skeleton.model.lm_head(skeleton.model.model.norm(inputs.hidden))


FULL = [pytest.param("glm_moe_dsa", marks=pytest.mark.full)]


@pytest.mark.parametrize("family", ["llama", "llama_biased", "mistral", "qwen2", "qwen3", "phi3", *FULL])
@torch.no_grad()
def test_streamed_blocks_give_the_whole_models_logits(tiny_model, family: str) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model(family, dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(TOKENS).logits
    torch.testing.assert_close(stream(path, micro_batch=2), expected, rtol=1e-4, atol=1e-4)


def test_micro_batch_changes_nothing_but_rounding(tiny_model) -> None:
    path = tiny_model("qwen2", dtype=torch.float32)
    torch.testing.assert_close(stream(path, 1), stream(path, 5), rtol=1e-4, atol=1e-4)


def test_equal_arguments_are_kept_once(tiny_model) -> None:
    skeleton, files = open_model(tiny_model())
    inputs = capture_inputs(skeleton, files, TOKENS, 1, CPU, torch.float32)
    assert len({id(call) for calls in inputs.calls for call in calls}) == skeleton.num_blocks
    first, second = (calls[0].kwargs["position_embeddings"] for calls in (inputs.calls[0], inputs.calls[1]))
    assert first is second


def test_capture_puts_the_blocks_back(tiny_model) -> None:
    skeleton, files = open_model(tiny_model())
    before = list(skeleton.blocks)
    capture_inputs(skeleton, files, TOKENS, 2, CPU, torch.float32)
    assert list(skeleton.blocks) == before
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_misshapen_tensor_is_refused(tiny_model) -> None:
    path = tiny_model()
    skeleton = open_skeleton(path, read_config(path) | {"intermediate_size": 512})
    skeleton.model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.empty(512, 128, device="meta"))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight .*\[256, 128\] .*\[512, 128\]"):
        load_block(skeleton, TensorFiles.open(path), 0, set(), CPU, torch.float32)


def test_overflow_in_a_block_names_the_block(tiny_model) -> None:
    skeleton, files = open_model(tiny_model())
    inputs = capture_inputs(skeleton, files, TOKENS, 2, CPU, torch.float16)
    block = load_block(skeleton, files, 1, set(), CPU, torch.float16)
    block.linear("mlp.down_proj").weight.data.fill_(6e4)
    with pytest.raises(NumericsError, match=r"model.layers.1"):
        run_all(block, inputs, 1, ONE)
