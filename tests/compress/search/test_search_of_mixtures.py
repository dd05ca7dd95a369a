"""Searches on a mixture, on hybrids and on latent attention: linears that are multiplied at once share a candidate."""

import re
from pathlib import Path

import pytest
import torch
from tiny_models import compute_in_float64, reference_logits

from compress.checkpoint.reader import PackedCheckpoint
from compress.evaluate.scorers import load_dequantized
from compress.evaluate.session import EvaluationRequest, run_evaluation
from compress.pipeline.capture import capture_inputs
from compress.pipeline.prepare import RunRequest
from compress.recipe import CalibrationOptions
from compress.search.measure import LoadedModel
from compress.search.run import Files, carry_out, find
from compress.search.space import Goal, SearchRequest, parse_candidates
from compress.search.survey import Survey, survey
from runtime.model.loader import load_model
from runtime.model.scoring import score

TEXT = CalibrationOptions("bundled", samples=3, length=48)
EXPERTS = 8
FIRST = 10
"""First token that is compared: transformers zeros the row of the pad token in some models."""
TOKENS = torch.randint(FIRST, 8000, (2, 40), generator=torch.Generator().manual_seed(3))


def opened(source: Path, out: Path, goal: Goal, candidates: str, ends: bool = False) -> tuple[Survey, Files]:
    offered = parse_candidates(candidates)
    request = SearchRequest(goal, candidates=offered, measured=1, ends=ends, calibration=TEXT)
    found = survey(request, RunRequest(source, str(source), request.probe(), out, dtype="float32", measure=False))
    return found, Files(out.with_name("figures.json"), out.with_name("found.yaml"), "compress search")


@pytest.mark.full
def test_experts_of_a_block_share_one_choice(tiny_model, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = tiny_model("mixtral", num_hidden_layers=1)
    found, files = opened(source, out, Goal(bits_per_weight=3.0), "w2g32,w4g32")
    sizes = {len(group.modules) for group in found.candidates if ".experts." in group.name}
    assert sizes == {3 * EXPERTS}
    result = carry_out(find(found, files, quiet=True), files, quiet=True).run
    assert result.structure.ok
    assert result.structure.bits_per_weight <= 3.0
    schemes = PackedCheckpoint.open(out).schemes
    assert len({scheme for name, scheme in schemes.items() if ".experts." in name}) == 1


SPECIAL = {
    "deepseek_v3": ("self_attn.q_a_proj self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.kv_b_proj"),
    "deepseek_v32": ("self_attn.indexer.wq_b", "self_attn.indexer.wk"),
    "falcon_h1": ("mamba.in_proj", "mamba.out_proj"),
    "glm_moe_dsa": ("self_attn.indexer.wq_b", "self_attn.indexer.wk"),
    "granitemoehybrid": ("mamba.in_proj", "mamba.out_proj"),
    "lfm2": ("conv.in_proj", "conv.out_proj"),
    "minicpm3": ("self_attn.q_a_proj self_attn.kv_a_proj_with_mqa", "self_attn.q_b_proj", "self_attn.kv_b_proj"),
    "qwen3_5_text": ("linear_attn.in_proj_qkv linear_attn.in_proj_z", "linear_attn.out_proj"),
    "qwen3_next": ("linear_attn.in_proj_qkvz", "linear_attn.out_proj"),
}
"""Layer groups that attention and MLPs of Llama do not have."""


@pytest.mark.full
@pytest.mark.parametrize("family", SPECIAL)
def test_projections_of_recurrent_layers_and_of_latents_have_sensitivities(
    tiny_model, tmp_path: Path, family: str
) -> None:
    source, out = tiny_model(family), tmp_path / "out"
    found, files = opened(source, out, Goal(bits_per_weight=4.5), "w2g16,w4g16,w8", ends=True)
    findings = find(found, files, quiet=True)
    figures = {
        " ".join(group.modules): [findings.known.of(group, each) for each in offered]
        for group, offered in found.candidates.items()
    }
    for names in SPECIAL[family]:
        own = [each[0] for modules, each in figures.items() if re.sub(r"model\.layers\.\d+\.", "", modules) == names]
        assert own
        assert sum(own) > 0
    coarse, middle, fine = map(sum, zip(*figures.values(), strict=True))
    assert coarse > 3 * middle > 9 * fine > 0
    outcome = carry_out(findings, files, quiet=True)
    result = outcome.run
    assert result.structure.ok
    assert result.structure.bits_per_weight <= 4.5 < 0.3 + result.structure.bits_per_weight
    assert_serves_what_is_stored(out)
    evaluation = run_evaluation(EvaluationRequest(out, source, "bundled", 48, 96, dtype="float32")).result
    assert 0 < evaluation.kl_mean < 2 * outcome.choice.predicted


@pytest.mark.full
def test_a_layer_is_measured_with_the_choice_of_the_one_before(tiny_model, tmp_path: Path) -> None:
    """Later layers choose other tokens in each run."""
    found, _ = opened(tiny_model("glm_moe_dsa"), tmp_path / "out", Goal(bits_per_weight=4.5), "w2g16,w4g16")
    context = found.context
    parts = context.skeleton, context.files
    measured = capture_inputs(*parts, found.measured, 1, context.device, context.dtype)
    model = LoadedModel(*parts, measured, found.measured, context.device, context.dtype)
    model.advance(0)
    assert [model.divergence(1) < 1e-6 for _ in range(2)] == [True, True]


def assert_serves_what_is_stored(out: Path) -> None:
    expected = reference_logits(compute_in_float64(load_dequantized(out, dtype="float64")), TOKENS)[..., FIRST:]
    served = score(load_model(out, dtype="float64"), TOKENS)[..., FIRST:]
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-9 * float(expected.std() + 1))
