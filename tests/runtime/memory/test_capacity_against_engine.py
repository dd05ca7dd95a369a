"""Estimates without loading equal the memory of a loaded engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.weights import Activations, Int, Scheme
from compress.common.cli import demo_model_path
from runtime.backends.registry import is_fast
from runtime.core.attention_window import AttentionWindow
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import MemoryPlan
from runtime.llm import load_engine
from runtime.memory.advice import LEAST_GAIN, Report, inspect
from runtime.memory.capacity import Capacity, activation_bytes, estimate
from runtime.memory.losses import KEYS, WEIGHTS, grade

GIB = 2**30
CONFIG = RuntimeConfig(device="cpu", kv_memory_bytes=4 * 2**20)
SCHEMES: dict[str, Callable[[str], Scheme | None]] = {
    "w4": lambda module: Int(4, 32),
    "w4 but v": lambda module: None if "v_proj" in module else Int(4, 32),
    "mixed": lambda module: Int(8, None, True, Activations.INT8) if "mlp" in module else Int(3, 32, symmetric=False),
    "w8": lambda module: Int(8, 32),
}


def check_against_engine(path: Path, config: RuntimeConfig) -> Report:
    report = inspect(path, "", config, GIB)
    engine, _ = load_engine(path, config)
    runner = engine.runner
    assert report.capacity.weight_bytes == runner.decoder.nbytes
    assert isinstance(report.plan, MemoryPlan)
    assert report.plan == runner.memory
    assert report.capacity.token_bytes * runner.num_blocks * runner.block_size == runner.pages.memory.nbytes
    stores = [store for store in (runner.cache.sinks, runner.cache.residual_window) if store is not None]
    assert runner.memory.exact.nbytes == sum(part.nbytes for store in stores for part in (*store.keys, *store.values))
    return report


@pytest.mark.parametrize("dtype", ["auto", "float32", "float64"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_demo_model(dtype: str, kernels: str) -> None:
    report = check_against_engine(demo_model_path(), replace(CONFIG, dtype=dtype, linear_backend=kernels))
    assert report.stored_bytes == pytest.approx(13.64e6, rel=0.01)


@pytest.mark.parametrize("kv_cache", ["fp8", "int8", "k8v4", "int4"])
def test_forms_of_keys_and_values(kv_cache: str) -> None:
    exact = inspect(demo_model_path(), "", CONFIG, GIB).capacity
    small = check_against_engine(demo_model_path(), replace(CONFIG, kv_cache=kv_cache)).capacity
    assert small.tokens > 1.5 * exact.tokens
    beside = replace(CONFIG, kv_cache=kv_cache, kv_sinks=4, kv_residual_length=16, kv_memory_bytes=16 * 2**20)
    assert check_against_engine(demo_model_path(), beside).capacity.tokens < small.tokens


@pytest.mark.parametrize("kind", SCHEMES)
def test_packed_models(tmp_path: Path, kind: str) -> None:
    dense = save_tiny_model(tmp_path / "dense", dtype=torch.bfloat16, tie_word_embeddings=False)
    pack_model(dense, tmp_path / "packed", SCHEMES[kind])
    for path in (dense, tmp_path / "packed"):
        copy_tokenizer(path)
        check_against_engine(path, CONFIG)


def test_sliding_windows_hold_less(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "m", "mistral", torch.bfloat16, sliding_window=32, max_position_embeddings=4096)
    copy_tokenizer(path)
    report = check_against_engine(path, replace(CONFIG, prefill_chunk=32))
    capacity = report.capacity
    assert capacity.concurrency(4096) == capacity.concurrency(2048) > capacity.num_blocks // 256


def copy_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_bytes((demo_model_path() / "tokenizer.json").read_bytes())


def test_what_fits_is_what_the_runner_accepts() -> None:
    report = inspect(demo_model_path(), "", CONFIG, GIB)
    capacity = report.capacity
    config = replace(CONFIG, kv_memory_bytes=capacity.kv_bytes, max_num_seqs=capacity.concurrency(2048))
    plan = inspect(demo_model_path(), "", config, GIB).plan
    assert plan.num_blocks // (2048 // 16) == capacity.concurrency(2048)
    assert capacity.kv_bytes * (1 + 1 / 6) <= capacity.room < capacity.kv_bytes * (1 + 1 / 6) + 2**20


def test_remedies_are_ordered_and_each_gives_more() -> None:
    report = inspect(demo_model_path(), "", replace(CONFIG, dtype="float32", linear_backend="reference"), 600 * 2**20)
    commands = [remedy.command for remedy in report.remedies]
    dtype = ["--dtype bfloat16"] if is_fast(torch.bfloat16) else []
    marks = ["--kv-memory", "--max-model-len 1024", *dtype, "--bits 8"]
    assert all(any(mark in command for command in commands) for mark in marks)
    places = [next(i for i, command in enumerate(commands) if mark in command) for mark in marks]
    assert places == sorted(places)
    capacity = report.capacity
    served = report.plan.num_blocks * report.plan.block_size
    for remedy in report.remedies:
        assert remedy.tokens > served or remedy.concurrency > capacity.concurrency(capacity.context), remedy


def test_promised_weights_of_fewer_bits_are_those_of_the_packed_model(tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", dtype=torch.bfloat16, hidden_size=128, intermediate_size=256)
    copy_tokenizer(dense)
    pack_model(dense, tmp_path / "packed", lambda module: Int(4, 128))
    copy_tokenizer(tmp_path / "packed")
    whole = inspect(dense, "", CONFIG, GIB).capacity
    memory = GIB - whole.room + 2**20
    promised = next(r for r in inspect(dense, "", CONFIG, memory).remedies if "--bits 4" in r.command)
    packed = inspect(tmp_path / "packed", "", CONFIG, memory)
    assert promised.tokens == packed.capacity.tokens
    assert not any("--bits 4" in remedy.command for remedy in packed.remedies)


@pytest.mark.parametrize("memory", [385 * 2**20, 400 * 2**20, GIB])
def test_losses_are_those_measured_and_every_loss_gains(memory: int) -> None:
    report = inspect(demo_model_path(), "", CONFIG, memory)
    lossy = [remedy for remedy in report.remedies if "compress " in remedy.command or "--kv-cache" in remedy.command]
    measured = {f"--kv-cache {name}": kl for name, kl in KEYS.items()}
    forms = [(form.scheme, form.kl) for form in WEIGHTS if isinstance(form.scheme, Int)]
    measured |= {f"--bits {scheme.bits} --group-size {scheme.group_size}": kl for scheme, kl in forms}
    for remedy in lossy:
        assert remedy.tokens > LEAST_GAIN * report.capacity.tokens
        assert [f"{kl:.4f}" in remedy.cost for option, kl in measured.items() if option in remedy.command] == [True]
    assert any("--bits" in remedy.command for remedy in lossy) == (memory < GIB)


def test_grades_of_losses() -> None:
    words = [grade(form.kl).partition(" loss")[0] for form in WEIGHTS]
    assert len({*words}) == 4
    assert words[-1] not in words[:-1]


def test_too_little_memory_is_said() -> None:
    report = inspect(demo_model_path(), "dense", CONFIG, 100 * 2**20)
    assert report.capacity.room < 0
    assert report.capacity.tokens == 0
    assert not report.as_json()["fits"]
    assert any("it does not fit" in line for line in report.lines())


def test_concurrency_counts_whole_blocks() -> None:
    capacity = Capacity(2000, 500, 100, 10, "float32", 64, 4, AttentionWindow(), 16, 32, process_bytes=0)
    assert capacity.num_blocks == int(1400 / (1 + 1 / 4) / 160) == 7
    assert [capacity.concurrency(length) for length in (1, 16, 17, 64)] == [7, 7, 3, 1]


def test_activations_grow_with_the_step(tmp_path: Path) -> None:
    model = inspect(demo_model_path(), "", CONFIG, GIB).model
    small = activation_bytes(model, replace(CONFIG, max_num_batched_tokens=64, max_num_seqs=4), 2)
    large = activation_bytes(model, replace(CONFIG, max_num_batched_tokens=4096), 2)
    assert small < large / 10
    assert estimate(model, CONFIG, "bfloat16", 0, GIB).activation_bytes == activation_bytes(model, CONFIG, 2)
