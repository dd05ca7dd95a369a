"""Options and metrics that the documents name exist."""

import re
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from compress.cli import app as compress_app
from runtime.cli import app
from runtime.engine.metrics import Metrics, render
from runtime.routing.on_demand import ModelMemory, OnDemandEngine
from runtime.server.middleware import ServerMetrics

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("deployment.md", "migrating.md")
SERVING = (
    "serving.md",
    "serving-api.md",
    "serving-operation.md",
    "serving-cpu.md",
    "serving-gpu.md",
    "scheduling.md",
    "kv-cache.md",
    "speculation.md",
    "parallelism.md",
    "quick-starts.md",
    "commands.md",
)
OTHER_PROGRAMS = r"`(?:python|pytest|lm-eval|scripts/|pip)[^`]*`|^(?:openssl|curl) .*|^  -keyout .*"


def options_of(program: Typer, *command: str) -> set[str]:
    found = CliRunner().invoke(program, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert found.exit_code == 0, command
    return set(re.findall(r"--[a-z][a-z-]+", found.output))


@pytest.mark.full
def test_options_of_commands_to_choose_exist() -> None:
    text = (DOCS / "choosing.md").read_text()
    commands = re.findall(r"`compress (\w+)([^`]*)`", text)
    assert len(commands) > 8
    for command, rest in commands:
        assert set(re.findall(r"--[a-z][a-z-]+", rest)) <= options_of(compress_app, command), rest


def own_text(page: str) -> str:
    """A page without the options of other programs, which are the first cells of tables about them."""
    lines = (DOCS / page).read_text().splitlines()
    return "\n".join(re.sub(r"^\| [^|]*\|", "", line) if page == "migrating.md" else line for line in lines)


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page: str) -> None:
    commands = {"--read-only", "--tmpfs", "--from"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", own_text(page))) - commands
    assert len(named) > 10
    assert named <= options_of(app, "serve") | options_of(app, "deploy", "ray") | options_of(compress_app, "export")


@pytest.mark.full
def test_options_of_the_pages_about_serving_exist() -> None:
    text = re.sub(OTHER_PROGRAMS, "", "\n".join((DOCS / page).read_text() for page in SERVING), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    served = "serve", "generate", "memory", "batch", "bench", "chat", "prepare", "warm-up", "simulate"
    known = [options_of(app, name) for name in served]
    known += [options_of(compress_app, name) for name in ("eval", "quantize", "fit", "doctor")]
    assert len(named) > 60
    assert named <= set().union(*known)


@pytest.mark.parametrize("page", ["deployment.md", "serving-operation.md"])
def test_metrics_exist(page: str) -> None:
    on_demand = OnDemandEngine("demo", 0, ModelMemory(0), load=lambda _: pytest.fail("it is not loaded"))
    rendered = Metrics().render() + ServerMetrics("demo").render() + render(on_demand)
    known = set(re.findall(r"^# TYPE (\w+)", rendered, re.MULTILINE))
    text = (DOCS / page).read_text()
    named = {name.removesuffix("_bucket") for name in re.findall(r"runtime_[a-z0-9_]+", text)}
    assert len(named) > 6
    assert named <= known
