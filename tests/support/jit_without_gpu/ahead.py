"""Kernels of the tuner, compiled before they are measured."""

from __future__ import annotations

from jit_without_gpu.session import DEVICE, gpu_without_hardware


def compile_ahead_and_launch() -> tuple[int, int, int]:
    """Counts kernels that are compiled ahead for one product that cannot run and three that can, launches until then,
    and kernels that these have to compile afterwards."""
    from benchmarking.gpu.ahead import compile_ahead
    from benchmarking.gpu.kernels import candidates
    from tune_kernels import Copies

    def refuse() -> None:
        raise RuntimeError("cannot")

    with gpu_without_hardware() as gpu:
        copies = Copies.of(128, 256, DEVICE)
        calls = [copies.calls(1, config)[0] for config in list(candidates(1))[:3]]
        compiled, launches = compile_ahead([refuse, *calls], DEVICE), gpu.launches
        for call in calls:
            call()
        return compiled, launches, sum(not build.cached for build in gpu.builds) - compiled
