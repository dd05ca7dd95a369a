"""A session in which tensors of the device `meta` count as those of a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from jit_without_gpu.builds import Build, describe_build
from jit_without_gpu.libcuda import DriverLibrary
from jit_without_gpu.numbers import reading_zeros
from runtime.backends import backend
from runtime.backends.triton import device as triton_device
from runtime.backends.triton.device import Gpu

DEVICE = torch.device("meta")
"""Its tensors have sizes, strides and addresses, and neither memory nor numbers."""


@dataclass(frozen=True)
class Card:
    """A GPU and the limits of its programs.

    Attributes:
        shared_bytes: that one program may have.
    """

    gpu: Gpu
    shared_bytes: int

    @property
    def arch(self) -> int:
        major, minor = self.gpu.capability
        return 10 * major + minor

    @property
    def attributes(self) -> dict[int, int]:
        """By their numbers in `CUdevice_attribute` (cuda.h)."""
        major, minor = self.gpu.capability
        grid = {5: 2**31 - 1, 6: 2**16 - 1, 7: 2**16 - 1}
        program = {1: 1024, 8: 48 * 1024, 10: 32, 12: 64 * 1024, 97: self.shared_bytes}
        return grid | program | {16: self.gpu.processors, 75: major, 76: minor}


H200 = Card(Gpu("NVIDIA H200", (9, 0), 132), 227 * 1024)
A100 = Card(Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108), 163 * 1024)

_numbers = count(1000)
"""Device numbers: Triton keeps builds by them, so that no session finds those of another."""


@dataclass
class Session:
    """Record of a session: builds and launches.

    Attributes:
        builds: all that Triton compiled or found in its cache, in order.
    """

    card: Card
    library: DriverLibrary
    builds: list[Build] = field(default_factory=list)
    _first: int = 0

    def __post_init__(self) -> None:
        self._first = self.library.launches

    @property
    def launches(self) -> int:
        """Kernels that were launched."""
        return self.library.launches - self._first

    def listen(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """Implements Triton's `CompilationListener`."""
        self.builds.append(describe_build(src, metadata, metadata_group, times, cache_hit))


@contextmanager
def gpu_without_hardware(card: Card = H200) -> Iterator[Session]:
    """Lets Triton and the backends take `DEVICE` for a GPU. Builds go to Triton's cache folder.

    Raises:
        RuntimeError: this process runs Triton kernels in the interpreter.
    """
    import triton
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        raise RuntimeError("this process interprets Triton kernels (TRITON_INTERPRET=1): use another one")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    library = DriverLibrary(Path(knobs.cache.dir), include)
    library.describe(card.attributes)
    session, before = Session(card, library), driver._active
    with ExitStack() as stack:
        stack.enter_context(knobs.nvidia.scope())
        knobs.nvidia.libcuda_path = str(library.folder)
        stack.enter_context(knobs.compilation.scope())
        knobs.compilation.listener = session.listen
        stack.callback(driver.set_active, before)
        driver.set_active(_triton_driver(card))
        stack.enter_context(patch.object(triton_device, "gpu_of", lambda device: _gpu_of(device, card.gpu)))
        stack.enter_context(patch.dict(backend.BACKENDS._entries, _backends_of_gpus()))
        stack.enter_context(reading_zeros())
        yield session


def _gpu_of(device: torch.device, gpu: Gpu) -> Gpu | None:
    return gpu if device.type == DEVICE.type else None


def _backends_of_gpus() -> dict[str, tuple[int, backend.Backend]]:
    """Entries of backends of GPUs that serve `DEVICE`."""
    registered = backend.BACKENDS.load()
    return {
        name: (order, replace(each, device=DEVICE.type))
        for name, (order, each) in registered.items()
        if each.device == "cuda"
    }


def _triton_driver(card: Card) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    nvidia.libcuda_dirs.cache_clear()
    nvidia.library_dirs.cache_clear()
    number = next(_numbers)

    class Driver(nvidia.CudaDriver):
        """Asks neither torch nor hardware."""

        def __init__(self) -> None:
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
            self.get_device_capability = lambda device=0: card.gpu.capability
            self.get_current_stream = lambda device: 0
            self.get_current_device = lambda: number
            self.set_current_device = lambda device: None

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", card.arch, 32)

    return Driver()
