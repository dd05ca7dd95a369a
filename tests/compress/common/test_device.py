"""Which device a name means, and that kernels run there from every thread."""

import threading
from contextlib import nullcontext

import pytest
import torch

from compress.common import device as devices
from compress.common.device import on_device, open_in_thread, resolve_device
from compress.common.errors import ToolkitError


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were made the current one, of two."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(made.append(device)))
    return made


def test_a_second_gpu_becomes_the_current_one(current) -> None:
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]


def test_in_another_thread_a_step_makes_it_so(current) -> None:
    with on_device(torch.device("cuda:1")):
        assert current == [torch.device("cuda:1")]


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0"])
def test_others_need_nothing(current, name: str) -> None:
    with on_device(resolve_device(name)):
        assert current == []


@pytest.mark.parametrize("name", ["cuda:2", "meta", "gpu"])
def test_what_is_not_there_is_refused(current, name: str) -> None:
    with pytest.raises(ToolkitError):
        resolve_device(name)


@pytest.mark.parametrize("name", ["cpu", "nothing"])
def test_a_device_gets_ready_in_another_thread_and_errors_are_for_its_first_use(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, done = [], threading.Event()

    def resolve(name: str) -> torch.device:
        asked.append((name, threading.current_thread() is threading.main_thread()))
        done.set()
        return resolve_device(name)

    monkeypatch.setattr(devices, "resolve_device", resolve)
    open_in_thread(name)
    assert done.wait(10)
    assert asked == [(name, False)]
