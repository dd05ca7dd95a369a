"""In float64: few blocks, host memory behind them and faults give the tokens of ample blocks."""

import pytest
from covering import covering
from engines import Tokens, answer_all, small_engine
from fault_injection import FaultInjection

from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.decoder import Decoder
from runtime.runner.runner import build_runner

PROMPTS = [[(7 * i + k % 3) % 112 for i in range(6 + 5 * k)] for k in range(6)]
SAMPLINGS = [SamplingParams(max_tokens=40, temperature=k % 2, seed=k, n=1 + k % 2, ignore_eos=True) for k in range(6)]
SCARCE = {"num_blocks": 24, "max_model_len": 96, "prefill_chunk": 7}


def answers(engine: Engine) -> Tokens:
    return answer_all(engine, zip(map(str, range(6)), PROMPTS, SAMPLINGS, strict=True))


@pytest.fixture(scope="module", params=[{}, {"attention_window": 20, "attention_sinks": 3}], ids=["all", "window"])
def options(request: pytest.FixtureRequest) -> dict[str, int]:
    """Tokens that each token attends to."""
    return request.param


@pytest.fixture(scope="module")
def wanted(tiny: Decoder, options: dict[str, int]) -> Tokens:
    return answers(small_engine(tiny, num_blocks=400, prefix_caching=False, **options))


@pytest.mark.parametrize(("host_blocks", "fault_seed"), covering([0, 5, 200], [None, 0, 1]))
def test_tokens_of_few_blocks_are_those_of_many(
    tiny: Decoder, options: dict[str, int], wanted: Tokens, host_blocks: int, fault_seed: int | None
) -> None:
    faults = None if fault_seed is None else FaultInjection(fault_seed, preempt=0.05, evict=0.1)
    block_bytes = 4 * build_runner(tiny, RuntimeConfig()).memory.token_bytes
    engine = small_engine(tiny, faults=faults, kv_offload_bytes=host_blocks * block_bytes, **SCARCE, **options)
    assert engine.runner.num_host_blocks == host_blocks
    assert answers(engine) == wanted
    assert engine.scheduler.stats.num_preemptions > 0
    assert (engine.scheduler.pool.tier.num_restores > 0) == (host_blocks > 0)
    assert answers(engine) == wanted, "once more, with what is cached now"
