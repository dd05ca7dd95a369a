"""`bench_quality.py`, `bench_compress.py` and `bench_eval.py` at the smallest size that still runs every part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.common.evaluation import Evaluation
from compress.cpu.binding import library


@pytest.mark.full
def test_quality_writes_trials_table_and_verdicts(tmp_path: Path, capsys):
    import bench_quality
    from benchmarking.models import SHAPES, write_model

    model, table, figures = tmp_path / "model", tmp_path / "table.md", tmp_path / "figures.json"
    write_model(model, SHAPES["tiny"])
    small = ["--num-calibration-samples", "2", "--max-seq-length", "128", "--tokens", "512", "--seeds", "2"]
    tried = ["--settings", "w2g64", "--methods", "rtn", "awq", "gptq"]
    written = ["--json", str(figures), "--markdown", str(table)]
    status = bench_quality.main(["--model", str(model), *tried, *small, *written])
    content = json.loads(figures.read_text())
    assert [(trial["method"], trial["seed"]) for trial in content["trials"]] == [
        ("rtn", 0),
        ("awq", 0),
        ("awq", 1),
        ("gptq", 0),
        ("gptq", 1),
    ]
    assert len({trial["baseline_perplexity"] for trial in content["trials"]}) == 1
    assert all(trial["kl_mean"] > 0 and 2 < trial["bits_per_weight"] < 3 for trial in content["trials"])
    assert {"python", "torch", "models", "seeds"} <= content["facts"].keys()
    assert status == (0 if all(verdict["holds"] for verdict in content["verdicts"]) else 1)
    assert len(content["verdicts"]) == 2
    assert "| model | pydoc | w2g64 | gptq | 2 |" in table.read_text()
    assert "w2g64 on pydoc: gptq < rtn" in capsys.readouterr().out


@pytest.mark.full
def test_what_was_measured_before_an_interrupt_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import bench_quality
    from benchmarking.models import SHAPES, write_model

    def two_methods(*given: Any) -> Any:
        *_, method, _seed, _out = given
        if method == "gptq":
            raise KeyboardInterrupt
        return compress(*given)

    compress, model, figures = bench_quality._compress, tmp_path / "model", tmp_path / "figures.json"
    write_model(model, SHAPES["tiny"])
    monkeypatch.setattr(bench_quality, "in_own_process", lambda function, *given: two_methods(*given))
    small = ["--num-calibration-samples", "2", "--max-seq-length", "128", "--tokens", "512", "--seeds", "1"]
    tried = ["--settings", "w2g64", "--methods", "rtn", "awq", "gptq"]
    bench_quality.main(["--model", str(model), *tried, *small, "--json", str(figures)])
    content = json.loads(figures.read_text())
    assert [trial["method"] for trial in content["trials"]] == ["rtn", "awq"]
    assert len(content["verdicts"]) == 1


@pytest.mark.parametrize(
    "setting",
    ["w3g64", "w8a8", "nvfp4", "q4_k", "2:4", "50%", "2:4+w4g64", "rank0.8", "recipes", "coverage", "w3g64+finish"],
)
def test_every_setting_has_methods_stages_and_orders_among_them(setting: str):
    from benchmarking import quality

    methods = quality.methods_of(setting)
    assert methods
    assert all(quality.stages_of(setting, method) for method in methods)
    assert all({order.better, order.worse} <= set(methods) for order in quality.orders_of(setting))


def make_trial(method: str, kl: float, losses: list[float], seed: int = 0, setting: str = "w4g64") -> Any:
    from benchmarking.models import Cost
    from benchmarking.quality import Trial

    figures, cost = Evaluation(20.0, 100, 19.0, kl, 1.0, 0.01, 0.9), Cost(1.0, 1.0, 100, None, "float32", 4.25, 100)
    return Trial("model", setting, method, seed, "text", figures, torch.tensor(losses), cost)


def judge(*trials: Any) -> Any:
    """The one verdict on these."""
    from benchmarking import quality

    (verdict,) = quality.judge(trials)
    return verdict


@pytest.mark.parametrize(
    ("method", "kl", "losses", "holds"),
    [
        ("gptq", 0.1, [2.0, 3.0], True),
        ("gptq", 0.3, [2.0, 3.0], False),
        ("gptq", 0.1, [2.3, 3.3], False),
        ("gptq", 0.2, [2.2, 3.2], False),
        ("awq", 0.2, [2.2, 3.2], True),
        ("awq", 0.21, [2.2, 3.2], False),
        ("awq", 0.1, [2.3, 3.3], False),
    ],
)
def test_the_order_must_hold_in_divergence_and_in_loss(method: str, kl: float, losses, holds: bool):
    rtn = make_trial("rtn", 0.2, [2.2, 3.2])
    verdict = judge(rtn, make_trial(method, kl, losses))
    assert verdict.holds is holds
    assert str(verdict).startswith("holds" if holds else "BROKEN")


def test_perplexity_that_is_worse_by_less_than_its_noise_is_a_tie_and_does_not_hold():
    rtn = make_trial("rtn", 0.2, [2.0, 3.0, 4.0])
    losses = [2.3, 2.9, 3.9]  # 0.03 worse, with a standard error of 0.13
    awq = judge(rtn, make_trial("awq", 0.1, losses))
    assert (awq.word, awq.holds) == ("tie", False)


@pytest.mark.parametrize(("setting", "compared"), [("bpw4.25", 1), ("bpw4.25+finish", 1), ("bpw4.125", 0)])
def test_a_search_must_be_better_than_one_form_within_its_size(setting: str, compared: int):
    from benchmarking import quality

    trials = make_trial("gptq", 0.2, [2.0, 3.0]), make_trial("trellis", 0.1, [1.9, 2.9], setting=setting)
    verdicts = quality.judge(trials)
    assert [verdict.order for verdict in verdicts] == ["trellis < w4g64 gptq"] * compared
    assert all(verdict.holds and verdict.setting == setting for verdict in verdicts)


@pytest.mark.full
def test_searches_for_several_sizes_share_what_they_measured(tmp_path: Path):
    from benchmarking import quality
    from benchmarking.models import SHAPES, write_model

    from compress.recipe import CalibrationOptions

    model, known = tmp_path / "model", tmp_path / "known.json"
    write_model(model, SHAPES["tiny"])
    text = CalibrationOptions(samples=4, length=64)
    found = [quality.searched_stages(model, f"bpw{size}", "integers", text, 0, known) for size in (3, 5)]
    widths = [{stage.scheme.bits for stage in stages} for stages in found]
    assert max(widths[0]) < max(widths[1])
    measured = known.read_bytes()
    finished = quality.searched_stages(model, "bpw3+finish", "integers", text, 0, known)
    assert known.read_bytes() == measured
    assert (finished[:-1], finished[-1].name) == (found[0], "finish")


def test_a_verdict_is_about_the_mean_over_seeds():
    rtn = make_trial("rtn", 0.2, [2.0, 3.0, 4.0])
    trials = [
        make_trial("gptq", 0.1, [1.8, 2.8, 3.8]),
        make_trial("gptq", 0.22, [2.0, 3.0, 4.0], seed=1),
    ]
    verdict = judge(rtn, *trials)
    assert verdict.kl_ratio == pytest.approx(0.8)
    assert (verdict.seeds_better, verdict.seeds) == (1, 2)
    assert verdict.loss_change == pytest.approx(-0.1)
    assert verdict.loss_error == pytest.approx(0, abs=1e-6)
    assert verdict.holds


@pytest.mark.full
def test_compression_is_measured_beside_a_dense_pass(tmp_path: Path, capsys):
    import bench_compress

    figures = tmp_path / "figures.jsonl"
    small = ["--shape", "tiny", "--num-calibration-samples", "2", "--max-seq-length", "64", "--group-size", "64"]
    assert bench_compress.main([*small, "--methods", "gptq", "--work", str(tmp_path), "--rows", str(figures)]) == 0
    facts, dense, gptq = map(json.loads, figures.read_text().splitlines())
    assert (dense["what"], gptq["what"]) == ("dense forward", "gptq")
    assert gptq["seconds_a_layer"] == pytest.approx(gptq["seconds"] / 2, rel=1e-3)
    assert gptq["bits_per_weight"] == pytest.approx(4.25, abs=0.02)
    assert min(dense["peak_host_bytes"], gptq["peak_host_bytes"]) > 100e6
    assert facts["parameters"] == 2_392_704
    assert "x dense forward" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.jsonl"]


@pytest.mark.full
def test_streamed_and_resident_evaluations_are_measured_in_turn(tmp_path: Path, capsys):
    import bench_eval

    assert bench_eval.main(["--shape", "tiny", "--tokens", "256", "--work", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| --stream |" in shown
    assert "same figures" in shown
    assert not list(tmp_path.iterdir())


def test_random_model_loads_in_transformers(tmp_path: Path):
    from benchmarking.models import SHAPES, write_model
    from transformers import AutoModelForCausalLM

    parameters = write_model(tmp_path / "model", SHAPES["tiny"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


def test_peak_memory_is_of_this_process():
    from benchmarking.machine import in_own_process, peak_host_bytes

    ballast = torch.ones(64 << 20)
    assert peak_host_bytes() > ballast.nbytes
    # A bare interpreter does not inherit the peak of the one that started it.
    assert in_own_process(peak_host_bytes) < ballast.nbytes


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
def test_sampling_is_timed_in_turns() -> None:
    from benchmarking.cpu.sampling import KINDS, sampling_rows

    rows = sampling_rows(640, [1, 3], torch.bfloat16, 0.0)
    assert [row["draw"] for row in rows] == list(KINDS)
    assert all(row[column].endswith("x)") for row in rows for column in ("R=1", "R=3"))


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
def test_mixtures_are_timed_in_turns() -> None:
    from benchmarking.cpu.mixtures import mixture_rows, parse_shape

    rows = mixture_rows(parse_shape("128x128x4x2"), [1, 5], 0.0)
    assert [(row["kernel"], row["rows"]) for row in rows] == [
        ("cpu", "1"),
        ("cpu", "5"),
        ("cpu_w4a8", "1"),
        ("cpu_w4a8", "5"),
    ]
    assert all(float(row["x"]) > 0 for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("shape", [(256, 512, 2, 4, 2, 512), (256, 64, 2, 4, 2, 512, "qwen3_moe", 8, 3)])
def test_both_engines_read_the_same_model_of_4_bits(shape: tuple[Any, ...], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from benchmarking.contenders import Settings, equal_jobs, llama_cpp
    from benchmarking.models import Shape, config_of, write_gguf
    from transformers import AutoModelForCausalLM

    from runtime.model.loader import load_model
    from runtime.model.scoring import score

    write_gguf(tmp_path / "model.gguf", Shape(*shape))
    options = {"config": config_of(Shape(*shape)), "dtype": "float32"}
    dequantized = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", **options)
    plain = AutoModelForCausalLM.from_config(config_of(Shape(*shape)))
    plain.load_state_dict(dequantized.state_dict())
    plain.save_pretrained(tmp_path / "dequantized")
    model, jobs = load_model(tmp_path / "dequantized", dtype="float32"), equal_jobs(3, 12, 6)
    jobs = [replace(job, prompt=tuple(token % 512 for token in job.prompt)) for job in jobs]
    with llama_cpp(tmp_path / "model.gguf", Settings(batch=3)) as answer:
        answers = answer(jobs)
    for job, tokens in zip(jobs, answers, strict=True):
        logits = score(model, torch.tensor([[*job.prompt, *tokens]]))[0, len(job.prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        # Its activations have 8 bits, so it may take a token that comes near the best one.
        assert ((logits.amax(-1) - chosen) / logits.std(-1)).max() < 0.1


@pytest.mark.full
def test_llama_cpp_reads_a_hybrid(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from benchmarking.contenders import Job, Settings, llama_cpp
    from benchmarking.models import Shape, write_gguf

    write_gguf(tmp_path / "model.gguf", Shape(512, 512, 4, 2, 1, 512, "qwen3_5_text", delta_heads=2))
    with llama_cpp(tmp_path / "model.gguf", Settings(batch=2)) as answer:
        assert [len(tokens) for tokens in answer([Job((1, 2, 3), 5)] * 2)] == [5, 5]


@pytest.mark.full
def test_gguf_files_are_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bench_gguf.main(["--types", "q3_k_m", "q8_0", "--methods", "rtn", "--tokens", "1024"]) == 0
    printed = capsys.readouterr().out
    assert "q3_k_m, compress export" in printed
    assert "q3_k_m, rtn" in printed
    assert "q8_0, compress export" in printed
    assert "q8_0, rtn" in printed
