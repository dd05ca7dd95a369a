"""Experts in host memory: a second device holds a few of them, and the model gives the same bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import answer_all, small_engine
from second_device import SECOND, OnSecond, SecondDevice
from tiny_configs import VARIANTS
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.device import format_bytes
from compress.common.errors import ToolkitError
from compress.common.files import REPORT_FILE
from runtime.backends.base import Target
from runtime.backends.mlp import Expert
from runtime.backends.torch.linear import DenseLinear
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import DecoderConfig, parse_config
from runtime.core.request import SamplingParams
from runtime.memory.advice import find_remedies
from runtime.memory.capacity import estimate
from runtime.memory.estimate import Weights
from runtime.memory.plan import explain
from runtime.model.decoder import Decoder
from runtime.model.expert_offload import ExpertOffload
from runtime.model.loader import DecoderLoader, load_model
from runtime.model.scoring import score
from runtime.model.weight_reader import WeightReader

CPU = torch.device("cpu")
TOKENS = torch.randint(3, 112, (2, 9), generator=torch.Generator().manual_seed(3))
COUNTS = [5, 0, 7, 7, 1, 2, 9, 3]


def save_counted(folder: Path, family: str) -> Path:
    """A model of eight experts, with a report that counts tokens in its last block only."""
    save_tiny_model(folder, family, **VARIANTS[family])
    block = {"block": "model.layers.1", "experts": [{"tokens": COUNTS, "added": [0] * 8, "least": 1}]}
    (folder / REPORT_FILE).write_text(json.dumps({"blocks": [{"block": "model.layers.0"}, block]}))
    return folder


def offloaded(folder: Path, num_slots: int, kernels: str = "auto") -> Decoder:
    """Both memories are the host's."""
    checkpoint = PackedCheckpoint.open(folder)
    config = parse_config(checkpoint.config)
    offload = ExpertOffload(num_slots, CPU, {"model.layers.1": tuple(COUNTS)})
    return DecoderLoader(config, WeightReader(checkpoint, Target(CPU, torch.float64), kernels, {}), offload).load()


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_the_same_bits_as_with_all_experts_on_the_device(family: str, tmp_path: Path) -> None:
    folder = save_counted(tmp_path / "model", family)
    expected = score(load_model(folder, dtype="float64"), TOKENS)
    for num_slots in (1, 5):
        decoder = offloaded(folder, num_slots)
        assert torch.equal(score(decoder, TOKENS), expected)
        slots = decoder.expert_slots[-1]
        assert slots.cache.num_slots == num_slots
        assert num_slots == 1 or 0 < slots.cache.hits < slots.cache.queries


def test_packed_experts_that_are_dequantized_on_every_call(tmp_path: Path) -> None:
    dense, packed = save_counted(tmp_path / "dense", "qwen3_moe"), tmp_path / "packed"
    pack_model(dense, packed, lambda module: Int(4, 32) if "experts" in module else None)
    expected = score(load_model(packed, dtype="float64", kernels="reference"), TOKENS)
    assert torch.equal(score(offloaded(packed, 2, "reference"), TOKENS), expected)


def test_an_engine_answers_alike_and_counts_what_it_found(tmp_path: Path) -> None:
    folder = save_counted(tmp_path / "model", "qwen3_moe")
    requests = [(str(row), TOKENS[row].tolist(), SamplingParams(temperature=0, max_tokens=4)) for row in (0, 1)]
    decoder = offloaded(folder, 3)
    engine = small_engine(decoder)
    assert answer_all(engine, requests) == answer_all(small_engine(load_model(folder, dtype="float64")), requests)
    caches = [slots.cache for slots in decoder.expert_slots]
    metrics = engine.metrics
    assert metrics.expert_cache_queries_total == sum(cache.queries for cache in caches)
    assert 0 < metrics.expert_cache_hits_total < metrics.expert_cache_queries_total
    host = engine.runner.memory.expert_bytes
    assert host == sum(slots.host_nbytes for slots in decoder.expert_slots)
    assert any(format_bytes(host) in line for line in explain(engine.runner.memory))


def test_the_popular_experts_of_calibration_come_first(tmp_path: Path) -> None:
    folder = save_counted(tmp_path / "model", "qwen3_moe")
    first, last = offloaded(folder, 3).expert_slots
    assert set(first.cache.slots) == {0, 1, 2}
    assert list(last.cache.slots) == [6, 2, 3]


def test_the_estimate_counts_both_memories(tmp_path: Path) -> None:
    folder = save_counted(tmp_path / "model", "qwen2_moe")
    checkpoint = PackedCheckpoint.open(folder)
    weights = Weights(checkpoint, parse_config(checkpoint.config), Target(CPU, torch.float64), "auto", 2**40, 3)
    decoder = offloaded(folder, 3)
    (slots,) = decoder.expert_slots
    assert decoder.nbytes == load_model(folder, dtype="float64").nbytes - slots.host_nbytes + slots.nbytes
    assert weights.expert_bytes == slots.host_nbytes == slots.nbytes * 8 // 3
    everything = replace(weights, moe_expert_cache=None).prepared()
    assert weights.prepared() == everything - slots.host_nbytes + slots.nbytes
    assert replace(weights, moe_expert_cache=8).expert_bytes == 0


def test_advice_for_a_gpu_names_the_option(tmp_path: Path) -> None:
    folder = save_counted(tmp_path / "model", "qwen3_moe")
    checkpoint = PackedCheckpoint.open(folder)
    model, config = parse_config(checkpoint.config), RuntimeConfig(block_size=16, max_num_seqs=1)

    def advised(device: str, slots: int | None) -> list[str]:
        target = Target(torch.device(device), torch.float16)
        weights = Weights(checkpoint, model, target, "auto", 2**40, slots)
        ample = estimate(model, config, "float16", weights.prepared(), 2**29)
        memory = ample.memory_bytes - ample.room + 2**17  # so little is left that the experts matter
        now = estimate(model, config, "float16", weights.prepared(), memory)
        return [each.command for each in find_remedies(folder, weights, config, now) if "expert" in each.command]

    assert [command.rpartition(" ")[2] for command in advised("cuda", None)] == ["4"]
    assert advised("cuda", 4) == advised("cpu", None) == []


def test_experts_stay_in_host_memory_and_slots_on_the_device() -> None:
    with SecondDevice() as device:
        numbers = [torch.randn(4, 6, 8).to(SECOND), torch.randn(4, 8, 6).to(SECOND)]
        offload = ExpertOffload(2, SECOND)
        experts = [
            offload.expert(Expert(DenseLinear(up, None), DenseLinear(down, None)), 4)
            for up, down in zip(*numbers, strict=True)
        ]
        assert not any(isinstance(each.gate_up.weight, OnSecond) for each in experts)
        device.arrivals.clear()
        slots = offload.slots("model.layers.0", experts)
        assert [type(each.down.weight) for each in slots.slots] == [OnSecond, OnSecond]
        for index, expert in slots.one_by_one([3, 0, 2]):
            assert torch.equal(expert.gate_up.weight.numbers, numbers[0][index].numbers)
            assert torch.equal(expert.down.weight.numbers, numbers[1][index].numbers)


@pytest.mark.parametrize(("family", "device"), [("qwen3_moe", "cpu"), ("llama", "meta")])
def test_where_it_is_of_no_use_it_is_refused(family: str, device: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    config: DecoderConfig = parse_config(PackedCheckpoint.open(folder).config)
    with pytest.raises(ToolkitError, match="--moe-expert-cache"):
        ExpertOffload.of(folder, config.spec, 4, torch.device(device))
    if device == "cpu":
        with pytest.raises(ToolkitError, match="--moe-expert-cache"):
            load_model(folder, device=device, moe_expert_cache=4)


def test_experts_of_unlike_forms_are_refused() -> None:
    sizes = (6, 6, 6, 5)
    experts = [Expert(DenseLinear(torch.zeros(n, 8), None), DenseLinear(torch.zeros(8, 3), None)) for n in sizes]
    with pytest.raises(ToolkitError, match="--moe-expert-cache"):
        ExpertOffload(2, CPU).slots("model.layers.0", experts)
