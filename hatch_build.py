"""Part of `pip install`: compiles the C kernels into the package when there is a compiler, and goes on without one."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINES = {62: "x86_64", 183: "aarch64"}
"""Names of processors by their number in the header of a library (ELF's `e_machine`)."""
GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the compiled library to a wheel, which is then one of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, self.root)
        from compress.common.errors import ToolkitError
        from compress.cpu.build import build

        try:
            library = build()
        except ToolkitError as error:
            self.app.display_warning(f"going on without native kernels: {error}")
            return
        finally:
            sys.path.remove(self.root)
        build_data["artifacts"].append(library.relative_to(Path(self.root)).as_posix())
        build_data["tag"] = f"py3-none-{platform_of(library.read_bytes())}"
        build_data["pure_python"] = False


def platform_of(library: bytes) -> str:
    """Returns the platform that a library runs on: of Linux, the oldest C library that has all it needs (PEP 600)."""
    machine = MACHINES.get(int.from_bytes(library[18:20], "little")) if library.startswith(b"\x7fELF") else None
    needed = [(int(major), int(minor)) for major, minor in GLIBC.findall(library)]
    if machine is None or not needed:
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return "manylinux_{}_{}_{}".format(*max(needed), machine)
