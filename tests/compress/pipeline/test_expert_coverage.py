"""Calibration of experts: every one has statistics of enough tokens, and the report says how many were its own."""

from pathlib import Path

import pytest
import runs
import torch
from folders import change_tensors
from safetensors.torch import load_file
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from calibration.statistics import InputStatistics
from compress.checkpoint.config import read_config
from compress.checkpoint.expert_popularity import calibration_tokens, popularity
from compress.checkpoint.weights import Int
from compress.common.cli import bundled_path, demo_model_path
from compress.common.workers import Workers
from compress.methods.base import Needs
from compress.pipeline.block import load_block
from compress.pipeline.capture import capture_inputs
from compress.pipeline.observe import observe
from compress.recipe import CalibrationOptions
from compress.reporting.report_data import read_headers, read_report
from compress.reporting.report_page import report_page
from compress.stages.factorize import FactorizeStage
from compress.stages.quantize import QuantizeStage
from runtime.core.model_config import parse_config

CPU = torch.device("cpu")
ONE = Workers([CPU])
STAGE = QuantizeStage("gptq", Int(4, 32))
UNUSED = 3
HIDDEN = 64
LEAST = 2 * HIDDEN


@pytest.fixture(scope="module")
def source(shared_store) -> Path:
    """A mixture whose router never chooses one of its experts."""

    def write(folder: Path) -> None:
        save_tiny_model(folder, "minimax_m2", **VARIANTS["minimax_m2"] | {"vocab_size": 8192})
        for file in demo_model_path().glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())

    def never_chosen(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name] = torch.eye(8)[UNUSED] * -100.0

    def make(folder: Path) -> None:
        write(folder)
        change_tensors(folder, never_chosen)

    return shared_store.folder("unused-expert", (), make)


@torch.no_grad()
def test_statistics_are_those_of_the_tokens_of_each_expert(source, tmp_path) -> None:
    context = runs.prepared(source, tmp_path / "out", STAGE)
    inputs = capture_inputs(context.skeleton, context.files, context.tokens, 2, CPU, torch.float32)
    plans = context.plan.in_block(context.skeleton.block_name(0))
    block = load_block(context.skeleton, context.files, 0, set(plans), CPU, torch.float32)
    needs = dict.fromkeys(plans, Needs(inputs=True, hessian=True))
    wanted = {name: InputStatistics(block.linear(name).in_features) for name in plans}
    handles = [
        block.linear(name).register_forward_pre_hook(lambda _, args, each=each: each.update(args[0]))
        for name, each in wanted.items()
    ]
    for hidden, call in inputs.batches(0, CPU):
        block.module(hidden, *call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    observed = observe(block, inputs, 0, needs, ONE)
    assert set(observed.statistics) == set(plans)
    (coverage,) = observed.coverage
    assert coverage.least == LEAST
    assert sum(coverage.tokens) == 3 * context.tokens.numel()
    assert coverage.tokens[UNUSED] == 0
    assert coverage.added == tuple(max(LEAST - count, 0) for count in coverage.tokens)
    common = [index for index, count in enumerate(coverage.tokens) if count >= LEAST]
    assert common
    for name, expected in wanted.items():
        found, index = observed.statistics[name], name.partition(".experts.")[2].partition(".")[0]
        if not index or int(index) in common:
            assert found.count == expected.count
            torch.testing.assert_close(found.hessian, expected.hessian, rtol=1e-4, atol=1e-5)
        else:
            assert found.count == LEAST
            assert found.hessian.diagonal().min() > 0


def test_an_expert_that_no_token_reached_is_quantized_like_the_others(source, tmp_path) -> None:
    result = runs.compress(source, tmp_path / "out", STAGE)
    linears = {each["module"]: each for block in result.report["blocks"] for each in block["linears"]}
    experts = [each for name, each in linears.items() if f".experts.{UNUSED}." in name]
    assert len(experts) == 2 * 3
    assert all(each["method"] == "gptq" and not each["recovery"] and each["damping"] for each in experts)
    report = read_report(tmp_path / "out")
    found = [each for block in report.blocks for each in block.experts]
    assert [each.module for each in found] == [f"model.layers.{index}.block_sparse_moe.experts" for index in (0, 1)]
    assert all(each.num_rare >= 1 and each.added[UNUSED] == LEAST for each in found)
    blocks = parse_config(read_config(tmp_path / "out")).spec
    assert calibration_tokens(tmp_path / "out") == {
        blocks.block_name(index): each.tokens for index, each in enumerate(found)
    }
    shares = popularity(found[0].tokens, 8)
    assert shares[UNUSED] == 0 < min(shares[:UNUSED] + shares[UNUSED + 1 :])
    assert sum(shares) == pytest.approx(1)
    page = report_page(report, read_headers(report)).html()
    assert "<h2>Experts</h2>" in page
    assert f"<td>{found[0].module}</td>" in page
    assert f"<td>{found[0].module}.{UNUSED}</td>" in page


def test_short_calibration_gives_every_expert_all_of_its_tokens(source, tmp_path) -> None:
    few = CalibrationOptions(samples=1, length=40)
    result = runs.compress(source, tmp_path / "out", STAGE, calibration=few)
    assert result.structure.ok
    for block in result.report["blocks"]:
        (coverage,) = block["experts"]
        assert all(own + more == 40 for own, more in zip(coverage["tokens"], coverage["added"], strict=True))


@pytest.mark.full
def test_other_tokens_help_an_expert_that_few_tokens_chose(tmp_path) -> None:
    """On trained weights: the KL with other tokens, and the same bytes where every expert has enough of its own."""
    source, stage = bundled_path("demo-mixture"), QuantizeStage("gptq", Int(3, 64))
    dense = {name: tensor for name, tensor in load_file(source / "model.safetensors").items() if ".gate." in name}
    assert len(dense) == 6

    def compress(samples: int, per_channel: int) -> tuple[Path, list[int]]:
        out, options = tmp_path / f"{samples}-{per_channel}", CalibrationOptions(samples=samples, length=512)
        result = runs.compress(source, out, stage, calibration=options, dtype="float32", tokens_per_channel=per_channel)
        stored = load_file(out / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in dense.items())
        return out, [count for block in result.report["blocks"] for each in block["experts"] for count in each["added"]]

    (own, none), (filled, some) = compress(2, 0), compress(2, 2)
    assert not any(none)
    assert any(some)
    divergences = [runs.compared_with(source, out, 8192, 512).kl_mean for out in (own, filled)]
    assert divergences[1] < divergences[0]
    (own, _), (filled, some) = compress(12, 0), compress(12, 2)
    assert not any(some)
    assert runs.same_bytes(own, filled)


def test_methods_without_calibration_count_nothing(source, tmp_path) -> None:
    result = runs.compress(source, tmp_path / "out", QuantizeStage("rtn", Int(4, 32)))
    assert all(block["experts"] == [] for block in result.report["blocks"])
    report = read_report(tmp_path / "out")
    assert "<h2>Experts</h2>" not in report_page(report, read_headers(report)).html()


def test_ranks_go_to_the_experts_that_are_used(source, tmp_path) -> None:
    stage = FactorizeStage("svd-llm", keep=0.6, allocation="block", targets=("re:.*experts.*",))
    result = runs.compress(source, tmp_path / "out", stage)
    for block in result.report["blocks"]:
        (coverage,) = block["experts"]
        ranks = dict.fromkeys(range(8), 0)
        for each in block["linears"]:
            index = int(each["module"].partition(".experts.")[2].partition(".")[0])
            ranks[index] += HIDDEN if each["rank"] is None else each["rank"]
        most = max(range(8), key=lambda index: coverage["tokens"][index])
        assert ranks[UNUSED] == min(ranks.values()) < ranks[most]
