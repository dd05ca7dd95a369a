"""In float64, adapted sequences are those of a model with merged weights, whatever else is in their steps."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from lora_files import GREEDY, adapted_engine, answers, merged_engine, save_adapter, shapes_of
from tiny_configs import VARIANTS
from tiny_models import pack_model, save_tiny_model

from compress.checkpoint.weights import Int
from runtime.core.request import RequestOptions
from runtime.engine.engine import Engine

PROMPT = list(range(3, 20))
OTHER = list(range(30, 41))
NAMES = ("", "a", "b", "c")
CLOSE = 1e-9


def targets(folder: Path) -> dict[str, tuple[int, int]]:
    """Shapes of all linears of a model that adapters may change."""
    engine = adapted_engine(folder, {})
    return shapes_of(engine.runner.decoder.config.spec, engine.runner.adapters.modules)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with codes of 4 bits, and some layers that are dense."""
    root = tmp_path_factory.mktemp("adapters")
    save_tiny_model(root / "dense")
    pack_model(root / "dense", root / "packed", lambda name: None if "layers.1.mlp" in name else Int(4, 16))
    return root / "packed"


@pytest.fixture(scope="module")
def adapters(packed: Path) -> dict[str, Path]:
    """Three adapters: of all linears, of some in the place of fused ones, of one layer."""
    shapes, root = targets(packed), packed.parent
    some = {name: shape for name, shape in shapes.items() if name.endswith(("k_proj", "up_proj", "o_proj"))}
    one = {name: shape for name, shape in shapes.items() if "layers.1" in name}
    return {
        "a": save_adapter(root / "a", shapes, rank=4),
        "b": save_adapter(root / "b", some, rank=2, seed=1),
        "c": save_adapter(root / "c", one, rank=3, seed=2),
    }


@pytest.fixture(scope="module")
def expected(packed: Path, adapters: dict[str, Path]) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Answers to both prompts, of models with one adapter merged."""
    merged = {name: merged_engine(packed, adapters.get(name)) for name in NAMES}
    return {name: answers(engine, [("", PROMPT), ("", OTHER)]) for name, engine in merged.items()}


def check(engine: Engine, expected: dict[str, list[tuple[list[int], list[float]]]]) -> None:
    """All adapters and the model itself with both prompts in one batch."""
    found = answers(engine, [(name, prompt) for name in NAMES for prompt in (PROMPT, OTHER)])
    for (tokens, logprobs), (wanted, numbers) in zip(
        found, (answer for name in NAMES for answer in expected[name]), strict=True
    ):
        assert tokens == wanted
        assert logprobs == pytest.approx(numbers, abs=CLOSE)


def test_adapters_differ(expected: dict[str, list[tuple[list[int], list[float]]]]) -> None:
    assert len({tuple(answer[0]) for answers in expected.values() for answer in answers}) == 2 * len(NAMES)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_caching": False},
        {"prefill_chunk": 5},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 18},
        {"max_loras": 1},
        {"max_loras": 2, "max_cpu_loras": 2, "prefill_chunk": 3},
        {"kv_offload_bytes": 2**20, "num_blocks": 18},
    ],
    ids=str,
)
def test_a_mixed_batch_has_the_tokens_of_merged_weights(packed, adapters, expected, options) -> None:
    engine = adapted_engine(packed, adapters, **options)
    check(engine, expected)
    check(engine, expected)  # with cached prefixes
    assert (engine.scheduler.stats.num_preemptions > 0) == ("num_blocks" in options)
    if "num_blocks" not in options:  # few blocks keep no prefixes
        assert (engine.scheduler.stats.num_prefix_hits > 0) == options.get("prefix_caching", True)


def test_prefixes_are_shared_within_an_adapter_only(packed, adapters) -> None:
    engine = adapted_engine(packed, adapters)
    hits = []
    for name in (*NAMES, *NAMES):
        answers(engine, [(name, PROMPT)])
        hits.append(engine.scheduler.stats.num_prefix_hits)
    assert hits[: len(NAMES)] == [0] * len(NAMES)
    assert hits[len(NAMES) :] == [16, 32, 48, 64]


def test_watchers_of_the_prefix_cache_are_told_the_adapter(packed, adapters) -> None:
    engine, told = adapted_engine(packed, adapters), []
    engine.scheduler.pool.watcher = SimpleNamespace(stored=lambda *block: told.append(block), removed=lambda _: None)
    answers(engine, [("a", PROMPT[:8]), ("", PROMPT[:8])], replace(GREEDY, max_tokens=1))
    assert [(adapter, tokens) for _, _, tokens, _, adapter in told] == [
        (name, PROMPT[first : first + 4]) for name in ("a", "") for first in (0, 4)
    ]
    assert len({block_hash for block_hash, *_ in told}) == 4


def test_several_answers_to_a_prompt_are_adapted(packed, adapters) -> None:
    sampling = replace(GREEDY, temperature=1.0, n=3, seed=5)
    engine, merged = adapted_engine(packed, adapters), merged_engine(packed, adapters["b"])
    (found,), (wanted,) = answers(engine, [("b", PROMPT)], sampling), answers(merged, [("", PROMPT)], sampling)
    assert sorted(found[0]) == sorted(wanted[0])


def test_adapters_that_left_host_memory_are_read_again(packed, adapters, expected) -> None:
    engine = adapted_engine(packed, adapters, max_loras=1, max_cpu_loras=1)
    assert [engine.adapters.find(name) is not None for name in "abc"] == [False, False, True]
    for name in "abca":
        assert answers(engine, [(name, PROMPT)])[0][0] == expected[name][0][0]
        assert len(engine.runner.adapters.active) == 1
    assert engine.adapters.find("b") is None


def test_a_sequence_keeps_an_adapter_that_is_unloaded(packed, adapters, expected) -> None:
    engine = adapted_engine(packed, adapters)
    engine.add_request(PROMPT, GREEDY, "x", RequestOptions(adapter="a"))
    tokens = [token for delta in engine.step() for token in delta.token_ids]
    engine.adapters.unload("a")
    engine.adapters.load("a", adapters["b"])
    while engine.has_work:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
    assert tokens == expected["a"][0][0]
    assert answers(engine, [("a", PROMPT)])[0][0] == expected["b"][0][0]


FAST = ("llama", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [each if each in FAST else pytest.param(each, marks=pytest.mark.full) for each in VARIANTS]
)
def test_linears_of_every_family_are_adapted(family: str, tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense", family.partition(" ")[0], **VARIANTS[family])
    engine = adapted_engine(dense, {})
    shapes = shapes_of(engine.runner.decoder.config.spec, engine.runner.adapters.modules)
    assert len(shapes) >= 2 * len(engine.runner.decoder.layers)
    engine.adapters.load("a", save_adapter(tmp_path / "a", shapes, size=0.1))
    wanted = answers(merged_engine(dense, tmp_path / "a"), [("", PROMPT)])
    found = answers(engine, [("a", PROMPT), ("", OTHER)])
    assert found[0][0] == wanted[0][0]
    assert found[0][1] == pytest.approx(wanted[0][1], abs=CLOSE)
    assert found[1][0] == answers(merged_engine(dense, None), [("", OTHER)])[0][0]
