"""Imports only go down. The arrows are contracts in pyproject.toml; policy and command lines start without torch."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
POLICY = ("types", "config", "blocks", "scheduler", "answer", "engine", "engine_thread", "metrics", "text.tokenizer")


def test_import_contracts_hold() -> None:
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_runtime_imports_only_the_checkpoint_and_native_parts_of_compress() -> None:
    imported = re.compile(r"^\s*(?:from|import) (compress\S*)", re.MULTILINE)
    found = {name for file in (ROOT / "runtime").rglob("*.py") for name in imported.findall(file.read_text())}
    assert found
    assert not [name for name in found if not name.startswith(("compress.checkpoint", "compress.native"))]


def test_contracts_cover_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) - {"recipes"}
    assert set(config["tool"]["importlinter"]["root_packages"]) == packages


def test_importing_needs_no_torch() -> None:
    modules = ["compress.cli", "runtime.cli", "compress.checkpoint.errors", "compress.checkpoint.scheme"]
    modules += ["runtime.server.app", *(f"runtime.{name}" for name in POLICY)]
    imports = "".join(f"import {name}; print({name!r}, 'torch' in sys.modules)\n" for name in modules)
    code = f"import sys\n{imports}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{name} False" for name in modules]
