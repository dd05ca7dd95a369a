"""The table of what other engines load is what they do: transformers here, vLLM where `--vllm` names its Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import pytest
from loadable_models import MODEL_TYPES

from compress.checkpoint.formats.base import TRANSFORMERS, VLLM
from compress.checkpoint.formats.readers import measured

Wanted: TypeAlias = Callable[[str, str], bool]
"""Whether a container and a form are measured."""
SLICES = 11
"""Number of parts of the table, one of which a run measures, chosen by the commit."""


def in_slice(model_type: str, place: int) -> Wanted:
    """Chooses the forms of a model type whose turn it is."""
    numbers: dict[tuple[str, str], int] = {}

    def wanted(container: str, form: str) -> bool:
        number = numbers.setdefault((container, form), len(numbers))
        return (number + MODEL_TYPES.index(model_type)) % SLICES == place

    return wanted


def differences(engine: str, ask: Callable[[Path], str | None], wanted: Mapping[str, Wanted]) -> list[str]:
    """Lists forms for which an engine's answer differs from the table's, except where the table has no entry."""
    from measure_loaders import measure

    table = measured()[engine]
    return [
        f"{model_type} {container} {form}: {refusals[engine] or 'loads'}, in the table {expected or 'loads'}"
        for model_type, chosen in wanted.items()
        for container, form, refusals in measure(model_type, {engine: ask}, chosen)
        if refusals.get(engine) is not None
        and (expected := table.refusal(container, form, model_type)) is not None
        and bool(expected) != bool(refusals[engine])
    ]


@pytest.fixture
def slices() -> dict[str, Wanted]:
    from full_tier import current_commit, seed_of

    table = measured()[TRANSFORMERS].found["dense"]["dense"]  # a family that is not in it yet is unknown
    return {each: in_slice(each, seed_of(current_commit()) % SLICES) for each in MODEL_TYPES if each in table}


@pytest.mark.full
def test_transformers_loads_what_the_table_says(slices: dict[str, Wanted]) -> None:
    from measure_loaders import PACKAGES, refusal_in_transformers

    versions = measured()[TRANSFORMERS].versions
    if versions != {package: version(package) for package in PACKAGES[TRANSFORMERS]}:
        pytest.skip(f"the table was made with {versions}: scripts/measure_loaders.py --write makes it with others")
    assert not differences(TRANSFORMERS, refusal_in_transformers, slices)


@pytest.mark.full
def test_vllm_loads_what_the_table_says(slices: dict[str, Wanted], request: pytest.FixtureRequest) -> None:
    from measure_loaders import vllm_loader

    python = request.config.getoption("--vllm")
    if python is None:
        pytest.skip("--vllm names no interpreter with vLLM: scripts/check_in_vllm.py says how to make one")
    with vllm_loader(python) as ask:
        assert not differences(VLLM, ask, slices)


def test_the_documentation_has_the_table() -> None:
    from measure_loaders import ROOT, summary_rows

    text = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert all(row in text for row in summary_rows())


def test_one_model_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import measure_loaders

    table = tmp_path / "loaders.json"
    table.write_text('{"vLLM": {"versions": {"vllm": "0"}, "found": {"dense": {"dense": {"": "llama"}}}}}')
    monkeypatch.setattr(measure_loaders, "TABLE_FILE", table)
    monkeypatch.setattr(measure_loaders, "measured", lambda: measured(table))
    given = [
        "--types",
        "gpt_oss",
        "--containers",
        "compressed-tensors",
        "dense",
        "--forms",
        "w4a16 sym",
        "dense",
        "--write",
    ]
    assert measure_loaders.main(given) == 0
    found = measured(table)
    assert found["vLLM"].refusal("dense", "dense", "llama") == ""
    assert found["transformers"].refusal("dense", "dense", "gpt_oss") == ""
    assert "missing keys" in str(found["transformers"].refusal("compressed-tensors", "w4a16 sym", "gpt_oss"))
    assert found["transformers"].versions["transformers"] == version("transformers")


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("KeyError", "'layers.0.mlp.experts.3.w2_bias'", "KeyError: 'layers.N.mlp.experts.N.w2_bias'"),
        ("ValueError", "No kernel was found. Reasons: many", "ValueError: No kernel was found"),
        ("E", "1 validation error for C Value error, bits=3 [type=value_error, x]", "E: bits=3"),
    ],
)
def test_refusals_are_short_and_alike(kind: str, text: str, expected: str) -> None:
    from measure_loaders import summary

    assert summary(kind, text) == expected
