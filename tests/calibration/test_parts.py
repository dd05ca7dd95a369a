"""Mixtures as users write them: exact shares, the same for a seed, hashed and described."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibration.parts import Part, check_parts, parse_parts, share_out
from calibration.sequences import FEW_TOKENS, pack_parts, pack_sequences
from calibration.sources import load_texts
from compress.common.errors import DataError


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("bundled", [("bundled", 1)]),
        ("org/name:config:train", [("org/name:config:train", 1)]),
        ("bundled:0.5,a.jsonl:0.25", [("bundled", 0.5), ("a.jsonl", 0.25)]),
        ("bundled, pydoc", [("bundled", 1), ("pydoc", 1)]),
        ("org/name:config:train:3,self:1", [("org/name:config:train", 3), ("self", 1)]),
        ("org/name:config:train,self", [("org/name:config:train", 1), ("self", 1)]),
    ],
)
def test_what_a_spec_means(spec: str, parts: list[tuple[str, float]]):
    assert parse_parts(spec) == tuple(Part(*part) for part in parts)


def test_a_path_that_exists_is_itself(tmp_path: Path):
    path = tmp_path / "a,b:2"
    path.write_text("x")
    assert parse_parts(str(path)) == (Part(str(path)),)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("bundled:0.5,pydoc", "'pydoc'"),
        ("bundled:0,pydoc:1", " 0 .*bundled"),
        ("bundled:-1,pydoc:1", " -1 .*bundled"),
        ("bundled:nan,pydoc:1", " nan .*bundled"),
        ("bundled:inf,pydoc:1", " inf .*bundled"),
        ("bundled,", r"\bname\b"),
        ("bundled:1,bundled:2", "^bundled "),
    ],
)
def test_bad_mixtures_are_refused_with_an_example(spec: str, problem: str):
    with pytest.raises(DataError, match=problem) as caught:
        parse_parts(spec)
    assert caught.value.remedy


def test_no_parts_are_refused():
    with pytest.raises(DataError):
        check_parts([])


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights, st.integers(1, 300))
def test_shares_add_up_and_follow_the_weights(values: list[float], samples: int):
    parts = [Part(f"text{index}", value) for index, value in enumerate(values)]
    samples += math.ceil(sum(values) / min(values))
    counts = share_out(parts, samples)
    assert sum(counts) == samples
    for count, value in zip(counts, values, strict=True):
        assert count >= 1
        assert abs(count - samples * value / sum(values)) < 1


def test_a_part_without_a_sequence_is_refused_with_the_number_that_is_enough():
    parts = [Part("a", 0.99), Part("b", 0.01)]
    with pytest.raises(DataError, match=r"^b .*\b8\b") as caught:
        share_out(parts, 8)
    assert caught.value.remedy == "Use --num-calibration-samples 100"
    assert share_out(parts, 100) == [99, 1]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 4000)
    return str(tmp_path / "a.txt"), str(tmp_path / "b.txt")


def test_weights_are_shares_of_the_tokens(texts: tuple[str, str]):
    parts = Part(texts[0], 3), Part(texts[1], 1)
    mixed = pack_parts(parts, letters, samples=32, length=16)
    assert mixed.tokens.shape == (32, 16)
    assert (mixed.tokens == ord("a")).sum() == 24 * 16
    assert [(part.source, part.weight, part.sequences) for part in mixed.parts] == [
        (texts[0], 0.75, 24),
        (texts[1], 0.25, 8),
    ]
    assert mixed.source == f"{texts[0]}:3,{texts[1]}:1"
    assert mixed.description.startswith("75% local text")
    first = mixed.tokens[:, 0]
    assert 0 < (first[:16] == ord("b")).sum() < 8, "the parts are shuffled into one another"


def test_seed_and_parts_decide_everything(texts: tuple[str, str]):
    parts = Part("bundled", 0.5), Part(texts[0], 0.5)
    options = {"samples": 8, "length": 32}
    first = pack_parts(parts, letters, seed=3, **options)
    again = pack_parts(parts, letters, seed=3, **options)
    assert torch.equal(first.tokens, again.tokens)
    assert first.sha256 == again.sha256
    assert not torch.equal(first.tokens, pack_parts(parts, letters, seed=4, **options).tokens)
    other = pack_parts((Part("bundled", 0.75), Part(texts[0], 0.25)), letters, seed=3, **options)
    assert other.sha256 != first.sha256


def test_one_part_is_that_text_alone():
    source = load_texts("bundled")
    alone = pack_sequences(source, letters, samples=4, length=32)
    packed = pack_parts((Part("bundled"),), letters, samples=4, length=32)
    assert torch.equal(packed.tokens, alone.tokens)
    assert (packed.sha256, packed.parts) == (source.sha256, ())


def test_too_little_text_is_said_once_for_each_part_and_once_for_all(tmp_path: Path):
    (tmp_path / "short.txt").write_text("twenty letters here.")
    parts = Part("bundled"), Part(str(tmp_path / "short.txt"))
    warnings = pack_parts(parts, letters, samples=8, length=16).warnings
    assert sum("short.txt" in warning and "1 of 4" in warning for warning in warnings) == 1
    assert sum(str(FEW_TOKENS) in warning for warning in warnings) == 1
    with pytest.raises(DataError, match=r"short\.txt .*\b20 .*\b64\b"):
        pack_parts(parts, letters, samples=8, length=64)


def test_the_model_writes_its_part():
    def write(prompts: torch.Tensor, length: int, seed: int) -> torch.Tensor:
        assert prompts.shape == (3, 0)
        return torch.full((len(prompts), length), seed)

    packed = pack_parts((Part("self"),), letters, samples=3, length=8, seed=5, sampler=write)
    assert packed.tokens.tolist() == [[5] * 8] * 3
    assert packed.source == "self"
    assert len(packed.sha256) == 64
    assert "sampled from the source model itself at temperature 1 with seed 5" in packed.description


def test_in_a_mixture_the_model_continues_pieces_of_the_other_texts(texts: tuple[str, str]):
    given: list[torch.Tensor] = []

    def write(prompts: torch.Tensor, length: int, seed: int) -> torch.Tensor:
        given.append(prompts)
        return torch.full((len(prompts), length), 1)

    parts = Part("self", 0.75), Part("bundled", 0.25)
    first, again, other = (
        pack_parts(parts, letters, samples=32, length=64, seed=seed, sampler=write) for seed in (0, 0, 1)
    )
    prompts, same, differing = given
    assert prompts.shape == (24, 8)
    real = first.tokens[first.tokens[:, 0] != 1]
    assert len(real) == 8
    pieces = {tuple(piece.tolist()) for piece in real.unfold(1, 8, 1).flatten(0, 1)}
    assert {tuple(prompt.tolist()) for prompt in prompts} <= pieces
    assert len(prompts.unique(dim=0)) > 20
    assert prompts.equal(same)
    assert first.tokens.equal(again.tokens)
    assert not prompts.equal(differing)
    assert "each after 8 tokens of the other texts" in first.description
    assert [part.sequences for part in other.parts] == [24, 8]


def test_a_plan_needs_no_model_and_claims_no_hash():
    parts = Part("self"), Part("bundled")
    planned = pack_parts(parts, letters, samples=4, length=8)
    assert planned.tokens.shape == (4, 8)
    assert planned.sha256 == ""
    assert [bool(part.sha256) for part in planned.parts] == [False, True]


class Words:
    """A tokenizer that knows one word."""

    bos_token_id = None
    eos_token_id = None
    unk_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(word == "known") for word in text.split()]}


def test_text_of_unknown_tokens_is_off_the_domain(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("known " * 990 + "strange " * 10)
    assert not any(
        "unknown" in warning for warning in pack_parts((Part(str(path)),), Words(), samples=1, length=8).warnings
    )
    path.write_text("known " * 900 + "strange " * 100)
    (found,) = [w for w in pack_parts((Part(str(path)),), Words(), samples=1, length=8).warnings if "unknown" in w]
    assert found.startswith("10.0 % of the tokens")


def test_text_in_bytes_is_off_the_domain(texts: tuple[str, str]):
    warnings = pack_parts((Part(texts[0]),), letters, samples=4, length=16).warnings
    assert any("1.00 bytes per token" in warning for warning in warnings)
