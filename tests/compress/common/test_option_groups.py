"""Groups of options: one dataclass parameter of a command, many options of its command line."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from compress.common.cli import with_groups


@dataclass(frozen=True, slots=True)
class Size:
    width: Annotated[int, typer.Option("--width", min=1)] = 3
    num_rows: Annotated[int | None, typer.Option("--rows")] = None


@dataclass(frozen=True, slots=True)
class Frame:
    width: Annotated[int, typer.Option("--frame")] = 1


def test_fields_become_options_in_the_place_of_their_group() -> None:
    calls = []

    @with_groups
    def draw(*, title: Annotated[str, typer.Argument()], size: Size, loud: bool = False) -> None:
        """Draw something."""
        calls.append((title, size, loud))

    app = typer.Typer()
    app.command()(draw)
    assert CliRunner().invoke(app, ["box"]).exit_code == 0
    assert CliRunner().invoke(app, ["box", "--rows", "7", "--width", "2", "--loud"]).exit_code == 0
    assert calls == [("box", Size(), False), ("box", Size(2, 7), True)]

    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Draw something." in shown
    assert shown.index("--width") < shown.index("--rows") < shown.index("--loud")
    assert CliRunner().invoke(app, ["box", "--width", "0"]).exit_code == 2


def test_two_options_of_one_name_are_refused() -> None:
    def draw(*, size: Size, frame: Frame) -> None: ...

    with pytest.raises(ValueError, match="width"):
        with_groups(draw)
