"""The driver library without a GPU: compiled at first use, and loaded where Triton looks for libcuda."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("libcuda.c")
SONAME = "libcuda.so.1"


class DriverLibrary:
    """The loaded library.

    Args:
        cache: the compiled library is kept in a folder of its own in this one.
        include: folder of `cuda.h`.
    """

    def __init__(self, cache: Path, include: Path) -> None:
        self.folder = _build(cache, include)
        # Global, so that whatever opens it by its name gets this one.
        self._library = ctypes.CDLL(str(self.folder / SONAME), mode=ctypes.RTLD_GLOBAL)
        self._launches = ctypes.c_long.in_dll(self._library, "num_launches")
        self._overlapping = ctypes.c_long.in_dll(self._library, "num_overlapping")
        self._attributes = (ctypes.c_int * 256).in_dll(self._library, "device_attributes")

    @property
    def launches(self) -> int:
        """Kernels that were launched since the library was loaded."""
        return self._launches.value

    @property
    def overlapping(self) -> int:
        """Those of them that may start before the kernel ahead of them has ended."""
        return self._overlapping.value

    def describe(self, attributes: Mapping[int, int]) -> None:
        """Sets attributes of the device, by their numbers in `CUdevice_attribute`."""
        for number, value in attributes.items():
            self._attributes[number] = value


def _build(cache: Path, include: Path) -> Path:
    source = SOURCE.read_bytes()
    folder = cache / f"libcuda-{hashlib.sha256(source + str(include).encode()).hexdigest()[:16]}"
    if (folder / SONAME).exists():
        return folder
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler (cc, gcc or clang) is installed")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as made:
        options = ("-shared", "-fPIC", "-O1", f"-I{include}", f"-Wl,-soname,{SONAME}", "-o", f"{made}/{SONAME}")
        subprocess.run([compiler, *options, str(SOURCE)], check=True)
        folder.mkdir(exist_ok=True)
        os.replace(f"{made}/{SONAME}", folder / SONAME)
    return folder
