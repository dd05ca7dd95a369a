"""Ranks that share the residual stream of steps by tokens give the tokens of one process, in float64."""

from typing import Any

import pytest
from rank_answers import AMPLE, EXACT, SCARCE, answers, plain, ranks, record_exchanges

from compress.common.cli import bundled_path
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.llm import LLM

STAGES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("demo", {"tensor_parallel_size": 2}),
        ("demo-mixture", {"tensor_parallel_size": 3} | EXPERTS),
        pytest.param("demo", {"tensor_parallel_size": 3}, marks=pytest.mark.full),
        pytest.param("demo", {"tensor_parallel_size": 4}, marks=pytest.mark.full),
        pytest.param("demo-mixture", {"tensor_parallel_size": 2} | EXPERTS, marks=pytest.mark.full),
        pytest.param("demo-mixture", {"tensor_parallel_size": 3}, marks=pytest.mark.full),
        pytest.param("demo", STAGES, marks=pytest.mark.full),
        pytest.param("demo-mixture", STAGES | EXPERTS, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("least", [1, pytest.param(6, marks=pytest.mark.full)])
def test_tokens_are_those_of_one(
    model: str, sizes: dict[str, int], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, prefixes that are found, steps of few tokens with drafts, and preemption."""
    sent = record_exchanges(monkeypatch)
    options = {"block_size": 4, "num_blocks": SCARCE, "prefill_chunk": 7, "speculative_model": "ngram"}
    llm = LLM(bundled_path(model), RuntimeConfig(**EXACT, **options, **sizes, sequence_parallel_min_tokens=least))
    assert answers(llm) == plain(bundled_path(model))
    assert llm.engine.scheduler.stats.num_prefix_hits
    assert any(len(set(each)) > 1 for each in sent), "numbers of tokens that do not divide"


def test_steps_of_whole_prompts_are_shared_and_others_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = record_exchanges(monkeypatch)
    sizes = {"tensor_parallel_size": 2, "sequence_parallel_min_tokens": 12}
    llm = LLM(bundled_path("demo"), RuntimeConfig(**EXACT, block_size=4, num_blocks=AMPLE, **sizes))
    llm.generate([[5] * 11])
    assert not sent
    llm.generate([[6] * 13])
    assert sent == [[7, 6]] * (1 + 2 * llm.engine.runner.decoder.config.num_layers)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({}, "one rank"), ({"tensor_parallel_size": 2, "enable_lora": True}, "adapters")],
    ids=str,
)
def test_what_cannot_share_tokens_is_refused(options: dict[str, Any], problem: str) -> None:
    before = ranks()
    with pytest.raises(ToolkitError, match=f"{problem}.*--sequence-parallel-min-tokens"):
        LLM(bundled_path("demo"), RuntimeConfig(**EXACT, **options, sequence_parallel_min_tokens=2))
    assert set(ranks()) == set(before)
