"""The full tier: where it begins, what it repeats, and which failures stand in a change's way."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from tiers import SLOW_SECONDS

from compress.cpu.binding import best_instruction_set

LONG_AGO, NOW = "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"
QUIETLY = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
BEFORE = """
from pathlib import Path

def test_fails_for_long():
    assert False

def test_fails_once():
    seen = Path("seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there

def test_worked_until_now():
    assert True
"""
AFTER = BEFORE.replace("assert True", "assert 1 == 2") + "\ndef test_is_new():\n    assert False\n"


def git(folder: Path, *arguments: str, date: str = NOW) -> str:
    names = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = os.environ | names | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    found = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def commit(folder: Path, text: str, date: str = NOW) -> str:
    (folder / "test_cases.py").write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-m", "change", "--allow-empty", date=date)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of one commit, with a case that fails always and one that fails when it is run first."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, BEFORE, LONG_AGO)
    return folder


def names(cases: list[str]) -> list[str]:
    return [case.partition("::")[2] for case in cases]


def test_what_fails_is_unstable_or_known_or_blocks(project: Path, tmp_path: Path) -> None:
    from failed_cases import Alone, checked_out, commit_before, failed_cases, judge

    old, new = git(project, "rev-parse", "HEAD"), commit(project, AFTER)
    assert commit_before(project) == old != new
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={tmp_path / 'cache'}"]
    assert subprocess.run(command, cwd=project, env=QUIETLY, capture_output=True).returncode == 1
    here = Alone(project, ["-q"], QUIETLY, time.time() + 60)

    @contextmanager
    def before():
        with checked_out(project, old) as folder:
            yield Alone(folder, ["-q"], QUIETLY, time.time() + 60)

    verdict = judge(failed_cases(tmp_path / "cache"), here, before)
    assert names(verdict.unstable) == ["test_fails_once"]
    assert names(verdict.known) == ["test_fails_for_long"]
    assert names(verdict.blocking) == ["test_is_new", "test_worked_until_now"]
    assert git(project, "worktree", "list").count("\n") == 0
    assert [line for line in verdict.lines() if not line.startswith(" ")][-1].endswith(": 2")


def test_what_cannot_be_judged_blocks(project: Path) -> None:
    from failed_cases import Alone, Outcome, judge

    commit(project, "import time\n\ndef test_hangs():\n    time.sleep(60)\n")
    case, begin = "test_cases.py::test_hangs", time.time()
    hurried = Alone(project, ["-q"], QUIETLY, time.time() + 2)
    assert hurried.run(case) is Outcome.UNKNOWN
    assert hurried.run(case) is Outcome.UNKNOWN  # at once: the time is over
    assert time.time() - begin < 30
    assert Alone(project, ["-q"], QUIETLY, time.time() + 60).run("test_cases.py::test_is_absent") is Outcome.UNKNOWN
    assert judge([case], hurried, lambda: nullcontext(hurried)).blocking == [case]
    assert judge([case], hurried, lambda: nullcontext(None)).blocking == [case]


def test_a_change_may_have_many_commits(project: Path, tmp_path: Path) -> None:
    from failed_cases import commit_before

    assert commit_before(project) is None
    old = git(project, "rev-parse", "HEAD")
    for hour in range(3):
        new = commit(project, f"# {hour}\n", f"2026-01-03T0{hour}:00:00Z")
    assert commit_before(project) == old
    # A remote that lacks commits shows what the change adds; one that has them all shows nothing.
    git(tmp_path, "clone", "-q", str(project), "clone")
    assert commit_before(tmp_path / "clone") == old
    commit(tmp_path / "clone", "# more\n", "2026-01-03T03:00:00Z")
    assert commit_before(tmp_path / "clone") == new


def test_commits_of_one_hour_alone_give_the_parent(tmp_path: Path) -> None:
    from failed_cases import commit_before

    git(tmp_path, "init", "-q")
    first = commit(tmp_path, "# 1\n")
    commit(tmp_path, "# 2\n")
    assert commit_before(tmp_path) == first


@pytest.mark.parametrize(("text", "status"), [(BEFORE, 0), (AFTER, 1)])
def test_the_exit_status_counts_what_blocks(
    text: str, status: int, project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import full_tier

    commit(project, text)
    monkeypatch.setattr(full_tier, "ROOT", project)
    monkeypatch.setattr(full_tier, "build_library", lambda folder, name: True)
    command = [sys.executable, "-m", "pytest", "-q"]
    assert full_tier.run(command, ["-q"], full_tier.ALL, QUIETLY) == status
    printed = capfd.readouterr().out
    assert "  test_cases.py::test_fails_once\n" in printed
    assert ("  test_cases.py::test_is_new\n" in printed) == bool(status)


def test_the_commit_chooses_where_the_full_tier_begins_and_its_examples() -> None:
    from full_tier import CASE_SECONDS, ROOT, SELECTION, command, rotated, seed_of, test_files

    assert str(Path(__file__).relative_to(ROOT)) in test_files()
    seeds = [seed_of(f"{number:08x}{'0' * 32}") for number in range(0, 1 << 32, 1 << 20)]
    assert {seed % 245 for seed in seeds} == set(range(245))
    assert {seed // 245 % 6 for seed in seeds} == set(range(6))
    assert rotated(["a", "b", "c"], 1) == ["b", "c", "a"]
    given = command(["a"], 2, 1.0, seeds[1], SELECTION, [])
    assert given[given.index("--hypothesis-seed") + 1] == "1048576"
    assert CASE_SECONDS >= 3 * SLOW_SECONDS  # a case on a slower machine than any so far fails by no time


def test_a_machine_runs_every_set_below_its_own() -> None:
    from instruction_sets import ALL, INSTRUCTION_SETS, SETS, available

    assert available(-1) == [ALL]  # no library
    if "avx2" not in INSTRUCTION_SETS:
        pytest.skip("these are the names of other processors")
    by_best = {best: available(INSTRUCTION_SETS.index(best)) for best in ("scalar", "avx2", "avx512", "amx")}
    assert by_best["scalar"] == [ALL]
    assert by_best["avx2"] == ["plain", ALL]
    assert by_best["avx512"] == ["plain", "avx2", "avx512", ALL]
    assert by_best["amx"] == [*SETS, ALL]
    assert available(best_instruction_set())[-1] == ALL
