"""Part of `pip install`: compiles the C kernels into the package when there is a compiler, and goes on without one."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


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
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(library.relative_to(Path(self.root)).as_posix())
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
