"""Whether a checkpoint was calibrated on the text it is measured with: such figures flatter it."""

from __future__ import annotations

from calibration.sequences import overlap
from compress.evaluate.seen import SeenText
from compress.evaluate.windows import Windows

MAX_SHARE = 0.01


def shared_spans(seen: SeenText | None, windows: Windows) -> float | None:
    """Share of the windows' 32-token spans that were in the calibration sequences; None where these are not at hand."""
    return None if seen is None or seen.tokens is None else overlap(windows.tokens, seen.tokens)


def overlap_warning(share: float | None, seen: SeenText | None, windows: Windows) -> tuple[str, ...]:
    """A warning when both texts are the same, or more than `MAX_SHARE` of the evaluation text was calibrated on.

    Args:
        share: what `shared_spans` gave.
    """
    if seen is None:
        return ()
    flatter = "the figures flatter this checkpoint"
    if windows.sha256 in seen.hashes:
        amount = "" if share is None else f" ({100 * share:.1f} % of what is measured was in its sequences)"
        return (f"{windows.source} is also the calibration text of this checkpoint{amount}: {flatter}",)
    if share is None or share <= MAX_SHARE:
        return ()
    return (f"{100 * share:.1f} % of {windows.source} was also in the calibration text {seen.name}: {flatter}",)
