"""Plugin of tests that several workers run on one GPU: of their files only tests that use it are run, each worker sees
its share of the memory, and one whose GPU context is broken, which would fail all further tests, is replaced."""

import os
from collections.abc import Generator
from typing import Any

import pytest
import torch

NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
"""0 in the process that hands out tests."""


def pytest_configure() -> None:
    if NUM_WORKERS > 1 and torch.cuda.is_available():
        torch.cuda.mem_get_info = share_of(torch.cuda.mem_get_info)


def share_of(ask: Any) -> Any:
    """Free and total memory as `torch.cuda.mem_get_info` has them, of a GPU with as much memory as each worker has."""

    def share(device: Any = None) -> tuple[int, int]:
        free, total = ask(device)
        return min(free, max(0, total // NUM_WORKERS - torch.cuda.memory_reserved(device))), total // NUM_WORKERS

    return share


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps tests that run kernels, by the fixture `gpu`, and those that run under a condition: that there is a GPU."""
    chosen = [item for item in items if "gpu" in getattr(item, "fixturenames", ()) or item.get_closest_marker("skipif")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    found = yield
    if NUM_WORKERS and not is_sound():
        os._exit(1)  # reports are sent; the test that did it is reported as that which broke the worker
    return found


def is_sound() -> bool:
    """Whether the GPU still computes for this process."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
