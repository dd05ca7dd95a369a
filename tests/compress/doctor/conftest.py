"""Copies of the demo model, dense and packed, that tests damage."""

from collections.abc import Callable
from pathlib import Path

import pytest
import runs
from folders import private_copy
from shared_store import SharedStore

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.files import REPORT_FILE
from compress.doctor.examine import examine
from compress.stages.quantize import QuantizeStage

Kinds = set[tuple[str, str]]


@pytest.fixture(scope="session")
def packed_demo(shared_store: SharedStore) -> Path:
    """The demo model rounded to 4 bits; only read."""
    stage = QuantizeStage("rtn", Int(4, 32))
    return shared_store.folder("packed", "doctor", lambda out: runs.compress(demo_model_path(), out, stage))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return private_copy(demo_model_path(), tmp_path / "dense")


@pytest.fixture
def packed(packed_demo: Path, tmp_path: Path) -> Path:
    """Without the report, so that damage is found by what it is and not by digests too."""
    folder = private_copy(packed_demo, tmp_path / "packed")
    (folder / REPORT_FILE).unlink()
    return folder


@pytest.fixture
def kinds() -> Callable[..., Kinds]:
    """Severity and kind of everything that is found; each finding has its numbers and a remedy."""

    def find(folder: Path, against: Path | None = None) -> Kinds:
        found = examine(folder, against).findings
        assert all(each.where and each.problem and each.remedy for each in found)
        assert not any("\n" in each.problem + each.remedy for each in found)
        return {(str(each.severity), each.kind) for each in found}

    return find
