"""Kernels that overlap, in Triton's interpreter: what each program does before it waits for the kernels ahead of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


@dataclass
class Programs:
    """Record of interpreted programs.

    Attributes:
        waited: how many waited for kernels ahead of them, before they read or wrote anything.
        early: how many read or wrote before, or did not wait at all.
        prefetched: addresses of what was prefetched.
    """

    waited: int = 0
    early: int = 0
    prefetched: list[np.ndarray] = field(default_factory=list)
    _has_waited: bool = False
    _is_early: bool = False

    def begin(self) -> None:
        self._has_waited = self._is_early = False

    def wait(self) -> None:
        self.waited += not self._has_waited
        self._has_waited = True

    def touch(self) -> None:
        self.early += not (self._has_waited or self._is_early)
        self._is_early = not self._has_waited


def record_programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Records programs from now on; waiting takes no time, as kernels are interpreted one after the other."""
    import triton.language as tl
    from triton.runtime import interpreter

    programs, builder = Programs(), interpreter.interpreter_builder

    def patch(name: str, before: Any) -> None:
        function = getattr(builder, name)

        def called(*arguments: Any, **options: Any) -> Any:
            before()
            return function(*arguments, **options)

        monkeypatch.setattr(builder, name, called)

    patch("set_grid_idx", programs.begin)
    for name in ("create_load", "create_masked_load", "create_store", "create_masked_store", "create_atomic_rmw"):
        patch(name, programs.touch)

    def prefetch(text: str, constraints: str, values: list[Any], *rest: Any) -> Any:
        assert text.startswith("prefetch")
        programs.prefetched.append(values[0].data.ravel())
        unused = interpreter.TensorHandle(np.zeros(values[0].data.shape, np.int32), tl.int32)
        return SimpleNamespace(get_result=lambda index: unused)

    monkeypatch.setattr(builder, "create_inline_asm", prefetch)
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", programs.wait)
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", lambda: None)
    return programs
