"""Steps that pass for recorded ones and are computed each time, on any device: what a recording is compared with."""

from runtime.runner.cuda_graphs import Computation


def capture_nothing(compute: Computation) -> Computation:
    """A `runtime.runner.cuda_graphs.Capture` whose recording is the computation itself."""
    return compute
