"""Adapters over a model that several processes share give the tokens of one process, in float64."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import save_adapter, shapes_of
from rank_answers import EXACT, SYSTEM, pack_demo
from shared_store import SharedStore

from compress.common.cli import bundled_path
from compress.models.cuts import Cut
from runtime.adapters.layers import cut_factors
from runtime.backends.adapted_linear import Factors
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
NAMES = ("", "a", "b", "c", "a")
OPTIONS: dict[str, Any] = {"enable_lora": True, "block_size": 4, "num_blocks": 400, "prefill_chunk": 7}


@pytest.fixture(scope="module")
def folder_of(shared_store: SharedStore) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if name == "packed":
            return shared_store.folder("ranks", "packed", pack_demo) / "packed"
        return bundled_path(name)

    return cache(find)


def answers(llm: LLM, adapters: dict[str, Path]) -> list[tuple[list[int], list[float]]]:
    """Answers with all adapters at once, and again: some have left the device and the other ranks."""
    for name, path in adapters.items():
        llm.load_adapter(name, path)
    found = [llm.generate([SYSTEM] * len(NAMES), GREEDY, NAMES) for _ in range(2)]
    assert not any(answer.error for both in found for answer in both)
    return [(answer.token_ids, [each.logprob for each in answer.logprobs]) for both in found for answer in both]


@pytest.mark.parametrize(
    ("name", "sizes", "kept"),
    [
        ("packed", {"tensor_parallel_size": 2}, 1),
        pytest.param("demo", {"tensor_parallel_size": 2}, 32, marks=pytest.mark.full),
        pytest.param("demo", {"tensor_parallel_size": 3}, 32, marks=pytest.mark.full),
        pytest.param("demo-mixture", {"tensor_parallel_size": 2}, 32, marks=pytest.mark.full),
        ("demo", {"pipeline_parallel_size": 2}, 32),
        pytest.param("packed", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 1, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ranks_give_the_tokens_of_one_process(
    folder_of: Callable[[str], Path], tmp_path: Path, name: str, sizes: dict[str, int], kept: int
) -> None:
    folder = folder_of(name)
    single = LLM(folder, RuntimeConfig(**EXACT, **OPTIONS))
    shapes = shapes_of(single.engine.runner.decoder.config.spec, single.engine.runner.adapters.modules)
    some = {module: shape for module, shape in shapes.items() if module.endswith(("k_proj", "o_proj", "down_proj"))}
    adapters = {
        "a": save_adapter(tmp_path / "a", shapes, rank=4, size=0.05),
        "b": save_adapter(tmp_path / "b", some, rank=3, seed=1, size=0.2),
        "c": save_adapter(tmp_path / "c", dict(list(shapes.items())[:3]), rank=2, seed=2, size=0.5),
    }
    wanted = answers(single, adapters)
    shared = LLM(folder, RuntimeConfig(**EXACT, **OPTIONS, **sizes, max_loras=1, max_cpu_loras=kept))
    assert sorted(shared.engine.runner.adapters.modules) == sorted(shapes)
    found = answers(shared, adapters)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, logprobs), (_, numbers) in zip(found, wanted, strict=True):
        assert logprobs == pytest.approx(numbers, abs=1e-9)
    assert len({tuple(logprobs) for _, logprobs in wanted[: len(NAMES) - 1]}) == len(NAMES) - 1


def test_factors_are_cut_as_their_matrix() -> None:
    factors = Factors(torch.arange(24.0).view(2, 12), torch.arange(20.0).view(10, 2))
    assert cut_factors(factors, None) is factors
    rows = cut_factors(factors, Cut((slice(0, 2), slice(6, 9))))
    assert torch.equal(rows.up, factors.up[[0, 1, 6, 7, 8]])
    assert rows.down is factors.down
    columns = cut_factors(factors, Cut((), slice(4, 12), (1, 2)))
    assert torch.equal(columns.down, factors.down[:, 5:10]), "columns that other ranks multiply are theirs"
