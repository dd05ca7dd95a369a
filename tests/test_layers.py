"""Imports only go down. The arrows are contracts in pyproject.toml; policy and command lines start without torch."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

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


def settings() -> dict[str, Any]:
    """The settings of import-linter."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


def names(level: str) -> list[str]:
    """Folders of a level of an order."""
    return re.findall(r"[\w.]+", level)


def folders() -> set[str]:
    """Every package, by its dotted name."""
    roots = (ROOT / root for root in settings()["root_packages"])
    files = (file.parent for root in roots for file in root.rglob("__init__.py"))
    return {".".join(folder.relative_to(ROOT).parts) for folder in files}


def modules() -> set[str]:
    """Every module and package, by its dotted name."""
    files = (file for root in settings()["root_packages"] for file in (ROOT / root).rglob("*.py"))
    return folders() | {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}


def problems(contracts: list[dict[str, Any]], known: set[str], existing: set[str]) -> list[str]:
    """Lists faults of contracts: folders without a place, those with two, and contracts that forbid nothing new."""
    orders = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    named = [folder for order in orders for level in order for folder in names(level)]
    optional = [folder for order in orders for level in order if level[0] == "(" for folder in names(level)]
    parents = Counter(folder.rpartition(".")[0] for folder in known)
    wanted = {folder for folder in known if parents[folder.rpartition(".")[0]] > 1 and folder != "compress"}
    found = [f"{folder} has no place in an order" for folder in sorted(wanted - set(named))]
    found += [f"{folder} has two places" for folder in sorted(set(named)) if named.count(folder) > 1]
    found += [f"{folder} does not exist" for folder in sorted(set(named) - existing - set(optional))]
    found += [f"an order of {order} forbids nothing" for order in orders if len(order) < 2]
    pairs: set[tuple[str, str]] = set()
    for contract in (each for each in contracts if each["type"] != "layers"):
        name, both = contract["name"], (contract["source_modules"], contract["forbidden_modules"])
        found += [f"{name} repeats a module" for each in both if len(each) > len(set(each))]
        found += [f"{name} forbids nothing" for each in both if not each]
        implied = {
            pair for pair in product(*both) if pair in pairs or any(is_implied(order, *pair) for order in orders)
        }
        found += [f"{source} may not import {forbidden} anyway" for source, forbidden in sorted(implied)]
        pairs |= set(product(*both))
    return found


def is_implied(order: list[str], source: str, forbidden: str) -> bool:
    """Whether an order forbids an import: what is imported is higher, or at the same level and independent."""

    def place(module: str) -> tuple[int, str] | None:
        inside = ((number, folder) for number, level in enumerate(order) for folder in names(level))
        return next((each for each in inside if f"{module}.".startswith(f"{each[1]}.")), None)

    importer, imported = place(source), place(forbidden)
    if importer is None or imported is None or importer == imported:
        return False
    return imported[0] < importer[0] or (imported[0] == importer[0] and "|" in order[importer[0]])


def test_contracts_give_every_folder_one_place_and_repeat_nothing() -> None:
    assert problems(settings()["contracts"], folders(), modules()) == []


ORDER = {"name": "order", "type": "layers", "layers": ["a.x | a.y", "a.z"]}
BAN = {"name": "ban", "type": "forbidden", "source_modules": ["a.x"], "forbidden_modules": ["a.z"]}


@pytest.mark.parametrize(
    ("contracts", "said"),
    [
        ([ORDER, BAN], ""),
        ([{**ORDER, "layers": ["a.x | a.y", "a.z", "a.file"]}], ""),
        ([{**ORDER, "layers": ["a.x", "a.y"]}], "a.z has no place"),
        ([{**ORDER, "layers": ["a.x | a.y", "a.z", "a.w"]}], "a.w does not exist"),
        ([{**ORDER, "layers": ["a.x", "a.y | a.x", "a.z"]}], "a.x has two places"),
        ([{**ORDER, "layers": ["a.x | a.y | a.z"]}], "forbids nothing"),
        ([ORDER, BAN, BAN], "anyway"),
        ([ORDER, {**BAN, "source_modules": ["a.z"], "forbidden_modules": ["a.y"]}], "anyway"),
        ([ORDER, {**BAN, "forbidden_modules": ["a.z", "a.z"]}], "repeats a module"),
        ([ORDER, {**BAN, "forbidden_modules": []}], "forbids nothing"),
    ],
)
def test_contracts_that_are_idle_are_refused(contracts: list[dict[str, Any]], said: str) -> None:
    found = problems(contracts, {"a", "a.x", "a.y", "a.z"}, {"a", "a.x", "a.y", "a.z", "a.file"})
    assert said in "; ".join(found)
    assert bool(found) == bool(said)


def test_contracts_cover_every_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) - {"recipes"}
    assert set(settings()["root_packages"]) == packages


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
    """Triton is not a dependency: on a CPU the package is installed without it."""
    modules = ["runtime.backends.registry", "runtime.runner.runner", "runtime.memory.estimate", "compress.pipeline.run"]
    code = f"import sys\nsys.modules['triton'] = None\nimport {', '.join(modules)}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
