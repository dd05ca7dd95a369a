"""The matrices at both ends of a model, packed: planned, rounded, stored, exported and served, tied and not."""

import json

import pytest
import torch
from runs import compress, foreseen_bytes, prepared, same_bytes, some_tokens

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Activations, Int, Scheme
from compress.checkpoint.writer import export_checkpoint
from compress.cli.tables import embedding_tip
from compress.common.errors import RecipeError
from compress.common.files import size
from compress.evaluate.scorers import open_scorer
from compress.pipeline import embed_and_head
from compress.pipeline.finish import compare_with_report
from compress.recipe import CalibrationOptions
from compress.stages.base import Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
INSIDE = QuantizeStage("rtn", Int(4, 64))


def at_ends(*, embedding: Scheme | None = None, head: Scheme | None = None, method: str = "rtn") -> list[Stage]:
    stages: list[Stage] = [INSIDE]
    if embedding:
        stages.append(QuantizeStage("rtn", embedding, targets=("embed_tokens",)))
    if head:
        stages.append(QuantizeStage(method, head, targets=("lm_head",)))
    return stages


@pytest.mark.parametrize("scheme", [Int(8, None), Int(4, 32), Int(6, 64, symmetric=False)])
def test_a_tied_matrix_is_stored_once_and_serves_both(tiny_model, tmp_path, scheme) -> None:
    source = tiny_model("llama", tie_word_embeddings=True)
    plan = prepared(source, tmp_path / "packed", *at_ends(embedding=scheme)).plan
    result = compress(source, tmp_path / "packed", *at_ends(embedding=scheme))
    packed = PackedCheckpoint.open(tmp_path / "packed")
    assert packed.format == "compress-runtime"
    assert packed.schemes[EMBEDDING] == scheme
    assert HEAD not in packed.schemes
    assert packed.tied
    assert "lm_head" not in packed.config["quantization_config"]["ignore"]
    assert result.structure.bits_per_weight == pytest.approx(plan.bits_per_weight, rel=1e-12)
    assert result.structure.bits_per_parameter == pytest.approx(plan.bits_per_parameter, rel=0.02)
    assert verify_structure(tmp_path / "packed", TensorFiles.open(source)).ok
    assert compare_with_report(tmp_path / "packed") == []
    assert EMBEDDING in {each["linears"][0]["module"] for each in result.report["ends"]}
    wanted = scheme.round(TensorFiles.open(source).tensor(f"{EMBEDDING}.weight").float())
    assert torch.equal(packed.packed_weight(EMBEDDING).qweight, wanted.qweight)
    served = open_scorer(tmp_path / "packed", dtype="float64").logits(some_tokens())
    crossed = open_scorer(tmp_path / "packed", "transformers", dtype="float64").logits(some_tokens())
    torch.testing.assert_close(served, crossed, rtol=1e-4, atol=1e-4)  # transformers' norms are float32


@pytest.mark.parametrize(("method", "bits"), [("rtn", 8), ("gptq", 4)])
def test_a_head_of_its_own_is_a_linear_that_every_engine_reads(tiny_model, tmp_path, method, bits) -> None:
    source = tiny_model("llama", tie_word_embeddings=False)
    compress(source, tmp_path / "packed", *at_ends(head=Int(bits, None), method=method))
    packed = PackedCheckpoint.open(tmp_path / "packed")
    assert packed.format == "compressed-tensors"
    assert packed.schemes[HEAD] == Int(bits, None)
    assert packed.config["quantization_config"]["ignore"] == []
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        expected = loaded(some_tokens()).logits.float()
    served = open_scorer(tmp_path / "packed", dtype="bfloat16").logits(some_tokens())
    assert (served - expected).abs().mean() < 0.02 * expected.abs().mean()


@pytest.mark.full
def test_gptq_makes_a_head_better_than_rounding_to_nearest(tiny_model, tmp_path) -> None:
    source = tiny_model("llama", tie_word_embeddings=False)
    dense = open_scorer(source, dtype="float32").logits(some_tokens())
    error = {}
    for method in ("rtn", "gptq"):
        stage = QuantizeStage(method, Int(3, 64), targets=("lm_head",))
        compress(source, tmp_path / method, stage, calibration=CalibrationOptions(samples=32, length=128))
        error[method] = (open_scorer(tmp_path / method, dtype="float32").logits(some_tokens()) - dense).square().mean()
    assert error["gptq"] < error["rtn"]
    stored = PackedCheckpoint.open(tmp_path / "gptq")
    assert stored.modules == ["lm_head"]


def test_blocks_are_calibrated_on_the_embedding_that_is_looked_up(tiny_model, tmp_path, monkeypatch) -> None:
    source = tiny_model("llama", tie_word_embeddings=True)
    coarse = QuantizeStage("rtn", Int(2, None), targets=("embed_tokens",))
    stages = [QuantizeStage("gptq", Int(4, 64)), coarse]
    compress(source, tmp_path / "aware", *stages)
    monkeypatch.setattr("compress.pipeline.run.stored_embedding", lambda prepared, progress: None)
    compress(source, tmp_path / "blind", *stages)
    aware, blind = (PackedCheckpoint.open(tmp_path / name) for name in ("aware", "blind"))
    first = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(aware.packed_weight(first).qweight, blind.packed_weight(first).qweight)


@pytest.mark.full
def test_rows_are_rounded_some_at_a_time_without_a_difference(tiny_model, tmp_path, monkeypatch) -> None:
    source = tiny_model("llama", tie_word_embeddings=False)
    stages = at_ends(embedding=Int(8, None), head=Int(4, 64), method="gptq")
    compress(source, tmp_path / "whole", *stages)
    monkeypatch.setattr(embed_and_head, "ELEMENTS_AT_ONCE", 128 * 1000)
    compress(source, tmp_path / "chunks", *stages)
    assert same_bytes(tmp_path / "whole", tmp_path / "chunks")


def test_a_killed_run_keeps_the_embedding_and_makes_the_head_from_saved_inputs(
    tiny_model, tmp_path, monkeypatch
) -> None:
    source = tiny_model("llama", tie_word_embeddings=False)
    stages = at_ends(embedding=Int(8, None), head=Int(4, 64), method="gptq")
    compress(source, tmp_path / "whole", *stages)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("compress.pipeline.run.quantize_head", killed)
        with pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "resumed", *stages)
    compress(source, tmp_path / "resumed", *stages)
    assert same_bytes(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.full
def test_exports_write_the_embedding_as_numbers(tiny_model, tmp_path) -> None:
    source = tiny_model("llama", tie_word_embeddings=True)
    compress(source, tmp_path / "packed", *at_ends(embedding=Int(8, None)))
    logits = open_scorer(tmp_path / "packed", dtype="float32", backend="transformers").logits(some_tokens())
    for name in ("compressed-tensors", "dense"):
        exported = export_checkpoint(tmp_path / "packed", name, tmp_path / name)
        assert verify_structure(exported).ok
        assert f"{EMBEDDING}.weight" in TensorFiles.open(exported)
        again = open_scorer(exported, dtype="float32", backend="transformers").logits(some_tokens())
        torch.testing.assert_close(again, logits, rtol=0, atol=0.05)  # numbers are bfloat16 there
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "compressed-tensors")
    with pytest.raises(ValueError, match="quant_method"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", [Int(8, None), Int(4, 64), None])
def test_memory_is_what_was_foreseen_and_shared_where_the_kernel_can(tiny_model, tmp_path, tied, scheme) -> None:
    source = tiny_model("llama", tie_word_embeddings=tied)
    head = None if tied else scheme
    compress(source, tmp_path / "packed", *at_ends(embedding=scheme, head=head))
    matrix = 8192 * 128
    for dtype in (torch.bfloat16, torch.float32):
        for kernels in ("auto", "reference"):
            decoder = load_model(tmp_path / "packed", dtype=str(dtype).removeprefix("torch."), kernels=kernels)
            assert decoder.nbytes == foreseen_bytes(tmp_path / "packed", dtype, kernels)
            if scheme and tied and kernels == "reference":
                assert decoder.embedding.nbytes == 0
            if scheme and not tied:
                assert decoder.embedding.nbytes < matrix * scheme.bits / 8 * 1.1


def test_what_cannot_be_done_at_the_ends_is_said_before_anything_runs(tiny_model, tmp_path) -> None:
    tied, own = (tiny_model("llama", tie_word_embeddings=each) for each in (True, False))
    cases = [
        (tied, QuantizeStage("rtn", Int(8, None), targets=("lm_head",)), "lm_head, .*embedding"),
        (own, QuantizeStage("awq", Int(4, 64), targets=("lm_head",)), "^awq .*lm_head,"),
        (own, QuantizeStage("gptq", Int(4, 64), targets=("embed_tokens",)), r"^gptq .*model\.embed_tokens,"),
        (own, FactorizeStage("svd", targets=("lm_head",)), "^factorize .*lm_head,"),
        (
            own,
            QuantizeStage("rtn", Int(8, None, activations=Activations.INT8), targets=("lm_head",)),
            "lm_head, .*activation_bits",
        ),
    ]
    for source, stage, problem in cases:
        with pytest.raises(RecipeError, match=problem):
            prepared(source, tmp_path / "unwritten", INSIDE, stage)


def test_the_plan_says_what_becomes_of_both_ends(tiny_model, tmp_path) -> None:
    source = tiny_model("llama", tie_word_embeddings=False)
    plan = prepared(source, tmp_path / "unwritten", *at_ends(embedding=Int(8, None))).plan
    fates = {row.tensor: row for row in plan.rows}
    assert str(fates[f"{EMBEDDING}.weight"].layer_plan) == "rtn w8a16 channel sym"
    assert fates[f"{HEAD}.weight"].reason == "output head"
    assert any("looked up by this runtime only" in note for note in plan.notes)
    assert json.dumps(plan.to_dict())


def test_a_tip_says_what_8_bits_would_save(tiny_model, tmp_path) -> None:
    source = tiny_model("llama", tie_word_embeddings=True)
    dense, packed = (
        prepared(source, tmp_path / "unwritten", *at_ends(embedding=each)).plan for each in (None, Int(8, None))
    )
    assert size(packed.bytes_after) in embedding_tip(dense, dense.bytes_after)
    assert embedding_tip(packed, packed.bytes_after) == ""
    assert embedding_tip(dense, 100 * dense.bytes_after) == ""


def test_options_become_stages_of_their_own() -> None:
    calibrated = QuantizeStage("awq", Int(4, 64))
    head, embedding = calibrated.outside(4, 8)
    assert (head.method, head.scheme, head.targets) == ("gptq", Int(4, 64), ("lm_head",))
    assert (embedding.method, embedding.scheme, embedding.targets) == ("rtn", Int(8, None), ("embed_tokens",))
    assert QuantizeStage("rtn", Int(4, 64)).outside(4, None)[0].method == "rtn"
    assert calibrated.outside(None, None) == ()
    eight_bits = QuantizeStage("rtn", Int(8, None, activations=Activations.INT8))
    assert [stage.scheme.group_size for stage in eight_bits.outside(8, 4)] == [None, 128]
