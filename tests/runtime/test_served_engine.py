"""Several engines of a server: the share of the machine that each takes, and their loading."""

import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from compress.common.errors import ToolkitError
from runtime.core.config import DataParallelOptions, RuntimeConfig
from runtime.core.progress import Stage
from runtime.engine.wire import send
from runtime.served_engine import (
    EngineFacts,
    EngineSource,
    LoadingApart,
    LoadingProcess,
    share_of_machine,
    wait_for_all,
)
from runtime.transfer.options import TransferOptions


def shares(count: int, size: int, environment: dict[str, str], num_threads: int) -> list[dict[str, str]]:
    config = RuntimeConfig(tensor_parallel_size=size)
    sources = [EngineSource(None, config, index=index, count=count) for index in range(count)]
    return [share_of_machine(source, environment, num_threads) for source in sources]


def test_engines_take_gpus_and_cores_in_order() -> None:
    found = shares(2, 2, {}, 9)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1", "2,3"]
    assert {each["OMP_NUM_THREADS"] for each in found} == {"4"}
    given = {"CUDA_VISIBLE_DEVICES": "GPU-a,5,7"}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares(3, 1, given, 2)] == ["GPU-a", "5", "7"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares(2, 2, given, 2)] == ["GPU-a,5", "7"]
    assert {each["OMP_NUM_THREADS"] for each in shares(3, 1, given, 2)} == {"1"}


def test_no_gpu_stays_no_gpu() -> None:
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares(2, 1, {"CUDA_VISIBLE_DEVICES": ""}, 2)] == ["", ""]


def test_a_single_engine_takes_all() -> None:
    assert shares(1, 2, {}, 8) == [{}]


class ReportingProcess:
    def __init__(self, device: str) -> None:
        self.device = device

    def next_report(self) -> tuple[str, str]:
        return "int4", self.device


def test_an_engine_without_a_gpu_is_refused_where_others_have_one() -> None:
    def describe(*devices: str) -> str:
        processes = list(map(ReportingProcess, devices))
        return LoadingApart(EngineSource(None, RuntimeConfig()), processes, True).describe_weights()

    assert describe("") == describe("cpu", "cpu") == describe("cuda", "cuda") == "int4"
    with pytest.raises(ToolkitError) as refused:
        describe("cuda", "cuda", "cpu")
    assert "--data-parallel-size 2" in refused.value.remedy


@pytest.mark.parametrize("prefill_engines", [0, 1])
def test_only_engines_that_need_sockets_get_a_folder(
    prefill_engines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(LoadingProcess, "begin", lambda source: nullcontext(source))
    options = TransferOptions(prefill_engines=prefill_engines)
    with LoadingApart.begin(EngineSource(None, RuntimeConfig()), DataParallelOptions(), options):
        assert len(list(tmp_path.iterdir())) == prefill_engines
    assert not list(tmp_path.iterdir())


def test_an_engine_that_fails_is_reported_while_others_load() -> None:
    """The first one says that it reads weights, and nothing after that."""
    ends = [socket.socketpair() for _ in range(3)]
    process = subprocess.Popen(["true"])
    process.wait()
    loading = [LoadingProcess(process, mine) for mine, _ in ends]
    reports: list[tuple[object, ...]] = []
    send(ends[0][1], (Stage.WEIGHTS, 1, 2))
    send(ends[1][1], EngineFacts(8, 1, frozenset(), ()))
    send(ends[2][1], ToolkitError("engine 2 has no memory", "Use less"))
    with pytest.raises(ToolkitError, match="engine 2 has no memory"):
        wait_for_all(loading, lambda *report: reports.append(report))
    assert reports == [(Stage.WEIGHTS, 1, 2)]
    for number, (_, theirs) in enumerate(ends):
        send(theirs, EngineFacts(number, 1, frozenset(), ()))
    assert [facts.max_model_len for facts in wait_for_all(loading, lambda *_: None)] == [0, 1, 2]
    ends[1][1].close()
    with pytest.raises(ToolkitError, match="status 0"):
        wait_for_all(loading, lambda *_: None)
