"""Endless streams from the command line."""

import json
import re
from pathlib import Path

from runtime_command import runtime_here


def test_a_length_beyond_the_context(tmp_path: Path) -> None:
    arguments = ("generate", "-p", "Once upon a time", "--max-tokens", "90", "--max-model-len", "5000", "--json")
    refused = runtime_here(*arguments, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "2048 tokens" in refused.stderr
    assert "--attention-window" in refused.stderr
    answer = runtime_here(*arguments, "--attention-sinks", "4", "--attention-window", "32", "--seed", "3", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["completion_tokens"] == 90 or found["finish_reason"] == "stop"


def test_wishes_that_do_not_fit(tmp_path: Path) -> None:
    alone = runtime_here("generate", "-p", "Hello", "--attention-sinks", "4", cwd=tmp_path)
    assert (alone.returncode, alone.stdout) == (1, "")
    assert re.search("4 attention sinks .*--attention-window 1024", alone.stderr)
    wide = runtime_here("generate", "-p", "Hello", "--attention-window", "2045", "--attention-sinks", "4", cwd=tmp_path)
    assert re.search("2048 tokens.*--attention-window 2044", wide.stderr)
