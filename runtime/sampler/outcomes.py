"""What stands in place of a token where a row has none."""

from __future__ import annotations

INFINITE, FORBIDDEN, UNDECIDED = -1, -2, -3
"""Instead of a token: nothing can be drawn, or another look at the row is needed to say which one it is."""
ERRORS = {
    INFINITE: "the model's logits are not finite (NaN or infinity)",
    FORBIDDEN: "the grammar allows no token here",
}
