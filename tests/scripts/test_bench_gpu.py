"""`bench_kernels.py` with whole models: on a CPU, and without a GPU counts, table and a failing contender."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest


def test_a_step_reads_every_weight_but_the_embedding_and_all_keys_and_values(tmp_path: Path) -> None:
    from benchmarking.gpu.models import step_bytes
    from benchmarking.models import SHAPES, write_model

    shape = SHAPES["tiny"]
    parameters = write_model(tmp_path / "model", shape)
    weights = 2 * (parameters - shape.vocabulary * shape.hidden)
    keys_and_values = 2 * 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads)
    assert step_bytes(tmp_path / "model", "16bit", 1, 0) == weights
    assert step_bytes(tmp_path / "model", "16bit", 3, 100) == weights + 300 * keys_and_values
    assert step_bytes(tmp_path / "model", "int4", 3, 100) < weights + 100 * keys_and_values


@pytest.mark.full
@pytest.mark.parametrize(("form", "bits"), [("dense", 16), ("int8", 8), ("int4", 4)])
def test_forms_of_a_model_are_made_of_random_codes(tmp_path: Path, form: str, bits: int) -> None:
    from benchmarking.gpu.models import prepare
    from benchmarking.models import SHAPES, write_model

    from compress.checkpoint.reader import PackedCheckpoint
    from runtime.core.config import RuntimeConfig
    from runtime.core.request import SamplingParams
    from runtime.llm import LLM

    parameters = write_model(tmp_path / "made by transformers", SHAPES["tiny"])
    folder = prepare(form, tmp_path, "tiny", "cpu")
    checkpoint, embedding = PackedCheckpoint.open(folder), 8192 * 128
    stored = sum(checkpoint.files.tensor(name).nbytes for name in checkpoint.files)
    head = embedding * (2 if bits == 16 else 1)
    assert stored == pytest.approx(2 * embedding + head + (parameters - 2 * embedding) * bits / 8, rel=0.04)
    layers = [scheme.bits for name, scheme in checkpoint.schemes.items() if "layers" in name]
    assert layers == ([] if bits == 16 else 14 * [bits])
    llm = LLM(folder, RuntimeConfig(device="cpu", num_blocks=20))
    answer = llm.generate([(1, 2)], SamplingParams(4, ignore_eos=True))
    assert len(answer[0].token_ids) == 4


def test_a_step_is_what_more_tokens_take_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarking.gpu import models as gpu_models

    now = 0.0

    def answer(jobs) -> None:
        nonlocal now
        now += 10.0 + 0.5 * jobs[0].num_output_tokens

    monkeypatch.setattr("time.perf_counter", lambda: now)
    work = gpu_models.Work((2,), 16, 8, 64, (), rounds=3)
    assert gpu_models.median_step_seconds(answer, 2, work) == pytest.approx(0.5)


def test_the_table_says_rates_shares_and_why_something_is_missing() -> None:
    from benchmarking.gpu import models as gpu_models
    from benchmarking.gpu.models import Figures

    done = Figures("engine int4", 2.5, {1: 0.002, 8: 0.004}, {1: 4_000_000, 8: 4_000_000}, 1000.0, 500.0, 3 * 10**9)
    rows = gpu_models.table([done, Figures("other", error="out of memory")], (1, 8), stream=4e9)
    assert rows[0]["decode 1"] == "500"
    assert rows[0]["decode 8"] == "2000"
    assert (rows[0]["stream 1"], rows[0]["stream 8"]) == ("50%", "25%")
    assert (rows[0]["peak GB"], rows[0]["note"]) == ("3.00", "")
    assert set(rows[1].values()) == {"other", "-", "out of memory"}
    assert rows[0].keys() == rows[1].keys()


@pytest.mark.full
def test_a_contender_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    from benchmarking.gpu import models as gpu_models
    from benchmarking.gpu.models import Work

    work = Work((1,), 4, 2, 8, (), 1)
    (tmp_path / "dense").mkdir()
    figures = gpu_models.measured("engine bf16", tmp_path, "tiny", work, "cpu")
    assert "config.json" in figures.error
    assert figures.first_token is None


@pytest.mark.full
def test_a_contender_that_hangs_is_killed_and_said_to_be(tmp_path: Path) -> None:
    from benchmarking.gpu import models as gpu_models
    from benchmarking.gpu.models import Work

    begun = time.monotonic()
    figures = gpu_models.measured("engine bf16", tmp_path, "tiny", Work((1,), 4, 8000, 8, (), 1000), "cpu", 2)
    assert time.monotonic() - begun < 60
    assert "took 2 s" in figures.error


@pytest.mark.full
def test_contenders_on_a_cpu_take_turns(tmp_path: Path) -> None:
    import bench_kernels

    sizes = ["--shape", "tiny", "--threads", "1", "--rounds", "2", "--steps", "4", "--prompt", "8"]
    contenders = ["--contenders", "int4", "transformers bf16", "--json", str(tmp_path / "cpu.json")]
    assert bench_kernels.main(["cpu-models", *sizes, *contenders]) == 0
    timings = json.loads((tmp_path / "cpu.json").read_text())["timings"]
    assert {each["contender"] for each in timings} == {"int4", "transformers bf16"}
    assert {each["work"] for each in timings} == {"prefill 8", "decode 1", "decode 8"}
    assert all(len(each["seconds"]) == 2 for each in timings)


@pytest.mark.slow
def test_all_of_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_kernels

    files = ["--json", str(tmp_path / "gpu.json"), "--markdown", str(tmp_path / "gpu.md")]
    assert bench_kernels.main(["gpu-models", "--shape", "tiny", "--device", "cpu", "--short", *files]) == 0
    figures = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    assert not any(each["error"] for each in figures)
    single = [each for each in figures if "continuous" not in each["name"]]
    assert all(each["first_token"] and each["prefill"] and len(each["decode"]) == 2 for each in single)
    assert all(each["mixed"] for each in figures if each["name"].startswith("engine") or "continuous" in each["name"])
    assert "| engine int4, int4 KV |" in (tmp_path / "gpu.md").read_text()
    assert "transformers, compiled static cache" in capsys.readouterr().out
