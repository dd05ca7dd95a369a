"""The check of an installed wheel refuses checkouts, compilers, missing libraries and kernels of PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.full

IN_C = (
    "activations: 8bit (recorded)",
    "6 x o_proj: w4a16 g128 sym, kernel cpu_w4a8 (packed codes in C)",
    "ops between linears: CpuOps (compiled)",
)
IN_TORCH = "6 x o_proj: w4a16 g128 sym, kernel reference (dequantized)"


def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **changes: object) -> list[str]:
    """Problems of an environment without any except for the changes."""
    import check_installed

    def load(checkpoint: str) -> SimpleNamespace:
        kernels = SimpleNamespace(describe=lambda: changes.get("attention", "cpu: compiled"))
        decoder = SimpleNamespace(description=changes.get("linears", IN_C))
        answer = SimpleNamespace(text=changes.get("text", " in April"), finish_reason="length")
        engine = SimpleNamespace(runner=SimpleNamespace(decoder=decoder, kernels=kernels))
        return SimpleNamespace(engine=engine, generate=lambda prompts, sampling: [answer])

    monkeypatch.setattr(check_installed.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(check_installed, "LIBRARY", changes.get("library", tmp_path.resolve() / "libnative.so"))
    monkeypatch.setattr(check_installed, "find_compiler", lambda: changes.get("compiler"))
    monkeypatch.setattr(check_installed, "absence", lambda: changes.get("absence", ""))
    monkeypatch.setattr(check_installed, "LLM", load)
    return list(check_installed.problems("packed"))


def test_an_installed_wheel_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert found(monkeypatch, tmp_path) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"compiler": "/usr/bin/cc"}, "/usr/bin/cc"),
        ({"library": Path("/checkout/libnative.so")}, "/checkout/libnative.so"),
        ({"absence": "not compiled"}, "not compiled"),
        ({"linears": (*IN_C, IN_TORCH)}, IN_TORCH),
        ({"attention": "torch: gathers pages"}, "torch: gathers pages"),
        ({"text": " "}, "no answer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_defect_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    [problem] = found(monkeypatch, tmp_path, **change)
    assert named in problem
