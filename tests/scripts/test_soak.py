"""The soak: its requests, what it measures, and a short one."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MINUTE = 60


def small_draw(seed: str) -> Any:
    from soak_requests import Draw

    return Draw(seed, "demo", context=64, vocab_size=300)


def test_a_seed_gives_the_same_requests() -> None:
    first, again, other = (small_draw(seed) for seed in "aab")
    assert first.shot() == again.shot() != other.shot()


def test_every_kind_can_be_drawn_and_clients_leave_in_every_manner() -> None:
    import soak_requests

    draw = small_draw("kinds")
    assert all(make(draw).path.startswith("/") for _, make in soak_requests.KINDS.values())
    assert {soak_requests.left(draw).manner for _ in range(50)} == set(soak_requests.MANNERS) - {"reads all"}
    assert len({soak_requests.constrained(draw).content for _ in range(10)}) == 10


def measured(sizes: list[int], answers: dict[tuple[str, str], int], log: Path, unfinished: int = 0) -> Any:
    """A soak of one size of memory per minute."""
    import soak

    samples = [soak.Sample(MINUTE * minute, size, size, 1) for minute, size in enumerate(sizes)]
    server = SimpleNamespace(log=log.open())
    found = soak.Soak(server, 0, 1, samples[0], samples[0], samples[-1], 0.0, samples, Counter(answers))
    found.left_behind = {"running": unfinished, "waiting": 0}
    return found


@pytest.mark.parametrize(
    ("sizes", "status", "unfinished", "text", "num_missed"),
    [
        ([100, 110, 119], "200", 0, "", 0),
        ([100, 100, 100], "503", 0, "", 0),
        ([100, 110, 125], "200", 0, "", 2),
        ([100, 130, 125, 100], "500", 0, "", 1),
        ([100, 100, 100], "no answer", 0, "", 1),
        ([100, 100, 100], "200", 1, "", 1),
        ([100, 100, 100], "200", 0, "Traceback (most recent call last):", 1),
    ],
)
def test_bars(tmp_path: Path, sizes: list[int], status: str, unfinished: int, text: str, num_missed: int) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    found = measured(sizes, {("chat", status): 1}, log, unfinished)
    assert len(found.misses()) == num_missed
    assert [row["minute"] for row in found.minutes()] == [str(i + 1) for i in range(len(sizes))]


def test_memory_of_children_counts() -> None:
    import soak

    alone = soak.read_sample(os.getpid(), 0)
    with subprocess.Popen(["sleep", "60"]) as child:
        both, children = soak.read_sample(os.getpid(), 0), soak.process_ids(os.getpid())
        child.kill()
    assert child.pid in children
    assert both.resident > alone.resident


@pytest.mark.slow
def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    import soak

    figures = tmp_path / "soak.json"
    assert soak.main(["--minutes", "1", "--warm-up", "0.5", "--clients", "4", "--out", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["misses"] == []
    assert found["start"]["resident"] <= found["peak"]
    assert sum(bool(row.get("200")) for row in found["answers"]) > len(found["answers"]) // 2
