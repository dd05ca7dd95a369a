"""Building, loading, and doing without the compiled library; its pool of threads."""

import ctypes
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_models import random_weight

from compress.checkpoint.weights import Int
from compress.common.errors import ToolkitError
from compress.cpu import binding, build
from compress.cpu.binding import absence, library, set_threads
from compress.cpu.binding import library as loaded_library
from runtime.backends.cpu.linear import CpuLinear, _functions

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Forgets what is loaded, and afterwards what the test loaded."""
    forgotten = (loaded_library, absence, binding._load, _functions)
    for function in forgotten:
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in forgotten:
        function.cache_clear()


def test_without_the_library_everything_says_why(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(binding, "LIBRARY", tmp_path / "libnative.so")
    assert loaded_library() is None
    assert re.search(r"not compiled.*python -m compress\.cpu\.build", absence())
    assert binding.best_instruction_set() == -1
    with pytest.raises(ToolkitError, match=r"not compiled.*python -m compress\.cpu\.build"):
        binding.set_threads(1)
    with pytest.raises(ToolkitError, match=r"not compiled.*python -m compress\.cpu\.build"):
        CpuLinear(random_weight((64, 64), Int(4, 32)))


def test_its_absence_is_logged_once_with_the_remedy(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(binding, "LIBRARY", tmp_path / "libnative.so")
    for _ in range(3):
        assert absence()
        assert loaded_library() is None
        assert binding.best_instruction_set() == -1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "python -m compress.cpu.build" in caplog.text


@pytest.mark.skipif(loaded_library() is None, reason=absence())
def test_nothing_is_logged_where_it_is(fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded_library() is not None
    assert not caplog.records


@pytest.mark.parametrize(
    "command",
    [
        ("runtime", "generate", "--prompt", "The castle", "--max-tokens", "2", "--temperature", "0"),
        pytest.param(("compress", "eval", "--ppl", "--tokens", "128"), marks=pytest.mark.full),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_go_on_without_it_and_say_so_once(command: tuple[str, ...], tmp_path: Path) -> None:
    missing = (
        "from pathlib import Path; from compress.cpu import binding; "
        f"setattr(binding, 'LIBRARY', Path('{tmp_path}/none'))"
    )
    code = f"{missing}; from {command[0]}.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code, *command[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("run python -m compress.cpu.build (until then PyTorch computes") == 1, result.stderr


def test_a_file_that_is_no_library_is_not_fatal(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "libnative.so"
    file.write_bytes(b"not a library")
    fresh.setattr(binding, "LIBRARY", file)
    assert loaded_library() is None
    assert "cannot be loaded" in absence()


@pytest.mark.skipif(loaded_library() is None, reason=absence())
def test_a_library_older_than_its_sources_is_not_used(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(binding, "source_digest", lambda: "other")
    assert loaded_library() is None
    assert "older than their sources" in absence()


def test_without_a_compiler_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolkitError, match=r"PATH.*apt install gcc"):
        build.build(tmp_path / "libnative.so")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")
def test_a_compiler_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "broken.c").write_text("int broken(\n")
    target = tmp_path / "libnative.so"
    target.write_bytes(b"before")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "c")
    with pytest.raises(ToolkitError, match=r"broken\.c.*GCC 11"):
        build.build(target)
    assert target.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "libnative.so"]


def test_an_unknown_instruction_set_is_refused() -> None:
    if loaded_library() is None:
        pytest.skip(absence())
    linear = CpuLinear(random_weight((64, 64), Int(4, 32)), instruction_set=7)
    with pytest.raises(ToolkitError, match=r"instruction set.*--linear-backend"):
        linear(torch.zeros(1, 64))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"absent/libnative\.so .*pip install"):
        build.build(tmp_path / "absent" / "libnative.so")


needs_library = pytest.mark.skipif(library() is None, reason=absence())


@pytest.fixture
def linear() -> Iterator[CpuLinear]:
    yield CpuLinear(random_weight((1024, 512), Int(4, 128)))
    set_threads(0)


@needs_library
def test_callers_at_once_get_their_own_results(linear: CpuLinear) -> None:
    set_threads(3)
    inputs = [torch.randn(1 + index % 9, 512, generator=torch.Generator().manual_seed(index)) for index in range(64)]
    expected = [linear(x) for x in inputs]
    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(lambda index: linear(inputs[index % 64]), range(1024)))
    assert all(torch.equal(y, expected[index % 64]) for index, y in enumerate(found))


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_workers_of_its_own(linear: CpuLinear) -> None:
    set_threads(2)
    x = torch.randn(4, 512)
    expected = linear(x)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(linear(x), expected) for _ in range(50)) else 1)
    deadline = time.monotonic() + 30
    while (finished := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if finished == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert finished == (child, 0)
    assert torch.equal(linear(x), expected)


@needs_library
def test_a_busy_neighbour_costs_its_share_and_not_more(linear: CpuLinear) -> None:
    """Helpers that are interrupted must not stall every product for a time slice, as barriers that spin do (ten times
    slower and more). One thread under the same load is the measure."""
    x = torch.randn(1, 512)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    seconds = {1: 0.0, 2: 0.0}
    try:
        for _ in range(8):
            for count in seconds:
                set_threads(count)
                begin = time.perf_counter()
                for _ in range(2000):
                    linear(x)
                seconds[count] += time.perf_counter() - begin
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert seconds[2] < 3 * seconds[1], seconds


@needs_library
def test_the_number_of_threads_is_clamped() -> None:
    assert set_threads(1) == 1
    assert set_threads(10**6) == 256
    assert set_threads(0) == binding.available_threads()


def test_quotas_of_control_groups(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert binding.quota(tmp_path, membership) == math.inf
    membership.write_text("0::/slice/job\n")
    assert binding.quota(tmp_path, membership) == math.inf
    write("slice/job/cpu.max", "max 100000\n")
    assert binding.quota(tmp_path, membership) == math.inf
    write("slice/cpu.max", "150000 100000\n")
    assert binding.quota(tmp_path, membership) == 1.5
    membership.write_text("3:cpu,cpuacct:/job\n2:memory:/other\n")
    write("cpu/job/cpu.cfs_quota_us", "-1\n")
    write("cpu/job/cpu.cfs_period_us", "100000\n")
    assert binding.quota(tmp_path, membership) == math.inf
    write("cpu/job/cpu.cfs_quota_us", "50000\n")
    assert binding.quota(tmp_path, membership) == 0.5


@pytest.mark.parametrize(
    ("value", "limit"), [("3", 3), ("2,1", 2), (" 5 ", 5), ("", math.inf), ("0", math.inf), ("many", math.inf)]
)
def test_no_more_threads_than_openmp_may_have(monkeypatch: pytest.MonkeyPatch, value: str, limit: float) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert binding.openmp_limit() == limit
    monkeypatch.setattr(binding, "_siblings", str)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(binding, "quota", lambda: math.inf)
    assert binding.available_threads() == min(4, limit)


def test_at_least_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "quota", lambda: 0.2)
    assert binding.available_threads() == 1


@pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")
@pytest.mark.parametrize("most", binding.INSTRUCTION_SETS[:-1])
def test_a_library_for_less_uses_no_more(most: str, tmp_path: Path) -> None:
    source, best = str(build.SOURCES / "common" / "dispatch.c"), []
    for name, limit in (("whole", []), ("limited", [f"-DMOST_INSTRUCTION_SET={most.upper()}"])):
        build.compile_c([*limit, "-shared", source, "-o", str(tmp_path / name)])
        compiled = ctypes.CDLL(str(tmp_path / name))
        best.append(compiled.native_best_instruction_set())
    assert best[1] == min(best[0], binding.INSTRUCTION_SETS.index(most))
    compiled.native_tiles_refusal.restype = ctypes.c_char_p
    assert compiled.native_tiles_refusal() or most == "amx"


@pytest.mark.full
@pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")
def test_the_whole_library_can_be_built_for_less(tmp_path: Path) -> None:
    target = build.build(tmp_path / "libnative.so", "scalar")
    assert ctypes.CDLL(str(target)).native_best_instruction_set() == 0
