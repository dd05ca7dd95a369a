"""Tiers of tests, and where kernels run: Triton's on a GPU or else in its interpreter, those in C on two threads."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from covering import mark_products
from shared_store import SharedStore
from tiers import TimeBox, register_profiles

from compress.common.errors import ToolkitError
from compress.cpu.binding import library, set_threads

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when it is imported
register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, help="seconds since the epoch; cases that would begin later are skipped")
    parser.addoption("--vllm", metavar="PYTHON", help="interpreter with vLLM, for the table of what it loads")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--until") is not None:
        config.pluginmanager.register(TimeBox(config.getoption("--until")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_products(items)


@contextmanager
def skipped_without_vectors() -> Iterator[None]:
    """Skips a case that loads a model in 16-bit floats where the processor has no vectors and they are refused."""
    try:
        yield
    except ToolkitError as error:
        from runtime.backends.registry import is_fast

        if is_fast(torch.bfloat16) or "--dtype" not in error.remedy:
            raise
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[Any]:
    with skipped_without_vectors():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    with skipped_without_vectors():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """Work is shared out in tests too, though the environment may allow a thread a test."""
    if library() is not None:
        set_threads(2)


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> SharedStore:
    """One for all workers of a session: the temporary folder of each is in that of the session."""
    base = tmp_path_factory.getbasetemp()
    return SharedStore((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """Where Triton kernels run."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
