"""Share of the machine that each of several engines of a server takes."""

import pytest

from compress.common.errors import ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.served_engine import EngineSource, LoadingApart, share_of_machine


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
