"""Numbers and names as text: three digits, decimal units, changes in percent."""

from __future__ import annotations

_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"))


def short(value: float) -> str:
    """Three significant digits: `0`, `0.0397`, `4.1e-5`, `65.6`, `1,234`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e9:
        mantissa, _, power = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


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
