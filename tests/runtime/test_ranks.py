"""Processes that share a model give the tokens of one, in float64, whatever the engine does to be fast."""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ending_rank import STATUS
from engines import drain
from rank_answers import AMPLE, EXACT, SAMPLINGS, SCARCE, answers, pack_demo, plain, ranks
from shared_store import SharedStore

from compress.common.cli import bundled_path
from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.step import RunnerLostError
from runtime.engine.wire import start_process
from runtime.llm import LLM


@pytest.fixture(scope="module")
def folder_of(shared_store: SharedStore) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if name == "packed":
            return shared_store.folder("ranks", "packed", pack_demo) / "packed"
        return bundled_path(name)

    return cache(find)


@pytest.mark.parametrize("name", ["demo", "packed", pytest.param("demo-mixture", marks=pytest.mark.full)])
def test_two_ranks_give_the_tokens_of_one(folder_of: Callable[[str], Path], name: str) -> None:
    options = {"block_size": 4, "num_blocks": SCARCE, "prefill_chunk": 7, "speculative_model": "ngram"}
    llm = LLM(folder_of(name), RuntimeConfig(**EXACT, **options, tensor_parallel_size=2))
    assert answers(llm) == plain(folder_of(name))
    stats, metrics = llm.engine.scheduler.stats, llm.engine.metrics
    assert stats.num_prefix_hits
    assert stats.num_preemptions + llm.engine.scheduler.pool.num_evictions
    assert metrics.spec_decode_num_draft_tokens_total or name == "packed"  # random weights repeat no words


@pytest.mark.full
@pytest.mark.parametrize("name", ["demo", "packed", "demo-mixture"])
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize(("blocks", "chunk", "drafter"), [(AMPLE, 64, ""), (SCARCE, 7, "ngram"), (AMPLE, 7, "demo")])
def test_more_ranks_give_the_tokens_of_one(
    folder_of: Callable[[str], Path], name: str, count: int, blocks: int, chunk: int, drafter: str
) -> None:
    options = {"block_size": 4, "num_blocks": blocks, "prefill_chunk": chunk, "speculative_model": drafter}
    llm = LLM(folder_of(name), RuntimeConfig(**EXACT, **options, tensor_parallel_size=count))
    assert answers(llm) == plain(folder_of(name))


def test_a_rank_that_dies_is_an_error_within_seconds() -> None:
    before = ranks()
    llm = LLM("demo", RuntimeConfig(**EXACT, tensor_parallel_size=2))
    (rank,) = set(ranks()) - set(before)
    llm.engine.add_request([5, 6, 7], SAMPLINGS[0])
    llm.engine.step()
    os.kill(rank, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RunnerLostError):
        drain(llm.engine)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("end", "said"), [("end_by_status", f"ended with status {STATUS}"), ("end_by_signal", "was killed by signal 9")]
)
def test_a_rank_that_dies_before_it_connects_is_an_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    """Others would wait for it until operations time out, which is an hour."""
    monkeypatch.setattr("runtime.ranks.start_process", lambda _, theirs: start_process(f"ending_rank:{end}", theirs))
    found = queue.SimpleQueue[Any]()

    def load() -> None:
        try:
            LLM("demo", RuntimeConfig(**EXACT, tensor_parallel_size=2))
        except RunnerLostError as error:
            found.put(error)

    threading.Thread(target=load, daemon=True).start()
    assert f"rank 1 {said}" in str(found.get(timeout=30))


def test_ranks_end_with_their_engine() -> None:
    before = ranks()
    llm = LLM("demo", RuntimeConfig(**EXACT, tensor_parallel_size=2))
    assert set(ranks()) - set(before)
    del llm
    assert not set(ranks()) - set(before)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_model": "self:2bit"},
        {"speculative_model": "ngram-tree"},
        {"kv_cache": "int4", "kv_residual_length": 8},
        {"tensor_parallel_size": 5},
    ],
    ids=str,
)
def test_what_ranks_cannot_do_is_refused(options: dict[str, Any]) -> None:
    before = ranks()
    with pytest.raises(ToolkitError) as error:
        LLM("demo", RuntimeConfig(**(EXACT | {"tensor_parallel_size": 2} | options)))
    assert error.value.remedy
    assert not isinstance(error.value, RunnerLostError)
    assert not set(ranks()) - set(before)
