"""Imports only go down. The arrows are contracts in pyproject.toml; policy and command lines start without torch."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHARED = ("compress.common", "compress.checkpoint", "compress.models", "compress.cpu")
POLICY = (
    "core.request",
    "core.config",
    "engine.block_pool",
    "engine.scheduler",
    "engine.output_processor",
    "engine.engine",
    "engine.engine_thread",
    "engine.metrics",
    "text.tokenizer",
)


def test_runtime_imports_only_the_shared_parts_of_compress() -> None:
    imported = re.compile(r"^\s*(?:from|import) (compress\S*)", re.MULTILINE)
    found = {name for file in (ROOT / "runtime").rglob("*.py") for name in imported.findall(file.read_text())}
    assert found
    assert not [name for name in found if not name.startswith(SHARED)]


def test_contracts_cover_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) - {"recipes"}
    assert set(config["tool"]["importlinter"]["root_packages"]) == packages


def test_importing_needs_no_torch() -> None:
    modules = ["compress.cli", "runtime.cli", "compress.common.errors", "compress.checkpoint.scheme"]
    modules += ["runtime.server.app", *(f"runtime.{name}" for name in POLICY)]
    imports = "".join(f"import {name}; print({name!r}, 'torch' in sys.modules)\n" for name in modules)
    code = f"import sys\n{imports}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{name} False" for name in modules]


def test_a_start_imports_no_compiler() -> None:
    """TorchDynamo alone takes as long to import as the rest of PyTorch; transformers reads no model of a family."""
    slow = {"torch._dynamo", "torch._inductor", "transformers", "triton"}
    modules = ["runtime.llm", "runtime.model.loader", "runtime.runner.runner", "runtime.speculative.build"]
    code = f"import sys, {', '.join(modules)}\nprint(*sorted({slow} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_everything_but_kernels_imports_without_triton() -> None:
    """Triton is no dependency: on a CPU the package is installed without it."""
    modules = ["runtime.backends.registry", "runtime.runner.runner", "runtime.memory.estimate", "compress.pipeline.run"]
    code = f"import sys\nsys.modules['triton'] = None\nimport {', '.join(modules)}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
