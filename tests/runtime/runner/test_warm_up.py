import pytest
import torch
from tiny_models import save_tiny_model

from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner, largest_steps, warm_up

CONFIG = RuntimeConfig(
    num_blocks=32, block_size=4, max_num_seqs=5, max_num_batched_tokens=50, prefill_chunk=20, max_model_len=64
)


def lengths(config: RuntimeConfig = CONFIG, num_blocks: int = 32, longest: int = 64) -> list[list[int]]:
    return [[entry.num_tokens for entry in plan.entries] for plan in largest_steps(config, num_blocks, longest)]


def test_the_largest_steps_of_a_configuration():
    assert lengths() == [[20, 20, 10], [1] * 5]
    assert lengths(longest=16) == [[16, 16, 16, 2], [1] * 5]
    assert lengths(num_blocks=3) == [[12], [1] * 3]


def test_every_token_has_a_block_of_its_own_sequence():
    for plan in largest_steps(CONFIG, 32, 64):
        blocks = [block for entry in plan.entries for block in entry.sequence.block_ids]
        assert len(set(blocks)) == len(blocks)
        assert all(len(entry.sequence.block_ids) * 4 >= entry.num_tokens for entry in plan.entries)


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache": "int8", "kv_sinks": 2, "kv_residual_length": 8}, {"attention_window": 8}]
)
def test_they_run(options, tmp_path):
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    config = RuntimeConfig(**{"num_blocks": 32, "block_size": 4, "max_num_seqs": 5, "prefill_chunk": 20} | options)
    runner, steps = build_runner(decoder, config), []
    execute = runner.execute
    runner.execute = lambda plan: steps.append(execute(plan))
    warm_up(runner, config)
    assert [len(step.tokens) for step in steps] == [5, 5]
    assert all(token.token_id >= 0 for step in steps for tokens in step.tokens.values() for token in tokens)


def test_no_memory_for_them_is_a_refusal(tmp_path):
    decoder = load_model(save_tiny_model(tmp_path / "model"), dtype="float32")
    runner = build_runner(decoder, CONFIG)

    def execute(plan):
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner.execute = execute
    with pytest.raises(ToolkitError, match=r"--kv-memory .*--max-num-seqs"):
        warm_up(runner, CONFIG)
