"""Tests of registries."""

import sys

import pytest

from compress.common.errors import CheckpointError

ENTRY = """
from {package} import SHAPES

@SHAPES.register({arguments})
class Shape:
    name = "{name}"
"""


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    """The registry of a package with a module for each of three entries."""
    folder = tmp_path / "shapes_for_test"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from compress.common.errors import CheckpointError\n"
        "from compress.common.registry import Registry\n"
        "SHAPES = Registry('shape', __name__, CheckpointError)\n"
    )
    arguments = {"circle": "order=2", "oval": "", "square": "aliases=('quadrat',)"}
    for name, given in arguments.items():
        text = ENTRY.format(package=folder.name, arguments=given, name=name)
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    from shapes_for_test import SHAPES

    yield SHAPES
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_modules_are_imported_when_entries_are_read(shapes):
    assert "shapes_for_test.oval" not in sys.modules
    assert len(shapes) == 3
    assert "shapes_for_test.oval" in sys.modules


def test_entries_are_listed_by_order_and_name(shapes):
    import shapes_for_test.square

    assert shapes["square"] is shapes_for_test.square.Shape
    assert list(shapes) == ["oval", "square", "circle"]


def test_aliases_are_found_and_not_listed(shapes):
    assert shapes.find("quadrat") is shapes["square"]
    assert "quadrat" in shapes
    assert "quadrat" not in list(shapes)


def test_unknown_name_is_refused_with_nearest(shapes):
    with pytest.raises(CheckpointError) as caught:
        shapes.find("sqare")
    assert "sqare" in caught.value.problem
    assert "'square'?" in caught.value.remedy
    assert shapes.get("sqare") is None
    with pytest.raises(CheckpointError, match="None"):
        shapes.find(None)


def test_name_is_registered_once(shapes):
    assert len(shapes) == 3
    for names, aliases in ((["oval"], ()), (["disc"], ["quadrat"]), (["disc", "oval"], ())):
        with pytest.raises(ValueError, match="registered already"):
            shapes.register(*names, aliases=aliases)(object)
    assert "disc" not in shapes


def test_removed_entry_leaves_with_its_aliases(shapes):
    square = shapes["square"]
    shapes.remove("square")
    assert "square" not in shapes
    assert "quadrat" not in shapes
    shapes.register("square", aliases=["quadrat"])(square)
    assert shapes["quadrat"] is square


def test_names_of_one_entry_are_several(shapes):
    shapes.register("disc", "disk")(object)
    assert [*shapes] == ["disc", "disk", "oval", "square", "circle"]
    assert shapes["disc"] is shapes["disk"]
