"""Which compiled product serves a weight: by a table of measured speeds, or by the defaults."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from compress.checkpoint.weights import Int
from compress.common.errors import DataError
from compress.cpu.binding import EMULATED, absence, best_instruction_set, library
from runtime.backends.base import Target
from runtime.backends.cpu import choice
from runtime.backends.cpu.linear import Activations, CpuLinear
from runtime.backends.measured import read_speedups, table_path, to_json
from runtime.backends.registry import choose_linear

REFUSAL = "this processor has no matrix tiles (AMX)"
FORMS = ("w2a16", "w4a16", "w8a16", "bf16", "w2a8", "w4a8", "w8a8")
Write = Callable[[Mapping[str, float]], None]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Write]:
    """Writes the table of a processor with matrix tiles: a mean speed-up for each question."""

    def write_table(means: Mapping[str, float]) -> None:
        speedups = {question: {"64x32": {"1": mean / 2}, "32x64": {"8": mean * 2}} for question, mean in means.items()}
        table_path(tmp_path, "some processor").write_text(to_json("some processor", speedups))

    monkeypatch.setattr(choice, "TABLES", tmp_path)
    monkeypatch.setattr(choice, "processor", lambda: "some processor")
    monkeypatch.setattr(choice, "tiles_refusal", lambda: "")
    choice._speedups.cache_clear()
    yield write_table
    choice._speedups.cache_clear()


def test_what_was_not_measured_has_a_default(write: Write) -> None:
    assert [choice.fewest_tile_rows(form) for form in FORMS] == [1, 1, 1, 1, 4, 4, 4]
    assert "oneDNN" in choice.dense_refusal()
    assert "matrix tiles from 1 rows on (was not measured" in choice.describe("w4a16")


def test_measurements_choose(write: Write) -> None:
    write(
        {
            "w4a16 by tiles": 2.0,
            "w4a16 few rows by vectors": 1.5,
            "w8a8 few rows by vectors": 0.5,
            "w8a16 by tiles": 0.9,
            "bf16 by compiled code": 1.2,
        }
    )
    assert [choice.fewest_tile_rows(form) for form in FORMS] == [1, 4, 0, 1, 4, 4, 1]
    assert choice.dense_refusal() == ""
    assert "measured 2.00 times" in choice.describe("w4a16")
    assert "measured 0.90 times" in choice.describe("w8a16")


def test_without_tiles_compiled_code_multiplies_numbers(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "tiles_refusal", lambda: REFUSAL)
    assert choice.dense_refusal() == ""
    choice._speedups.cache_clear()
    write({"bf16 by compiled code": 0.7})
    assert "0.70 times" in choice.dense_refusal()


@pytest.mark.skipif(library() is None, reason=absence())
def test_the_kernel_says_which_instructions_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "tiles_refusal", lambda: REFUSAL)
    reason = choose_linear(Int(4, 32), 64, Target(torch.device("cpu"), torch.bfloat16)).reason
    assert REFUSAL in reason


@pytest.mark.skipif(library() is None, reason=absence())
@pytest.mark.parametrize("kind", Activations)
def test_no_tiles_at_all_are_the_bits_of_the_best_vectors(kind: Activations) -> None:
    from tiny_models import random_weight

    weight, x = random_weight((70, 128), Int(4, 32)), torch.randn(5, 128).bfloat16()
    without = CpuLinear(weight, activations=kind, fewest_tile_rows=0, instruction_set=EMULATED)
    vectors = CpuLinear(weight, activations=kind, fewest_tile_rows=0, instruction_set=best_instruction_set())
    assert torch.equal(without(x), vectors(x))


def test_tables_in_the_package_can_be_read() -> None:
    known = {f"{form} {question}" for form in FORMS for question in (choice.BY_TILES, choice.BY_VECTORS)}
    for table in choice.TABLES.glob("*.json"):
        device = next(iter(line for line in table.read_text().splitlines() if '"device"' in line)).split('"')[3]
        assert table == table_path(choice.TABLES, device)
        assert set(read_speedups(table, device)) <= known | {f"bf16 {choice.BY_COMPILED_CODE}"}


def test_a_broken_table_is_an_error(write: Write, tmp_path: Path) -> None:
    table_path(tmp_path, "some processor").write_text("{}")
    with pytest.raises(DataError):
        choice.fewest_tile_rows("w4a16")
