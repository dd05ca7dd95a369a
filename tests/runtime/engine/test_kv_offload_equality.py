"""In float64: few blocks, host memory behind them and faults give the tokens of ample blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from covering import covering
from fault_injection import FaultInjection
from poisoned_memory import poison
from tiny_models import save_tiny_model

from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

PROMPTS = [[(7 * i + k % 3) % 112 for i in range(6 + 5 * k)] for k in range(6)]
SAMPLINGS = [SamplingParams(max_tokens=40, temperature=k % 2, seed=k, n=1 + k % 2, ignore_eos=True) for k in range(6)]
SCARCE = {"num_blocks": 24, "max_model_len": 96, "prefill_chunk": 7}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return load_model(path, dtype="float64")


def make_engine(decoder: Decoder, faults: FaultInjection | None = None, **options: object) -> Engine:
    config = RuntimeConfig(**({"device": "cpu", "dtype": "float64", "block_size": 4} | options))
    return Engine(build_runner(decoder, config), None, config, before_step=faults)


def answers(engine: Engine) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.add_request(prompt, sampling, str(index))
    while engine.has_work:
        for delta in engine.step():
            assert not delta.error
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        engine.scheduler.check()
    return found


@pytest.fixture(scope="module", params=[{}, {"attention_window": 20, "attention_sinks": 3}], ids=["all", "window"])
def options(request: pytest.FixtureRequest) -> dict[str, int]:
    """Tokens that each token attends to."""
    return request.param


@pytest.fixture(scope="module")
def wanted(decoder: Decoder, options: dict[str, int]) -> dict[tuple[str, int], list[int]]:
    return answers(make_engine(decoder, num_blocks=400, prefix_caching=False, **options))


@pytest.mark.parametrize(("host_blocks", "fault_seed"), covering([0, 5, 200], [None, 0, 1]))
def test_tokens_of_few_blocks_are_those_of_many(
    decoder: Decoder,
    options: dict[str, int],
    wanted: dict[tuple[str, int], list[int]],
    host_blocks: int,
    fault_seed: int | None,
) -> None:
    block_bytes = 4 * build_runner(decoder, RuntimeConfig()).memory.token_bytes
    faults = None if fault_seed is None else FaultInjection(fault_seed, preempt=0.05, evict=0.1)
    engine = make_engine(decoder, faults, kv_offload_bytes=host_blocks * block_bytes, **SCARCE, **options)
    assert engine.runner.num_host_blocks == host_blocks
    poison(engine.runner.pages.memory)
    assert answers(engine) == wanted
    assert engine.scheduler.stats.num_preemptions > 0
    assert (engine.scheduler.pool.tier.num_restores > 0) == (host_blocks > 0)
    assert answers(engine) == wanted, "once more, with what is cached now"
