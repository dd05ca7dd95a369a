import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compress.common.cli import draft_model_path
from compress.common.errors import ToolkitError
from runtime.cli import app

COMMAND = ["generate", "--prompt", "The city lies on the river", "--max-tokens", "24", "--dtype", "float64", "--json"]


def generate(*options: str) -> dict[str, object]:
    result = CliRunner().invoke(app, [*COMMAND, "--seed", "3", *options], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_guessing_changes_no_text() -> None:
    plain = generate()
    for options in (["demo"], ["self:skip=1", "--num-speculative-tokens", "2"], [str(draft_model_path())]):
        found = generate("--speculative-model", *options)
        assert {**found, "tokens_per_second": 0} == {**plain, "tokens_per_second": 0}
    assert generate("--speculative-model", "demo", "--spec-verify", "rejection")["completion_tokens"] == 24


def test_a_draft_model_whose_tokens_mean_something_else_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(draft_model_path(), tmp_path / "draft")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[5000:5002]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ToolkitError, match=r" 2 .* 8192 .*--speculative-model"):
        generate("--speculative-model", str(folder))
