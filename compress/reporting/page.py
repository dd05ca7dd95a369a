"""Pages as data, numbers as text, and the one template: an HTML file that runs no script and loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compress.common.errors import ToolkitError
from compress.common.files import atomic_file, check_file
from compress.common.plots import COLORS, INSTALL_PLOTS, has_matplotlib

if TYPE_CHECKING:
    from jinja2 import Template

    from compress.reporting.figures import Figure


def short(value: float) -> str:
    """Three significant digits: `0`, `0.0397`, `4.1e-5`, `65.6`, `1,234`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e9:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def change(before: float, after: float) -> str:
    """`+2.56 %`."""
    return f"{100 * (after / before - 1):+.2f} %"


def maybe(value: float | None) -> str:
    """Three digits, or `-` for None."""
    return "-" if value is None else short(value)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def times(before: float, after: float) -> str:
    """`2.05 times smaller`, or larger where it is."""
    if not before or not after:
        return "-"
    return f"{before / after:.2f} times smaller" if after <= before else f"{after / before:.2f} times larger"


def printable(value: object) -> str:
    """Text in which U+FFFD replaces control characters, which no browser shows and XML may not hold."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in str(value))


GENERATOR = "compress report"
_HEAD = 400
"""Bytes at the start of a page that hold the name of its generator."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text; `style` is a CSS class: `soft`, `good`, `bad`."""

    kind: ClassVar[str] = "paragraph"
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that scrolls by itself; `numeric` columns are aligned right, a `summary` folds it."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    numeric: Sequence[int] = ()
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one below the other."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of lines."""

    kind: ClassVar[str] = "bullets"
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Figures:
    """Diagrams side by side; tables of their values where matplotlib is not installed."""

    kind: ClassVar[str] = "figures"
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True)
class Listing:
    """Text with its line breaks, folded under a summary."""

    kind: ClassVar[str] = "listing"
    summary: str
    text: str


Part = Paragraph | Table | Facts | Bullets | Figures | Listing


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page."""

    title: str
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, title: str, *parts: Part | None) -> Section:
        return cls(title, tuple(part for part in parts if part is not None))


def bullets(lines: Iterable[str]) -> Bullets | None:
    """A list, or None without a line."""
    found = tuple(lines)
    return Bullets(found) if found else None


def figures(*drawn: Figure | None) -> Figures | None:
    """Those that are there, or None without any."""
    found = tuple(each for each in drawn if each is not None)
    return Figures(found) if found else None


@dataclass(frozen=True, slots=True)
class Page:
    """A whole page; `tiles` are figures with their meaning."""

    title: str
    heading: str
    lead: str
    sections: Sequence[Section]
    tiles: Sequence[tuple[str, str]] = ()
    footer: str = ""

    def html(self) -> str:
        no_plots = "" if has_matplotlib() else f"Diagrams are shown as tables: matplotlib is missing. {INSTALL_PLOTS}"
        return _template().render(page=self, generator=GENERATOR, colors=COLORS, no_plots=no_plots).lstrip()

    def write(self, out: Path) -> None:
        """Writes the page, replacing an older one. Raises ToolkitError: `out` is a folder or a file that is not such
        a page, or its folder does not exist."""
        if out.is_dir():
            raise ToolkitError(f"{out} is a folder", f"Name a file: --out {out / 'report.html'}")
        check_file(out)
        if out.exists() and GENERATOR.encode() not in out.read_bytes()[:_HEAD]:
            raise ToolkitError(f"{out} exists and is not a page of this command", "Name another file with --out")
        if not out.parent.is_dir():
            raise ToolkitError.missing("folder", out.parent, "Create it, or name another file with --out")
        with atomic_file(out) as stream:
            stream.write(self.html().encode())


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(files("compress.reporting").joinpath("page.html").read_text(encoding="utf-8"))


def _printable(value: Any) -> Any:
    """Leaves ready markup; everything else becomes printable text, which the environment escapes."""
    return value if hasattr(value, "__html__") else printable(value)
