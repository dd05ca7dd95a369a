"""Figures drawn by matplotlib as SVG: equal input gives equal bytes, and marks carry tooltips."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL_PLOTS = "pip install 'compress-runtime[plots]'"
COLORS = {
    "card": "#ffffff",
    "ink": "#16191d",
    "soft": "#5c6570",
    "rule": "#e4e7eb",
    "base": "#aab2bc",
    "s1": "#2a78d6",
    "s2": "#1a9a70",
    "s3": "#c98500",
    "s4": "#6a4fd0",
    "s5": "#d8433f",
    "s6": "#0d8ea3",
}
"""By the name of the CSS variable that a themed page uses instead; s1 to s6 tell series apart."""
SERIES = tuple(COLORS[name] for name in COLORS if name[1:].isdigit())
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "compress-runtime",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "text.color": COLORS["ink"],
    "axes.edgecolor": COLORS["base"],
    "axes.labelcolor": COLORS["soft"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.xmargin": 0.03,
    "grid.color": COLORS["rule"],
    "xtick.color": COLORS["base"],
    "xtick.labelcolor": COLORS["soft"],
    "ytick.labelcolor": COLORS["soft"],
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "lines.markeredgecolor": COLORS["card"],
    "lines.markeredgewidth": 1.2,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "figure.constrained_layout.h_pad": 0.07,
    "legend.handlelength": 1.0,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
}
_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_XLINK = "{http://www.w3.org/1999/xlink}"


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


@dataclass(slots=True)
class Canvas:
    """A figure under construction and the tooltips of its artists."""

    figure: Figure
    tooltips: dict[str, Sequence[str]] = field(default_factory=dict)

    def tip(self, artist: Artist, *texts: str) -> None:
        """Gives an artist one tooltip, or each marker of a line its own."""
        gid = f"tip-{len(self.tooltips)}"
        artist.set_gid(gid)
        self.tooltips[gid] = texts


def draw_svg(paint: Callable[[Canvas], None], width: float, height: float, label: str = "") -> ElementTree.Element:
    """Draws a figure of `width` x `height` pixels.

    Args:
        label: name of the drawing for screen readers.

    Returns:
        The `svg` element without XML namespaces, as HTML embeds it.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained", facecolor="none"))
        paint(canvas)
        FigureCanvasSVG(canvas.figure).print_svg(stream, metadata=_METADATA)
    root = _without_namespaces(ElementTree.fromstring(_name_clips(stream.getvalue())))
    root.attrib = {
        "viewBox": f"0 0 {width:g} {height:g}",
        "role": "img",
        "aria-label": label,
        "stroke-linejoin": "round",
    }
    _add_tooltips(root, canvas.tooltips)
    return root


def _name_clips(svg: str) -> str:
    """Renames clip paths by their printed coordinates: the layout solver's last bits, which enter matplotlib's own
    names, differ from run to run."""
    for name, content in re.findall(r'<clipPath id="(\w+)">(.*?)</clipPath>', svg, re.DOTALL):
        svg = svg.replace(name, "p" + hashlib.sha256(content.encode()).hexdigest()[:10])
    return svg


def svg_file(root: ElementTree.Element) -> str:
    """Text of a file of its own, on white."""
    _, _, width, height = root.attrib["viewBox"].split()
    whole = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height})
    whole.attrib |= root.attrib
    whole.append(ElementTree.Element("rect", width=width, height=height, fill=COLORS["card"]))
    whole.extend(root)
    return ElementTree.tostring(whole, encoding="unicode") + "\n"


def svg_inline(root: ElementTree.Element) -> str:
    """Text for an HTML page: colours are its CSS variables, and the font is its own."""
    text = ElementTree.tostring(root, encoding="unicode")
    for name, value in COLORS.items():
        text = text.replace(f": {value}", f": var(--{name})")
    return text.replace("font-family: 'DejaVu Sans'", "font-family: inherit")


def color(index: int) -> str:
    """The color of the n-th series; they repeat after the last."""
    return SERIES[index % len(SERIES)]


def use_short_numbers(axes: Axes, shown: Callable[[float], str], *, is_log: bool = False) -> None:
    """Labels the y axis by `shown`; a logarithmic one at 1, 2 and 5 where it spans few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if is_log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))


def _without_namespaces(root: ElementTree.Element) -> ElementTree.Element:
    """Drops namespaces, the style sheet, and every id that nothing refers to: a page holds many figures."""
    referred = {
        name for each in root.iter() for value in each.attrib.values() for name in re.findall("#([^)]+)", value)
    }
    for each in root.iter():
        each.tag = each.tag.rpartition("}")[2]
        each.attrib = {
            name.removeprefix(_XLINK): value
            for name, value in each.attrib.items()
            if name != "id" or value in referred or value.startswith("tip-")
        }
    for defs in root.findall("defs"):
        for style in defs.findall("style"):
            defs.remove(style)
    return root


def _add_tooltips(root: ElementTree.Element, tooltips: dict[str, Sequence[str]]) -> None:
    for group in root.iter("g"):
        texts = tooltips.get(group.attrib.get("id", ""), ())
        marked = [group] if len(texts) == 1 else list(group.iter("use"))
        if texts:
            del group.attrib["id"]
            for element, text in zip(marked, texts, strict=True):
                title = ElementTree.Element("title")
                title.text = "".join(each if each.isprintable() else "\ufffd" for each in text)
                element.insert(0, title)
