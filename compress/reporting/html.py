"""HTML as text. Whatever comes from a file passes through `text` or an attribute, and both escape it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from compress.common.errors import ToolkitError

GENERATOR = "compress report"


def text(value: object) -> str:
    """Escaped; control characters, which no browser shows, become a replacement sign."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in str(value))
    return escape(shown, quote=True)


def tag(name: str, *content: str, **attributes: object) -> str:
    """An element of ready content; attribute values are escaped, `class_` is `class`, `a_b` is `a-b`."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value != ""
    )
    return f"<{name}{named}>{''.join(content)}</{name}>"


def paragraph(value: object, **attributes: object) -> str:
    return tag("p", text(value), **attributes)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> str:
    """A table that scrolls sideways by itself; `numeric` columns are set to the right."""
    right = set(numeric)
    classes = ["number" if index in right else "" for index in range(len(head))]
    heads = "".join(tag("th", text(name), class_=name_class) for name, name_class in zip(head, classes, strict=True))
    body = "".join(
        tag("tr", *(tag("td", text(cell), class_=each) for cell, each in zip(row, classes, strict=True)))
        for row in rows
    )
    return tag("div", tag("table", tag("thead", tag("tr", heads)), tag("tbody", body)), class_="scroll")


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Names and values, one below the other."""
    return tag("dl", *(tag("dt", text(name)) + tag("dd", text(value)) for name, value in rows))


def bullets(lines: Iterable[object]) -> str:
    return tag("ul", *(tag("li", text(line)) for line in lines))


def section(title: str, *content: str) -> str:
    return tag("section", tag("h2", text(title)), *content)


def page(title: str, *content: str) -> str:
    """A whole page that loads nothing from elsewhere."""
    style = files("compress.reporting").joinpath("page.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8">'
        f'<meta name="generator" content="{GENERATOR}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{style}</style>"
    )
    body = tag("main", *content)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


_HEAD = 400


def write_page(page: str, out: Path) -> None:
    """Writes a page, over an older one if need be.

    Raises:
        ToolkitError: `out` is a folder or another file than such a page, or its folder does not exist.
    """
    if out.is_dir():
        raise ToolkitError(f"{out} is a folder", f"Name a file: --out {out / 'report.html'}")
    if out.exists() and GENERATOR.encode() not in out.read_bytes()[:_HEAD]:
        raise ToolkitError(f"{out} exists and is no page of this command", "Name another file with --out")
    if not out.parent.is_dir():
        raise ToolkitError(f"the folder {out.parent} does not exist", "Make it, or name another file with --out")
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
