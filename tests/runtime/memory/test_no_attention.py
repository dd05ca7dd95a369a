"""Models without attention: all memory is for states, and what is about keys and values is refused or left out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import answer_all, small_engine
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from compress.checkpoint.config import read_config, write_config
from compress.common.errors import ToolkitError
from compress.evaluate.kv_cache import check_measurable
from runtime.core.batch import build_batch
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import STREAM_LENGTH
from runtime.core.request import Request, SamplingParams, Sequence
from runtime.core.step import ScheduledSequence
from runtime.memory.advice import inspect
from runtime.memory.plan import plan_memory
from runtime.model.loader import load_model
from runtime.runner.step_buffers import StepBuffers

CPU = torch.device("cpu")
GIB = 2**30
MEMORY = 2**20
CONFIG = RuntimeConfig(kv_memory_bytes=MEMORY, max_num_seqs=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("mamba2") / "model", "mamba2", **VARIANTS["mamba2"])
    config = read_config(folder)
    del config["max_position_embeddings"]  # as published
    write_config(folder, config)
    return folder


def test_all_memory_is_for_states(folder: Path) -> None:
    config = load_model(folder).config
    plan = plan_memory(config, 0, 4, CONFIG)
    assert plan.token_bytes == plan.kv_bytes == 0
    assert plan.states.num_slots == MEMORY // config.state_bytes(4)
    assert plan.max_model_len == STREAM_LENGTH
    assert plan.blocks_per_sequence <= plan.num_blocks
    hosted = plan_memory(config, 0, 4, replace(CONFIG, kv_offload_bytes=MEMORY))
    assert hosted.num_host_blocks == hosted.num_blocks
    assert hosted.states.num_host_slots == MEMORY // config.state_bytes(4)
    assert hosted.host_bytes <= MEMORY


def test_block_tables_do_not_grow_with_the_length_of_a_sequence(folder: Path) -> None:
    engine = small_engine(load_model(folder), num_state_slots=2)
    sequence = Sequence(Request("long", tuple(range(3, 43)), SamplingParams(), 0), list(range(3, 43)))
    sequence.block_ids = list(range(10))
    batch = build_batch([ScheduledSequence(sequence, 39, 1)], 4, CPU, engine.runner.memory.reach)
    assert [group.blocks.tolist() for group in batch.groups] == [[9]]
    assert StepBuffers(engine.runner.decoder, engine.runner.memory).blocks_each == 1


REFUSED = {
    "--kv-cache": {"kv_cache": "int8"},
    "--attention-window": {"attention_window": 64},
    "host memory": {"kv_offload_bytes": 5},
}


@pytest.mark.parametrize("remedy", REFUSED)
def test_options_without_a_meaning_are_refused(folder: Path, remedy: str) -> None:
    with pytest.raises(ToolkitError, match=remedy):
        plan_memory(load_model(folder).config, 0, 4, replace(CONFIG, **REFUSED[remedy]))


def test_no_form_of_keys_and_values_is_measured(folder: Path) -> None:
    with pytest.raises(ToolkitError, match="kv_cache"):
        check_measurable(read_config(folder), 0, "cpu")


def test_the_report_counts_requests_of_any_length(folder: Path) -> None:
    report = inspect(folder, "dense", CONFIG, GIB)
    found = report.as_json()
    assert found["fits"]
    assert found["kv_formats"] == {}
    assert len(set(found["concurrency"].values())) == 1
    assert found["state_slots"] == report.capacity.room // found["state_bytes_per_sequence"]
    assert f"{report.capacity.states.max_running:,} requests" in "\n".join(report.lines())
    assert not inspect(folder, "dense", CONFIG, 2**20).as_json()["fits"]


def test_states_come_back_from_host_memory(folder: Path) -> None:
    """Other prompts push the states of the first one out of the device; then it is asked for again."""
    decoder, greedy = load_model(folder, dtype="float64"), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = {"num_blocks": None, "kv_memory_bytes": 7 * decoder.config.state_bytes(8), "kv_offload_bytes": MEMORY}
    engine = small_engine(decoder, prefix_caching=True, max_num_seqs=2, **options)
    prompts = [[first, *range(3, 40)] for first in range(50, 56)]
    first = answer_all(engine, [("first", prompts[0], greedy)])["first", 0]
    answer_all(engine, [(str(prompt[0]), prompt, greedy) for prompt in prompts[1:]])
    assert answer_all(engine, [("again", prompts[0], greedy)])["again", 0] == first
    assert engine.scheduler.blocks.states.pool.tier.num_restores > 0
