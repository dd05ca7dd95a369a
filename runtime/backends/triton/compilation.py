"""Kernels of launches that are to come, compiled beforehand and several at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch

from compress.common.device import on_device
from runtime.backends.backend import Build
from runtime.backends.triton.device import device_unsupported_reason


class TritonCompiler:
    """See `Compiler`. Compilers run in threads: most of their time they hold no lock of the interpreter."""

    def missing(self, run: Callable[[], None], device: torch.device) -> list[Build]:
        found: dict[tuple[Any, Any], Build] = {}
        if device_unsupported_reason(device):
            return []
        from triton import knobs

        def leave_out(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # Triton's name
            found.setdefault((fn.jit_function, key), partial(_build, fn.jit_function, compile))
            return True

        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = leave_out
            run()
        return list(found.values())

    def compile(self, builds: Sequence[Build], device: torch.device, report: Callable[[int, int], None]) -> int:
        from triton import knobs

        compiled, before = list[str](), knobs.compilation.listener

        def listen(*, src: Any, cache_hit: bool, **facts: Any) -> None:
            if not cache_hit:
                compiled.append(src.name)
            if before is not None:
                before(src=src, cache_hit=cache_hit, **facts)

        def build(each: Build) -> None:
            with on_device(device):  # a property of the thread
                each()

        with knobs.compilation.scope():
            knobs.compilation.listener = listen
            pool = ThreadPoolExecutor(max(1, num_cores() - 1), "compiler")
            try:
                report(0, len(builds))
                for done, finished in enumerate(as_completed([pool.submit(build, each) for each in builds]), 1):
                    finished.result()
                    report(done, len(builds))
            finally:
                pool.shutdown(cancel_futures=True)
        return len(compiled)


def _build(kernel: Any, launch: Mapping[str, Any]) -> None:
    """Compiles a kernel and its launcher into Triton's cache on disk, for a launch as `jit_cache_hook` gets it.

    `JITFunction.preload` would be shorter, but files kernels with constant tuples under another key (Triton 3.6).
    """
    from triton import compile as compile_kernel
    from triton.compiler import ASTSource
    from triton.runtime import driver

    stored = json.loads(launch["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    source = ASTSource(kernel, launch["signature"], launch["constants"], launch["configs"][0])
    compiled = compile_kernel(source, target=driver.active.get_current_target(), options=options)
    driver.active.launcher_cls(source, compiled.metadata)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
