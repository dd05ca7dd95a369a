"""The examination itself: a check is one class, no damage ends it, and every tensor is reported as it is read."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from compress.checkpoint.locate.file_names import SINGLE_FILE
from compress.common.cli import draft_model_path
from compress.doctor.base import CHECKS, Check
from compress.doctor.examine import examine
from compress.doctor.findings import Finding
from compress.doctor.view import StoredTensor


def test_a_check_is_one_class() -> None:
    names: list[str] = []

    class Names(Check):
        name: ClassVar[str] = "names of a test"

        def tensor(self, stored: StoredTensor) -> Iterator[Finding]:
            names.append(stored.name)
            if stored.name == "model.norm.weight":
                yield self.warning("seen", stored.name, "it is there", "Do nothing")

        def finish(self) -> Iterator[Finding]:
            raise ValueError("two\nlines")

    CHECKS.register()(Names)
    try:
        with pytest.raises(ValueError, match="registered already"):
            CHECKS.register()(Names)
        seen: list[tuple[str, int, int]] = []
        found = examine(draft_model_path(), on_progress=lambda *each: seen.append(each))
    finally:
        CHECKS.remove(Names.name)
    assert [(each.kind, each.severity) for each in found.findings] == [("unreadable", "error"), ("seen", "warning")]
    assert found.findings[0].problem == "cannot be checked: ValueError: two"
    assert [name for name, _, _ in seen] == names
    assert seen[-1][1:] == (len(names), len(names))


def damage(folder: Path, seed: int) -> None:
    """Cuts off or changes some bytes of one file."""
    chance = random.Random(seed)
    path = chance.choice(sorted(folder.glob("*.json")) + [folder / SINGLE_FILE] * 3)
    data = bytearray(path.read_bytes())
    if chance.random() < 0.3:
        data = data[: chance.randrange(len(data))]
    for _ in range(chance.randrange(1, 20)):
        if data:
            data[chance.randrange(min(len(data), 3000))] = chance.randrange(256)
    path.write_bytes(data)


def examine_damaged(source: Path, folder: Path, seed: int) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    damage(folder, seed)
    return examine(folder).ok


def test_damage_becomes_findings(packed_demo: Path, tmp_path: Path) -> None:
    sound = [examine_damaged(packed_demo, tmp_path / "copy", seed) for seed in range(4)]
    assert not all(sound)


@pytest.mark.full
def test_much_damage_becomes_findings(packed_demo: Path, tmp_path: Path) -> None:
    sound = [examine_damaged(packed_demo, tmp_path / "copy", seed) for seed in range(100, 160)]
    assert sound.count(False) > 6
