"""How every benchmark ends: with a status, or with its refusal on one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from compress.common.errors import ToolkitError


def leave_with(main: Callable[[], int]) -> NoReturn:
    """Runs a script and leaves the process: with its status, or 1 and one line for a ToolkitError."""
    try:
        sys.exit(main())
    except ToolkitError as error:
        sys.exit(f"error: {error}")
