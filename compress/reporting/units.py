"""Numbers as people read them."""

from __future__ import annotations

from compress.reporting.axis import short

_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


def size(count: float) -> str:
    """`6.65 MB`: decimal units, three digits."""
    for unit, name in _SIZES:
        if count >= unit:
            return f"{count / unit:.{2 if count < 100 * unit else 0}f} {name}"
    return f"{count:.0f} bytes"


def change(before: float, after: float) -> str:
    """`+2.56 %`."""
    return f"{100 * (after / before - 1):+.2f} %"


def maybe(value: float | None) -> str:
    """Three digits, or `-` for nothing."""
    return "-" if value is None else short(value)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def times(before: float, after: float) -> str:
    """`2.05 times smaller`, or larger where it is."""
    if not before or not after:
        return "-"
    return f"{before / after:.2f} times smaller" if after <= before else f"{after / before:.2f} times larger"
