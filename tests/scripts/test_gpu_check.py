"""The check on a GPU: what each question runs, and what is left when steps fail, take too long or are killed."""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
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


def test_a_run_says_of_every_step_what_came_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checking import steps
    from checking.steps import Step, run_steps

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
        Step("without", 5, ("true",), packages=("json", "no_such_package")),
        Step("late", 5, ("true",)),
    ]
    begun = time.monotonic()
    assert not run_steps(commands, tmp_path, {"question": "some"})
    assert time.monotonic() - begun < 10
    wait_for(lambda: not Path("/proc", child.read_text().strip()).exists())
    assert outcomes(tmp_path) == [
        "passed", "failed with status 3", "ran out of time", "skipped: no-such-program is not installed",
        "skipped: no_such_package is not installed", "passed",
    ]  # fmt: skip
    assert (summary_of(tmp_path)["question"], summary_of(tmp_path)["passed"]) == ("some", False)
    assert {file.name for file in tmp_path.iterdir()} == {"summary.json", "log.txt"}
    log = (tmp_path / "log.txt").read_text()
    assert all(word in log for word in ("first", "last", "the reason"))
    assert len(log) < 2500


def test_nothing_runs_behind_a_required_step_that_fails(tmp_path: Path) -> None:
    from checking.steps import Step, run_steps

    steps = [Step("facts", 5, ("false",), is_required=True), Step("work", 5, ("touch", str(tmp_path / "done")))]
    assert not run_steps(steps, tmp_path, {})
    assert outcomes(tmp_path) == ["failed with status 1", "not reached"]
    assert run_steps([Step("work", 5, ("true",))], tmp_path, {})
    assert outcomes(tmp_path) == ["passed"]


def test_a_required_step_that_runs_out_of_time_stops_nothing(tmp_path: Path) -> None:
    from checking.steps import Step, run_steps

    commands = [Step("facts", 0.3, ("sleep", "600"), is_required=True), Step("work", 5, ("true",))]
    assert not run_steps(commands, tmp_path, {})
    assert outcomes(tmp_path) == ["ran out of time", "passed"]


def test_a_question_begins_with_the_newest_kernels_and_keeps_them(tmp_path: Path) -> None:
    from checking.questions import Check, newest_archive, steps_of
    from checking.steps import Step, run_steps

    assert newest_archive(tmp_path) is None
    names = [step.name for step in steps_of("pages", Check("python", tmp_path), "cache", None)]
    assert names == ["facts", "pages", "pack"]
    for seconds, name in enumerate(("kernels.tar.xz", "tests/kernels.tar.xz", "models/log.txt", "tests/log.txt"), 1):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    newest = newest_archive(tmp_path, tmp_path / "nowhere")
    assert newest == tmp_path / "tests" / "kernels.tar.xz"
    assert run_steps([Step("unpack", 5, ("test", "-f", str(newest)))], tmp_path / "tests", {}, newest)
    assert {file.name for file in newest.parent.iterdir()} == {"kernels.tar.xz", "summary.json", "log.txt"}


RUN = """
import sys; sys.path.insert(0, {scripts!r})
from pathlib import Path
from checking.steps import Step, run_steps
steps = [Step("good", 5, ("true",)), Step("long", 60, ("sh", "-c", "echo begun; sleep 60")), Step("next", 5, ("true",))]
sys.exit(not run_steps(steps, Path({folder!r}), {{}}))
"""


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "found"), [(signal.SIGTERM, "interrupted by SIGTERM"), (signal.SIGKILL, "running")], ids=["TERM", "KILL"]
)
def test_a_run_that_is_killed_leaves_what_is_known(tmp_path: Path, number: signal.Signals, found: str) -> None:
    code = RUN.format(scripts=str(SCRIPTS), folder=str(tmp_path))
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
    from checking.steps import Step, run_steps

    file = tmp_path / "tests" / "test_some.py"
    file.parent.mkdir()
    file.write_text(TESTS if workers else TESTS.replace("os._exit(1)", "import time; time.sleep(600)"))
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", str(workers), "tests/test_some.py")
    step = Step("tests", 120 if workers else 15, ("sh", "-c", f'cd {tmp_path} && exec "$@"', "sh", *command))
    assert not run_steps([step], tmp_path / "out", {})
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
    from checking.questions import FOR_TESTS
    from checking.steps import Step, run_steps

    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(BROKEN)
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "shared_gpu", "-n", "1", "tests")
    step = Step("tests", 100, ("sh", "-c", f'cd {tmp_path} && exec "$@"', "sh", *command), environment=FOR_TESTS)
    assert not run_steps([step], tmp_path / "out", {})
    (result,) = summary_of(tmp_path / "out")["steps"]
    assert set(result["failed"]) == {"tests/test_some.py::test_that_breaks_the_gpu"}
    assert result["tests"]["PASSED"] >= 3


def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"} | environment
    return subprocess.run([SCRIPTS / "gpu_check.sh", *arguments], capture_output=True, text=True, env=variables)


def planned(*arguments: str) -> list[list[str]]:
    """Question, step, limit and command of what would be run."""
    plan = gpu_check("--dry-run", *arguments, OUT="/nonexistent")
    assert plan.returncode == 0, plan.stderr
    return [line.split("\t") for line in plan.stdout.splitlines()]


def test_questions_fit_in_the_time_of_a_card_and_run_what_there_is(tmp_path: Path) -> None:
    from checking.questions import QUESTIONS

    (tmp_path / "kernels.tar.xz").touch()
    steps = planned("--cache", str(tmp_path / "kernels.tar.xz"), *QUESTIONS)
    for question in QUESTIONS:
        own = [step for step in steps if step[0] == question]
        assert sum(int(step[2]) for step in own) < (240 if question == "quick" else 540), question
        written = {Path(word).name for step in own for word in step[3].split() if word.startswith("/nonexistent")}
        assert written <= {"rows.jsonl", "kernels.tar.xz"}
        assert [step[1] for step in own][:2] == ["facts", "unpack"]
    assert {step[0] for step in planned()} == {"quick"}
    assert "unpack" not in [step[1] for step in planned("--cache", str(tmp_path / "none"), "models")]
    files = {word for step in steps for word in step[3].split() if word.startswith(("tests/", "scripts/"))}
    assert files >= {"scripts/bench_compress.py", "tests/runtime/backends/triton/test_linear.py"}
    assert all((REPOSITORY / file).is_file() for file in files)


@pytest.mark.full
def test_options_of_all_steps_are_known() -> None:
    """At the sizes of a card, whose steps are not run here."""
    import bench_compress
    from checking.questions import QUESTIONS, Check

    commands = [step.command[1:] for question in QUESTIONS.values() for step in question(Check("python", Path("out")))]
    parsed = []
    for script, *given in commands:
        if script == "scripts/bench_compress.py":
            parsed.append(bench_compress.parse_options(given))
        elif script.startswith("scripts/bench_"):
            module, _ = import_module(Path(script).stem).COMMANDS[given[0]]
            parser = argparse.ArgumentParser()
            import_module(f"benchmarking.{module}").add_options(parser)
            parsed.append(parser.parse_args(given[1:]))
    assert len(parsed) > 10
    assert {each.device for each in parsed if "device" in each} == {"cuda"}


@pytest.mark.parametrize(("question", "only"), [("quick", ""), ("overlap", ""), ("serve", ""), ("models", "int4")])
def test_what_is_asked_first_takes_four_minutes(question: str, only: str, tmp_path: Path) -> None:
    from checking.questions import Check, steps_of

    archive = tmp_path / "kernels.tar.xz"
    archive.touch()
    steps = steps_of(question, Check(sys.executable, tmp_path), "cache", archive, only)
    assert sum(step.seconds for step in steps) <= 240
    assert all(only in step.name for step in steps if step.name not in ("facts", "unpack", "pack"))
    with pytest.raises(ValueError, match="colour"):
        steps_of(question, Check(sys.executable, tmp_path), "cache", archive, "colour")


FOUND = {
    "quick": ("decode 4", "1 prompts of 16 with 3 decodes", "kernel", "int4 g128", "pages int4"),
    "models": ("engine bf16", "engine int4, int4 KV", "mixed"),
    "forms": ("fp8 w8a8", "nvfp4", "exl3"),
    "pages": ("pages int8", "pages fp8", "SDPA bf16, contiguous"),
    "serve": ("start", "2 clients, 8:16 + 4:8 tokens"),
    "compress": ("dense forward", "gptq", "awq", "signround"),
    "mixtures": ("tiny-mixture", "tiny-hybrid"),
    "overlap": ("one after the other", "overlap"),
}
"""Words of the rows of a question, at tiny sizes."""


@pytest.mark.slow
@pytest.mark.parametrize("question", FOUND)
def test_a_rehearsal_answers_a_question_on_a_cpu(tmp_path: Path, question: str) -> None:
    result = gpu_check("--rehearse", question, OUT=str(tmp_path), OMP_NUM_THREADS="1")
    assert result.returncode == 0, (tmp_path / question / "log.txt").read_text()[-3000:]
    assert set(outcomes(tmp_path / question)) <= {"passed", "skipped: compute-sanitizer is not installed"}
    assert {file.name for file in (tmp_path / question).iterdir()} == {
        "summary.json", "log.txt", "rows.jsonl", "kernels.tar.xz"
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / question / "rows.jsonl").read_text().splitlines()]
    words = {word for row in rows for word in row.values() if isinstance(word, str)}
    assert words >= set(FOUND[question])
    assert not [row for row in rows if "error" in row]


def takes_gpu(file: Path) -> bool:
    """Whether a test or fixture of a file has a parameter `gpu`."""
    text = file.read_text()
    nodes = ast.walk(ast.parse(text)) if "gpu" in text else ()
    return any(isinstance(node, ast.FunctionDef) and "gpu" in [each.arg for each in node.args.args] for node in nodes)


def test_every_test_of_a_gpu_is_run_by_it() -> None:
    from checking.questions import ON_GPU, WHOLE_GPU, files_with

    taking = [file for file in (REPOSITORY / "tests").rglob("test_*.py") if takes_gpu(file)]
    assert len(taking) > 10
    assert {str(file.relative_to(REPOSITORY)) for file in taking} <= set(files_with(ON_GPU))
    assert "tests/runtime/runner/test_cuda_graphs.py" in files_with(ON_GPU)
    assert "tests/runtime/runner/test_cuda_graphs.py" in files_with(WHOLE_GPU)


@pytest.mark.full
def test_it_refuses_unknown_questions_and_machines_without_a_gpu(tmp_path: Path) -> None:
    wrong = gpu_check("speed")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    if not torch.cuda.is_available():
        result = gpu_check("models", OUT=str(tmp_path))
        assert result.returncode == 1
        assert "there is no NVIDIA GPU" in result.stdout
        first, *others = outcomes(tmp_path / "models")
        assert (first, set(others)) == ("failed with status 1", {"not reached"})
        assert {file.name for file in tmp_path.rglob("*")} == {"models", "summary.json", "log.txt"}
