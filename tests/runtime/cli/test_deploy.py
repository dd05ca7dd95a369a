"""`runtime deploy ray` without Ray; with it: tests/runtime/deploy/test_ray.py."""

import sys
from pathlib import Path

import pytest
from runtime_command import runtime_here


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = runtime_here("deploy", "ray", "demo", cwd=tmp_path)
    assert done.returncode == 1
    assert "ray" in done.stderr
    assert "compress-runtime[ray]" in done.stderr
