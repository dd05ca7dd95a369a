"""Parts of the check on a GPU: what they run, and what is left of them when steps fail, take too long or are killed."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
REPOSITORY = SCRIPTS.parent


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def outcomes(folder: Path) -> list[str]:
    return [step["outcome"] for step in summary_of(folder)["steps"]]


def test_a_part_says_of_every_step_what_came_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checking import steps
    from checking.steps import Step, run_part

    monkeypatch.setattr(steps, "LOG_BYTES", 400)
    (tmp_path / "old.json").write_text("{}")
    monkeypatch.setattr(steps, "GRACE_SECONDS", 0.2)
    child = tmp_path.parent / f"{tmp_path.name}.pid"
    blocked = f"(trap '' TERM; echo begun; sleep 600) & echo $! > {child}; wait"
    commands = [
        Step(
            "good", 5, ("sh", "-c", "echo $WORD; yes filler | head -n 1000; echo last"), environment={"WORD": "first"}
        ),
        Step("bad", 5, ("sh", "-c", "echo the reason; exit 3")),
        Step("slow", 0.5, ("sh", "-c", blocked)),
        Step("absent", 5, ("true",), needs="no-such-program"),
        Step("late", 5, ("true",)),
    ]
    begun = time.monotonic()
    assert not run_part(commands, tmp_path, 60, {"part": "some"})
    assert time.monotonic() - begun < 10
    wait_for(lambda: not Path("/proc", child.read_text().strip()).exists())
    assert outcomes(tmp_path) == [
        "passed", "failed with status 3", "ran out of time", "skipped: no-such-program is not installed", "passed"
    ]  # fmt: skip
    assert (summary_of(tmp_path)["part"], summary_of(tmp_path)["passed"]) == ("some", False)
    assert {file.name for file in tmp_path.iterdir()} == {"summary.json", "log.txt"}
    log = (tmp_path / "log.txt").read_text()
    assert all(word in log for word in ("first", "last", "the reason"))
    assert len(log) < 2500


def test_steps_have_no_more_time_than_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checking import steps
    from checking.steps import Step, run_part

    monkeypatch.setattr(steps, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(steps, "LEAST_SECONDS", 0.3)
    begun = time.monotonic()
    sleep = ("sleep", "600")
    assert not run_part([Step("one", 20, sleep), Step("two", 20, sleep)], tmp_path, 1.0, {})
    assert time.monotonic() - begun < 1.0
    assert outcomes(tmp_path)[0] == "ran out of time"
    assert outcomes(tmp_path)[1].startswith("not reached: ")


def test_nothing_runs_behind_a_required_step_that_fails(tmp_path: Path) -> None:
    from checking.steps import Step, run_part

    steps = [Step("facts", 5, ("false",), is_required=True), Step("work", 5, ("touch", str(tmp_path / "done")))]
    assert not run_part(steps, tmp_path, 60, {})
    assert outcomes(tmp_path) == ["failed with status 1", "not reached"]
    assert run_part([Step("work", 5, ("true",))], tmp_path, 60, {})
    assert outcomes(tmp_path) == ["passed"]


def test_a_required_step_that_runs_out_of_time_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checking import steps
    from checking.steps import Step, run_part

    monkeypatch.setattr(steps, "LEAST_SECONDS", 0.1)
    commands = [Step("facts", 0.3, ("sleep", "600"), is_required=True), Step("work", 5, ("true",))]
    assert not run_part(commands, tmp_path, 60, {})
    assert outcomes(tmp_path) == ["ran out of time", "passed"]


def test_a_part_begins_with_the_newest_kernels_and_keeps_them(tmp_path: Path) -> None:
    from checking.parts import newest_archive, parts
    from checking.steps import Step, run_part

    assert newest_archive(tmp_path) is None
    assert [step.name for step in parts("python", tmp_path, tmp_path, None)["models"]][1] == "small"
    for seconds, name in enumerate(("kernels.tar.xz", "tests/kernels.tar.xz", "models/log.txt", "tests/log.txt"), 1):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    newest = newest_archive(tmp_path, tmp_path / "nowhere")
    assert newest == tmp_path / "tests" / "kernels.tar.xz"
    assert run_part([Step("unpack", 5, ("test", "-f", str(newest)))], tmp_path / "tests", 60, {}, newest)
    assert {file.name for file in newest.parent.iterdir()} == {"kernels.tar.xz", "summary.json", "log.txt"}


PART = """
import sys; sys.path.insert(0, {scripts!r})
from pathlib import Path
from checking.steps import Step, run_part
steps = [Step("good", 5, ("true",)), Step("long", 60, ("sh", "-c", "echo begun; sleep 60")), Step("next", 5, ("true",))]
sys.exit(not run_part(steps, Path({folder!r}), 100, {{}}))
"""


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "found"), [(signal.SIGTERM, "interrupted by SIGTERM"), (signal.SIGKILL, "running")], ids=["TERM", "KILL"]
)
def test_a_part_that_is_killed_leaves_what_is_known(tmp_path: Path, number: signal.Signals, found: str) -> None:
    code = PART.format(scripts=str(SCRIPTS), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL)
    running = tmp_path / "running.txt"
    wait_for(lambda: running.exists() and "begun" in running.read_text() and "running" in outcomes(tmp_path))
    pid = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout)
    process.send_signal(number)
    assert process.wait(30) != 0
    assert outcomes(tmp_path) == ["passed", found, "not reached"]
    assert not summary_of(tmp_path)["passed"]
    if number == signal.SIGTERM:
        wait_for(lambda: not Path("/proc", str(pid)).exists())
        assert "begun" in (tmp_path / "log.txt").read_text()
    else:
        os.killpg(pid, signal.SIGKILL)


TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_right(number): pass

def test_wrong(): assert False

@pytest.mark.skip
def test_left_out(): pass

def test_that_breaks_its_worker(): os._exit(1)
"""


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_tests_are_counted_from_what_pytest_prints(tmp_path: Path, workers: int) -> None:
    from checking.steps import Step, run_part

    file = tmp_path / "tests" / "test_some.py"
    file.parent.mkdir()
    file.write_text(TESTS if workers else TESTS.replace("os._exit(1)", "import time; time.sleep(600)"))
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", str(workers), "tests/test_some.py")
    step = Step("tests", 120 if workers else 15, ("sh", "-c", f'cd {tmp_path} && exec "$@"', "sh", *command))
    assert not run_part([step], tmp_path / "out", 150, {})
    (result,) = summary_of(tmp_path / "out")["steps"]
    broken = "tests/test_some.py::test_that_breaks_its_worker"
    assert result["tests"] == {"PASSED": 3, "FAILED": 1 + bool(workers), "SKIPPED": 1}
    assert set(result["failed"]) == {"tests/test_some.py::test_wrong", *([broken] if workers else [])}
    assert workers or result["under_way"] == [broken]


BROKEN = """
import pytest
import shared_gpu

def test_on_a_cpu(): assert False

@pytest.fixture
def gpu(): return 1

def test_that_breaks_the_gpu(gpu): shared_gpu.is_sound = lambda: False

@pytest.mark.parametrize("number", range(3))
def test_after_it(gpu, number): assert shared_gpu.is_sound()
"""


@pytest.mark.full
def test_a_worker_whose_gpu_is_broken_is_replaced(tmp_path: Path) -> None:
    from checking.parts import FOR_TESTS
    from checking.steps import Step, run_part

    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(BROKEN)
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "shared_gpu", "-n", "1", "tests")
    step = Step("tests", 100, ("sh", "-c", f'cd {tmp_path} && exec "$@"', "sh", *command), environment=FOR_TESTS)
    assert not run_part([step], tmp_path / "out", 200, {})
    (result,) = summary_of(tmp_path / "out")["steps"]
    assert set(result["failed"]) == {"tests/test_some.py::test_that_breaks_the_gpu"}
    assert result["tests"]["PASSED"] >= 3


def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"} | environment
    return subprocess.run([SCRIPTS / "gpu_check.sh", *arguments], capture_output=True, text=True, env=variables)


def test_parts_fit_in_nine_minutes_each_and_run_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "kernels.tar.xz").touch()
    plan = gpu_check("--dry-run", "--cache", str(tmp_path / "kernels.tar.xz"), OUT="/nonexistent")
    assert plan.returncode == 0, plan.stderr
    steps = [line.split("\t") for line in plan.stdout.splitlines()]
    assert [*dict.fromkeys(step[0] for step in steps)] == ["correctness", "kernels", "models"]
    for part in ("correctness", "kernels", "models"):
        own = [step for step in steps if step[0] == part]
        assert sum(int(step[2]) for step in own) <= 525, part
        written = {Path(word).name for step in own for word in step[3].split() if word.startswith("/nonexistent")}
        assert written | {"summary.json", "log.txt", "running.txt"} == written ^ {
            "summary.json",
            "log.txt",
            "running.txt",
        }
        assert len(written) + 3 <= 8, part
        assert [step[1] for step in own][:2] == ["facts", "unpack"]
    assert "unpack" not in gpu_check("--dry-run", "--cache", str(tmp_path / "none"), "models").stdout
    files = {word for step in steps for word in step[3].split() if word.startswith(("tests/", "scripts/"))}
    assert files >= {"scripts/tune_kernels.py", "tests/runtime/backends/triton/test_linear.py"}
    assert all((REPOSITORY / file).is_file() for file in files)


def takes_gpu(file: Path) -> bool:
    """Whether a test or fixture of a file has a parameter `gpu`."""
    text = file.read_text()
    nodes = ast.walk(ast.parse(text)) if "gpu" in text else ()
    return any(isinstance(node, ast.FunctionDef) and "gpu" in [each.arg for each in node.args.args] for node in nodes)


def test_every_test_of_a_gpu_is_run_by_it() -> None:
    from checking.parts import ON_GPU, WHOLE_GPU, files_with

    taking = [file for file in (REPOSITORY / "tests").rglob("test_*.py") if takes_gpu(file)]
    assert len(taking) > 10
    assert {str(file.relative_to(REPOSITORY)) for file in taking} <= set(files_with(ON_GPU))
    assert "tests/runtime/runner/test_cuda_graphs.py" in files_with(ON_GPU)
    assert "tests/runtime/runner/test_cuda_graphs.py" in files_with(WHOLE_GPU)


@pytest.mark.full
def test_it_refuses_unknown_parts_and_machines_without_a_gpu(tmp_path: Path) -> None:
    wrong = gpu_check("speed")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    if not torch.cuda.is_available():
        result = gpu_check("models", OUT=str(tmp_path))
        assert result.returncode == 1
        assert "there is no NVIDIA GPU" in result.stdout
        assert outcomes(tmp_path / "models") == ["failed with status 1", *["not reached"] * 3]
        assert {file.name for file in tmp_path.rglob("*")} == {"models", "summary.json", "log.txt"}
