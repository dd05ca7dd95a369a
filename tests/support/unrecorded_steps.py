"""Steps that pass for recorded ones and are computed each time, on any device: what a recording is compared with."""

from __future__ import annotations

from runtime.model.captures import Computation


def capture_nothing(compute: Computation) -> Computation:
    """A `runtime.model.captures.Capture` whose recording is the computation itself."""
    return compute
