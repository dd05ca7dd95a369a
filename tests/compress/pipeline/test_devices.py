"""Several devices share a run: the bytes are those of one."""

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed_runs import killed_after_block
from runs import compress, prepared, same_bytes
from second_device import SECOND, SameThread, SecondDevice

from calibration.statistics import InputStatistics
from compress.checkpoint.weights import Activations, Int, NMSparsity
from compress.common.device import resolve_devices
from compress.common.errors import OutOfMemoryError, ToolkitError
from compress.common.workers import Worker, Workers
from compress.methods.signround import SignRoundOptions
from compress.pipeline.resume import Progress
from compress.pipeline.run import run
from compress.stages.base import Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.kv_cache import KVCacheStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

GPTQ = QuantizeStage("gptq", Int(4, 64))
RUNS: dict[str, tuple[dict, list[Stage]]] = {
    "gptq": ({}, [GPTQ]),
    "rtn": ({}, [QuantizeStage("rtn", Int(4, 64))]),
    "awq": ({}, [QuantizeStage("awq", Int(4, 64))]),
    "experts": ({"family": "mixtral"}, [GPTQ]),
    "signround": ({}, [QuantizeStage("signround", Int(3, 64), options=SignRoundOptions(steps=4))]),
    "smoothquant": ({}, [QuantizeStage("smoothquant", Int(8, None, True, Activations.INT8))]),
    "gptaq": ({}, [QuantizeStage("gptaq", Int(3, 64))]),
    "sparsegpt": ({}, [PruneStage("sparsegpt", NMSparsity(2, 4)), GPTQ]),
    "owl": ({}, [PruneStage("wanda", sparsity=0.5, layerwise="owl")]),
    "svd-llm": ({}, [FactorizeStage("svd-llm", 0.6)]),
    "svd": ({}, [FactorizeStage("svd", 0.6)]),
    "rotated": ({}, [RotateStage(), GPTQ]),
    "head": ({}, [GPTQ, QuantizeStage("gptq", Int(8, 64), targets=("lm_head",))]),
    "smoothed experts": ({"family": "mixtral"}, [QuantizeStage("awq", Int(4, 64))]),
    "factorized experts": ({"family": "mixtral"}, [FactorizeStage("svd-llm", 0.6)]),
    "shared keys": ({"family": "gemma4_text"}, [GPTQ]),
    "shared choice": ({"family": "glm_moe_dsa"}, [QuantizeStage("awq", Int(4, 16))]),
    "KV cache": ({}, [GPTQ, KVCacheStage(tokens=64, max_seq_length=32)]),
}
QUICK = "gptq", "rtn", "awq", "experts"
CPU = torch.device("cpu")


def with_tiers(names: Iterable[str]) -> list:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", with_tiers(RUNS))
def test_bytes_do_not_depend_on_the_number_of_devices(tiny_model, tmp_path: Path, name: str) -> None:
    options, stages = RUNS[name]
    model = tiny_model(**options)
    for devices in ("cpu", "cpu,cpu", "cpu,cpu,cpu"):
        compress(model, tmp_path / devices, *stages, devices=devices, micro_batch=1)
    assert same_bytes(tmp_path / "cpu", tmp_path / "cpu,cpu")
    assert same_bytes(tmp_path / "cpu", tmp_path / "cpu,cpu,cpu")


@pytest.mark.parametrize(("before", "after"), [("cpu", "cpu,cpu"), ("cpu,cpu,cpu", "cpu")])
def test_a_killed_run_goes_on_with_another_number_of_devices(tiny_model, tmp_path: Path, before, after) -> None:
    model = tiny_model()
    compress(model, tmp_path / "whole", GPTQ, micro_batch=1)
    with killed_after_block(0):
        compress(model, tmp_path / "parts", GPTQ, devices=before, micro_batch=1)
    compress(model, tmp_path / "parts", GPTQ, devices=after, micro_batch=1)
    assert same_bytes(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("name", with_tiers(name for name in RUNS if name != "KV cache"))
def test_everything_that_a_task_reads_is_on_its_device(tiny_model, tmp_path: Path, name: str) -> None:
    """Tensors of two devices cannot be combined; tasks take turns on both."""
    options, stages = RUNS[name]
    context = prepared(tiny_model(**options), tmp_path / "out", *stages, dtype="float32", micro_batch=1)
    with SecondDevice() as second:
        run(replace(context, workers=SameThread([CPU, SECOND])), quiet=True)
    assert len(second.arrivals) > 5


@pytest.mark.parametrize(
    "names", ["cpu,tpu", "cuda:97,cuda:98", "cpu,", "meta,cpu"], ids=["unknown", "absent", "empty", "other kind"]
)
def test_devices_that_do_not_exist_are_refused(names: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        resolve_devices(names)
    assert "--device" in caught.value.remedy


@pytest.mark.parametrize("names", ["cuda:0,cuda:0", "cuda,cuda:0", "cpu,cuda:1"])
def test_gpus_named_twice_and_devices_of_two_kinds_are_refused(monkeypatch, names: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    with pytest.raises(ToolkitError) as caught:
        resolve_devices(names)
    assert names in caught.value.problem
    assert "--devices" in caught.value.remedy


@pytest.mark.parametrize("names", ["cuda:1, cuda", "cuda:0,cuda:1"])
def test_this_thread_stays_on_the_first_gpu(monkeypatch, names: str) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    found = resolve_devices(names)
    assert set(found) == {torch.device("cuda:0"), torch.device("cuda:1")}
    assert current[-1] == found[0]


def test_a_device_without_memory_is_named_and_its_run_goes_on_later(tiny_model, tmp_path: Path, monkeypatch) -> None:
    model, update, save_block, finished = tiny_model(), InputStatistics.update, Progress.save_block, list[int]()

    def fail_after_a_block(self: InputStatistics, inputs: torch.Tensor) -> None:
        if finished and threading.current_thread() is not threading.main_thread():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        update(self, inputs)

    def count(self: Progress, index: int, *rest: object, **options: object) -> None:
        save_block(self, index, *rest, **options)
        finished.append(index)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "save_block", count)
        patch.setattr(InputStatistics, "update", fail_after_a_block)
        context = prepared(model, tmp_path / "out", GPTQ, devices="cpu,cpu", micro_batch=1)
        with pytest.raises(OutOfMemoryError) as caught:
            run(context, quiet=True)
    assert "cpu: CUDA out of memory" in caught.value.problem
    assert finished == [0]
    compress(model, tmp_path / "out", GPTQ, devices="cpu,cpu", micro_batch=1)
    compress(model, tmp_path / "whole", GPTQ, micro_batch=1)
    assert same_bytes(tmp_path / "whole", tmp_path / "out")


def test_an_error_of_a_worker_ends_all_of_them() -> None:
    workers, begun = Workers([CPU] * 3), list[int]()

    def work(_worker: Worker, task: int) -> int:
        begun.append(task)
        if task == 1:
            raise ValueError(task)
        return task

    for share_out in (workers.map, workers.in_turn):
        found = share_out(work, range(100))
        assert next(found) == 0
        with pytest.raises(ValueError, match="1"):
            list(found)
    assert list(workers.map(lambda worker, task: task, range(50))) == list(range(50))


def test_large_results_wait_for_one_another() -> None:
    workers, begun = Workers([CPU] * 2), list[int]()

    def work(_worker: Worker, task: int) -> int:
        begun.append(task)
        return task

    found = workers.in_turn(work, range(20))
    assert next(found) == 0
    assert len(begun) <= 2
    assert list(found) == list(range(1, 20))


def test_workers_share_the_threads_of_torch() -> None:
    before = torch.get_num_threads()
    workers = Workers([CPU] * 2)
    assert list(workers.map(lambda *_: torch.get_num_threads(), range(4))) == [max(1, before // 2)] * 4
    assert torch.get_num_threads() == before


def test_statistics_of_parts_add_up_to_those_of_the_whole() -> None:
    rows = torch.randn(1000, 24, generator=torch.Generator().manual_seed(0))
    whole, parts = (InputStatistics(24, sample_rows=16) for _ in range(2))
    whole.update(rows)
    for part in rows.split(250):
        later = InputStatistics(24, sample_rows=16)
        later.update(part)
        parts.add(later)
    torch.testing.assert_close(parts.hessian, whole.hessian)
    torch.testing.assert_close(parts.mean_square, whole.mean_square)
    assert torch.equal(parts.abs_max, whole.abs_max)
    assert parts.count == whole.count == 1000
    sample = parts.sample(16)
    assert len(sample) == 16
    assert (sample[:, None] == rows).all(-1).any(-1).all()


def test_the_plan_names_the_devices(tiny_model, tmp_path: Path) -> None:
    context = prepared(tiny_model(), tmp_path / "out", GPTQ, devices="cpu,cpu")
    assert json.loads(json.dumps(context.to_dict()))["devices"] == "cpu,cpu"
