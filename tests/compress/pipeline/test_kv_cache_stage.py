"""The recipe stage kv_cache: what it measures, what it chooses, and what the checkpoint then says of itself."""

import json
import re

import pytest
import torch
from runs import compress, prepared

from compress.checkpoint.config import COMPRESSION_KEY, read_config, write_config
from compress.checkpoint.kv_cache import (
    UNCOMPRESSED,
    KVCacheRecord,
    KVCacheScheme,
    MeasuredKVCache,
    kv_cache_warning,
    measured_kv_caches,
    stored_kv_cache,
)
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, RecipeError
from compress.evaluate.kv_cache import measure_kv_caches
from compress.evaluate.perplexity import evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.recipe_file import parse_recipe
from compress.stages.kv_cache import KVCacheStage, choose_kv_cache
from compress.stages.quantize import QuantizeStage

INT4, K8V4 = KVCacheScheme.named("int4"), KVCacheScheme.named("k8v4")


def record_of(*costs: tuple[KVCacheScheme, int, float], max_kl: float = 0.01) -> KVCacheRecord:
    measured = tuple(MeasuredKVCache(scheme, size, kl, 10 * kl, 20.0 + kl, 0.9) for scheme, size, kl in costs)
    return KVCacheRecord(max_kl, 100, 50, "pydoc", "abc", "some windows", 20.0, 512, measured)


def test_auto_takes_the_smallest_that_passes() -> None:
    int8 = KVCacheScheme.named("int8")
    record = record_of((INT4, 144, 0.02), (K8V4, 208, 0.009), (int8, 272, 0.001))
    assert choose_kv_cache(KVCacheStage(), record).scheme == K8V4
    record = record_of((INT4, 144, 0.01), (K8V4, 208, 0.009), (int8, 272, 0.001))
    assert choose_kv_cache(KVCacheStage(), record).scheme == INT4


def test_nothing_within_the_limit_leaves_16_bits_and_says_so() -> None:
    record = record_of((INT4, 144, 0.02), (K8V4, 208, 0.015))
    choice = choose_kv_cache(KVCacheStage(), record)
    assert choice.scheme == UNCOMPRESSED
    assert "nearest: k8v4, 0.015" in choice.warning
    choice = choose_kv_cache(KVCacheStage("int4"), record_of((INT4, 144, 0.02)))
    assert choice.scheme == UNCOMPRESSED
    assert re.search(r"int4 .*0\.02, .*max_kl=0\.01", choice.warning)
    assert choose_kv_cache(KVCacheStage("16bit"), None).warning == ""


def test_candidates_are_what_the_options_say() -> None:
    assert [str(each) for each in KVCacheStage("k8v4", sinks=2).candidates] == ["k8v4, 2 exact sinks"]
    assert KVCacheStage("16bit").candidates == ()
    assert [str(each) for each in KVCacheStage().candidates] == ["int4 rotated", "k8v4", "fp8", "int8"]
    assert {(each.sinks, each.residual_length) for each in KVCacheStage(residual_length=8).candidates} == {(0, 8)}
    assert [each.rotate for each in KVCacheStage(rotate=True).candidates] == [True] * 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{format: int5}", r"kv.yaml:2.*'int5'.*'int8'"),
        ("{max_kl: 0}", r"max_kl=0.0"),
        ("{tokens: 1}", "tokens=1 .* 2.*tokens 16384"),
        ("{sinks: -1}", "sinks=-1 "),
        ("{format: 16bit, rotate: true}", "16-bit"),
        ("{bits: 4}", r"'bits'.*kv_cache"),
        ("{}\n- kv_cache: {}", "two kv_cache"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(text, problem) -> None:
    with pytest.raises(RecipeError, match=problem):
        parse_recipe(f"stages:\n- kv_cache: {text}\n", "kv.yaml")


@pytest.mark.full
def test_figures_are_those_of_the_scorer_with_such_a_cache() -> None:
    seen: list[tuple[int, int]] = []
    source = {"data": "pydoc", "tokens": 256, "length": 128}
    found = measure_kv_caches(
        demo_model_path(), (INT4, K8V4), **source, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (2, 2)
    scorer, exact = RuntimeScorer(demo_model_path()), RuntimeScorer(demo_model_path())
    for scheme, result in zip((INT4, K8V4), found.results, strict=True):
        scorer.kv_cache = scheme
        expected = evaluate(scorer, found.windows, exact)
        assert result.kl_mean == pytest.approx(expected.kl_mean, rel=1e-4)
        assert result.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
        assert result.tokens == expected.tokens == 2 * 127
    # 6 layers of 2 heads of 64 numbers; 4 bits each, and a scale and an offset of 2 bytes, for key and for value.
    assert found.token_bytes[0] == 6 * 2 * 2 * (64 // 2 + 4)


def test_the_default_is_stored_measured_and_verified(tmp_path) -> None:
    stage = KVCacheStage("auto", max_kl=0.5, tokens=256, max_seq_length=128)
    result = compress(demo_model_path(), tmp_path / "out", QuantizeStage("rtn", Int(4, 128)), stage)
    assert result.structure.ok
    config = read_config(tmp_path / "out")
    assert stored_kv_cache(config) == INT4
    record = measured_kv_caches(config)
    assert record is not None
    assert [each.scheme for each in record.candidates] == list(stage.candidates)
    assert record.tokens == 2 * 127
    report = json.loads((tmp_path / "out/compression_report.json").read_text())
    assert report["kv_cache"]["measured"]["candidates"][0]["kl_mean"] == record.find(INT4).kl_mean
    assert any("keys and values" in note for note in report["plan"]["notes"])
    assert "int4 rotated: 864 bytes per token" in result.kv_cache.describe()
    assert verify_structure(tmp_path / "out").ok


def test_a_default_of_8_bit_floats_is_said_to_other_engines(tmp_path) -> None:
    stage = KVCacheStage("fp8", max_kl=9.0, tokens=128, max_seq_length=64)
    packed = compress(demo_model_path(), tmp_path / "out", QuantizeStage("rtn", Int(4, 128)), stage).out
    again = export_checkpoint(packed, "compressed-tensors", tmp_path / "again")
    for folder in (packed, again):
        said = read_config(folder)["quantization_config"]["kv_cache_scheme"]
        assert (said["num_bits"], said["type"], said["dynamic"]) == (8, "float", True)
    dense = export_checkpoint(packed, "dense", tmp_path / "dense")
    assert "quantization_config" not in read_config(dense)


def test_a_named_format_above_the_limit_is_not_the_default(tmp_path) -> None:
    stage = KVCacheStage("int4", max_kl=1e-6, tokens=128, max_seq_length=64)
    result = compress(demo_model_path(), tmp_path / "out", stage)
    assert stored_kv_cache(read_config(tmp_path / "out")) == UNCOMPRESSED
    assert "--kv-cache int4 " in result.kv_cache.warnings[0]
    record = measured_kv_caches(read_config(tmp_path / "out"))
    warning = kv_cache_warning(record, INT4)
    assert warning is not None
    assert re.search(r"126 .*pydoc.*1e-06", warning)
    assert kv_cache_warning(record, K8V4) is None
    assert kv_cache_warning(None, INT4) is None


@pytest.mark.full
def test_the_stage_alone_leaves_every_tensor_as_it_is(tmp_path) -> None:
    out = tmp_path / "out"
    result = compress(demo_model_path(), out, KVCacheStage("int8", tokens=64, max_seq_length=64))
    assert result.structure.format == "dense"
    before, after = RuntimeScorer(demo_model_path()), RuntimeScorer(out)
    tokens = torch.arange(10, 40).unsqueeze(0)
    assert torch.equal(before.logits(tokens), after.logits(tokens))


def test_verify_tells_a_record_that_makes_no_sense(tmp_path) -> None:
    out = tmp_path / "out"
    compress(demo_model_path(), out, KVCacheStage("16bit"))
    config = read_config(out)
    for block, problem in (
        ({"format": "int3"}, "'int3'"),
        ({"format": "int4", "colour": 1}, "'colour'"),
    ):
        config[COMPRESSION_KEY]["kv_cache"] = block
        write_config(out, config)
        assert any(problem in each for each in verify_structure(out).problems)
    config[COMPRESSION_KEY] |= {"kv_cache": INT4.to_dict(), "kv_cache_measured": record_of((INT4, 1, 0.5)).to_dict()}
    write_config(out, config)
    assert any("KL of 0.01" in each for each in verify_structure(out).problems)
    config[COMPRESSION_KEY]["kv_cache_measured"] = {"candidates": 3}
    write_config(out, config)
    assert any("kv_cache_measured" in each for each in verify_structure(out).problems)


def test_models_that_the_runtime_does_not_serve_are_refused_before_anything_runs(tiny_model, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="mish"):
        prepared(tiny_model("llama", hidden_act="mish"), tmp_path / "out", KVCacheStage())
