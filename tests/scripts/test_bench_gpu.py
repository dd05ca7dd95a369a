"""`bench_kernels.py` with whole models: on a CPU, and without a GPU counts, rows and a failing contender."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

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
    folder = prepare(form, tmp_path, "tiny", "cpu", layers=2)
    checkpoint, embedding = PackedCheckpoint.open(folder), 8192 * 128
    stored = sum(checkpoint.files.tensor(name).nbytes for name in checkpoint.files)
    head = embedding * (2 if bits == 16 else 1)
    assert stored == pytest.approx(2 * embedding + head + (parameters - 2 * embedding) * bits / 8, rel=0.04)
    layers = [scheme.bits for name, scheme in checkpoint.schemes.items() if "layers" in name]
    assert layers == ([] if bits == 16 else 14 * [bits])
    llm = LLM(folder, RuntimeConfig(device="cpu", num_blocks=20))
    answer = llm.generate([(1, 2)], SamplingParams(4, ignore_eos=True))
    assert len(answer[0].token_ids) == 4


@pytest.mark.full
@pytest.mark.parametrize("shape", ["tiny-mixture", "tiny-hybrid"])
def test_mixtures_and_hybrids_have_random_codes_where_compression_would_pack(tmp_path: Path, shape: str) -> None:
    from benchmarking.gpu.models import prepare
    from benchmarking.models import SHAPES, compress, write_model

    from compress.checkpoint.reader import PackedCheckpoint
    from compress.checkpoint.weights import Int
    from compress.recipe import CalibrationOptions
    from compress.stages.quantize import QuantizeStage

    write_model(tmp_path / "dense", SHAPES[shape])
    compress(tmp_path / "dense", tmp_path / "packed", [QuantizeStage("rtn", Int(4, 128))], CalibrationOptions())
    found, expected = (
        PackedCheckpoint.open(each) for each in (prepare("int4", tmp_path, shape, "cpu"), tmp_path / "packed")
    )
    assert found.schemes.keys() - {"lm_head"} == expected.schemes.keys()
    assert {name for name in found.files if "lm_head" not in name} == {
        name for name in expected.files if "lm_head" not in name
    }


def test_a_step_is_what_more_tokens_take_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarking.gpu import models as gpu_models

    now = 0.0

    def answer(jobs) -> None:
        nonlocal now
        now += 10.0 + 0.5 * jobs[0].num_output_tokens

    monkeypatch.setattr("time.perf_counter", lambda: now)
    work = gpu_models.Work((2,), 16, 8, (64,), (), rounds=3)
    assert gpu_models.median_step_seconds(answer, 2, work) == pytest.approx(0.5)


def read(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text().splitlines()]


def test_rows_are_there_as_they_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarking.tables import Rows

    file = tmp_path / "rows.jsonl"
    for number in (1, 2):
        Rows(file, shape="8b").add(what="decode", seconds=number / 3)
        assert len(read(file)) == number
    assert read(file)[1] == {"shape": "8b", "what": "decode", "seconds": 0.66667}
    Rows(None).add(what="nothing is written")
    assert "what nothing is written" in capsys.readouterr().out


@pytest.mark.full
def test_a_contender_that_fails_or_hangs_has_a_row_and_what_was_measured_stays(tmp_path: Path) -> None:
    from benchmarking.gpu.models import Work, measure, prepare
    from benchmarking.machine import attempt
    from benchmarking.tables import Rows

    rows, name, empty = Rows(tmp_path / "rows.jsonl"), "engine bf16", tmp_path / "empty"
    empty.mkdir()
    assert attempt(0, rows, measure, name, empty, Work((1,), 4, 2, (8,), (), 1), "cpu", rows) is None
    (failed,) = read(rows.path)
    assert "config.json" in failed["error"]
    begun, model = time.monotonic(), prepare("dense", tmp_path, "tiny", "cpu")
    endless = Work((1,), 4, 4, (8,) * 100_000, (), 1)
    assert attempt(20, rows, measure, name, model, endless, "cpu", rows) is None
    assert time.monotonic() - begun < 60
    _, *measured, killed = read(rows.path)
    assert {"start to first token", "decode 1", "first token of 8"} <= {row["what"] for row in measured}
    assert "20 s" in killed["error"]


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
def test_all_of_it_runs_without_a_gpu(tmp_path: Path) -> None:
    import bench_kernels
    from benchmarking.gpu.models import MEASUREMENTS

    file = tmp_path / "rows.jsonl"
    assert bench_kernels.main(["gpu-models", "--shape", "tiny", "--device", "cpu", "--short", "--rows", str(file)]) == 0
    facts, *rows = read(file)
    assert facts["torch"]
    for name, measurement in MEASUREMENTS.items():
        found = {row.get("what", row.get("error")) for row in rows if row["contender"] == name}
        single = {"start to first token", "decode 1", "decode 4", "first token of 64"} if measurement.single else set()
        assert found == single | ({"mixed"} if measurement.mixed else set()) | {"peak"}
