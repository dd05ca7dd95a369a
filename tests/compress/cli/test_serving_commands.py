"""`compress fit` as it is typed."""

import json
import re
import sys
from pathlib import Path

import pytest
from help_pages import help_pages

from compress.checkpoint.weights import Int
from compress.recipe_file import load_recipe

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


@pytest.fixture
def fit(monkeypatch, capsys, tmp_path: Path):
    """Runs `compress fit` on a folder with config.json alone, for 2 users with 2,048 tokens each."""
    from compress.cli import main

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    def call(*arguments: object, code: int = 0) -> tuple[str, str]:
        typed = ["compress", "fit", str(tmp_path), "--context", "2k", "--users", "2", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", typed)
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        assert (stopped.value.code or 0) == code, printed.err
        return printed.out, printed.err

    return call


def test_a_recipe_is_written_and_can_be_read(fit, tmp_path: Path) -> None:
    dense = json.loads(fit("--memory", "8GiB", "--json")[0])
    assert dense["weights"] == "16 bits"
    assert dense["predicted_kl"] == 0
    assert dense["predicted_tokens_per_second"] is None
    tight = dense["needed_bytes"] - 40 * 2**20
    out, _ = fit("--memory", tight, "--bandwidth", "1GB", "--out", tmp_path / "fit.yaml")
    assert "compress run" in out
    assert "tokens/s" in out
    stage = load_recipe(str(tmp_path / "fit.yaml")).stages[0]
    assert stage.scheme == Int(4, 64) or stage.scheme.word == "nvfp4"


def test_what_does_not_fit_is_refused(fit, tmp_path: Path) -> None:
    _, message = fit("--memory", "1MiB", "--out", tmp_path / "fit.yaml", code=1)
    assert "--memory" in message
    assert not (tmp_path / "fit.yaml").exists()


def test_no_recipe_is_written_for_what_fits_in_16_bits(fit, tmp_path: Path) -> None:
    out, _ = fit("--memory", "8GiB", "--out", tmp_path / "fit.yaml")
    assert "16 bits" in out
    assert "compress run" not in out
    assert not (tmp_path / "fit.yaml").exists()


REFUSED = {
    "too little memory": ("--memory", "1MiB"),
    "too many users": ("--memory", "600MiB", "--users", "500"),
    "a longer context than the model's": ("--memory", "8GiB", "--context", "32k"),
    "too fast": ("--memory", "8GiB", "--bandwidth", "1GB", "--tokens-per-second", "1e6"),
    "a rate without a bandwidth": ("--memory", "8GiB", "--tokens-per-second", "5"),
    "another device": ("--memory", "8GiB", "--device", "tpu"),
    "no draft model": ("--memory", "8GiB", "--draft", "nowhere"),
    "an output that exists": ("--memory", "8GiB", "--out", "."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_options_of_this_command(fit, name: str) -> None:
    own = set(re.findall(r"--[a-z][a-z-]*", help_pages("compress", ["fit"])))
    _, message = fit(*REFUSED[name], code=1)
    assert set(re.findall(r"--[a-z][a-z-]*", message)) <= own


def test_a_processor_is_measured(fit) -> None:
    found = json.loads(fit("--memory", "8GiB", "--device", "cpu", "--json")[0])
    assert found["bandwidth_from"] == "measured here"
    assert found["predicted_tokens_per_second"] > 0


def test_a_draft_model_is_counted_and_served(fit, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    out, _ = fit("--memory", "8GiB", "--draft", tmp_path / "small")
    assert f"--speculative-model {tmp_path / 'small'}" in out
    drafted, alone = (
        json.loads(fit("--memory", "8GiB", *more, "--json")[0]) for more in (("--draft", tmp_path / "small"), ())
    )
    assert drafted["draft_bytes"] == drafted["needed_bytes"] - alone["needed_bytes"]
    assert 0 < drafted["draft_acceptance_needed"] < 0.6


def test_a_rate_needs_a_bandwidth(fit) -> None:
    _, message = fit("--memory", "8GiB", "--tokens-per-second", "50", code=1)
    assert "--bandwidth" in message
    dense, quick = (
        json.loads(fit("--memory", "8GiB", "--bandwidth", "5GB", "--tokens-per-second", rate, "--json")[0])
        for rate in ("1", "40")
    )
    assert dense["weights"] == "16 bits"
    assert quick["predicted_kl"] > 0
    assert quick["predicted_tokens_per_second"] >= 2 * 40


@pytest.mark.parametrize("tokens", ["0", "x", "-5", "1.5k"])
def test_numbers_of_tokens(fit, tokens: str) -> None:
    fit("--memory", "8GiB", "--context", tokens, code=1)


def test_help_loads_nothing_heavy() -> None:
    page = help_pages("compress", ["fit"])
    assert all(option in page for option in ("--memory", "--context", "--users", "--device", "--bandwidth", "--out"))
