"""Mixtures of experts: single experts in place of fused ones, packed under the names of the files."""

from pathlib import Path

import pytest
import runs
import torch
from covering import sample
from tiny_configs import GEMMA4_EXPERTS, MIXTURES, STACKED, VARIANTS
from tiny_models import (
    StayInFloat64,
    compute_decays,
    compute_in_float64,
    load_reference,
    reference_logits,
    save_tiny_model,
)
from transformers import PreTrainedModel

from compress.checkpoint.config import read_config
from compress.checkpoint.dequantized import open_source
from compress.checkpoint.formats.base import TRANSFORMERS
from compress.checkpoint.formats.readers import REFUSED_BY
from compress.checkpoint.meta_model import auto_class
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Activations, Int, NMSparsity
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.workers import Workers
from compress.evaluate.scorers import load_dequantized
from compress.methods import base
from compress.methods.signround import SignRoundOptions
from compress.pipeline.block import fill, load_block, release
from compress.pipeline.capture import capture_inputs, run_all
from compress.pipeline.skeleton import open_skeleton
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from runtime.model.loader import load_model
from runtime.model.scoring import score

CPU = torch.device("cpu")
ONE = Workers([CPU])
TOKENS = torch.randint(10, 4000, (2, 40), generator=torch.Generator().manual_seed(1))
W4 = Int(4, 16)
FAMILIES = sorted(MIXTURES - STACKED)


ALIKE = {"granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h", "qwen3_next"}
"""Families whose mixtures are like those of others, or have layers to themselves."""
GEMMA4 = VARIANTS["gemma4_text"] | GEMMA4_EXPERTS | {"vocab_size_per_layer_input": 8192}


def quick(families: list[str]) -> list:
    """Parameters, of which those that are like others are left to the full tier."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name in ALIKE)) for name in families]


@pytest.fixture(scope="session")
def mixture(shared_store):
    """A tiny mixture of a family with all of its features, and a tokenizer."""

    def make(family: str) -> Path:
        def write(folder: Path) -> None:
            options = GEMMA4 if family == "gemma4_text" else VARIANTS[family]
            save_tiny_model(folder, family, **options | {"vocab_size": 8192})
            for file in demo_model_path().glob("tokenizer*"):
                (folder / file.name).write_bytes(file.read_bytes())

        return shared_store.folder("mixture", (family,), write)

    return make


@pytest.mark.parametrize("family", quick([*FAMILIES, *sorted(STACKED)]))
@torch.no_grad()
def test_blocks_with_single_experts_give_the_logits_of_fused_ones(mixture, family: str) -> None:
    source = mixture(family)
    skeleton, files = open_skeleton(source, read_config(source)), open_source(source)[0]
    with StayInFloat64():
        inputs = capture_inputs(skeleton, files, TOKENS, 1, CPU, torch.float64)
        for index in range(skeleton.num_blocks):
            block = load_block(skeleton, files, index, set(), CPU, torch.float64)
            compute_decays(block.module)
            inputs.hidden = run_all(block, inputs, index, ONE)
            release(block.module)
            assert all(parameter.is_meta for parameter in block.module.parameters())
        last = skeleton.architecture.final_norm
        norm = skeleton.model.get_submodule(last)
        fill(norm, last, files, CPU, torch.float64)
        head = skeleton.model.lm_head
        for name in dict(head.named_parameters()):
            stored = "model.embed_tokens.weight" if skeleton.ties_head and name == "weight" else f"lm_head.{name}"
            setattr(head, name, torch.nn.Parameter(files.tensor(stored).double()))
        scaling = getattr(skeleton.model.config, "logits_scaling", 1.0)
        found = head(norm(inputs.hidden)) / scaling
    expected = reference_logits(load_reference(source), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


TRIED = [
    pytest.param(family, method, marks=[pytest.mark.full] * ((family, method) != ("qwen2_moe", "gptq")))
    for family in FAMILIES
    for method in ("awq", "gptq")
]


@pytest.mark.parametrize(("family", "method"), TRIED)
def test_packed_experts_are_served_as_they_were_verified(mixture, family: str, method: str, tmp_path: Path) -> None:
    result = runs.compress(mixture(family), tmp_path / "out", QuantizeStage(method, W4))
    assert result.structure.ok
    assert not result.report["recovered"]
    smoothed = [edge["source"] for block in result.report["blocks"] for edge in block["smoothing"]]
    packed = PackedCheckpoint.open(tmp_path / "out")
    stored = {name.removesuffix(".weight") for name in open_source(mixture(family))[0].names()}
    experts = {name for name in stored if ".experts." in name}
    has_gates = len({name.rpartition(".")[2] for name in experts}) == 3
    assert any(".experts." in name for name in smoothed) == (has_gates and base.QUANTIZATION.find(method).smooths)
    assert experts
    assert experts <= packed.schemes.keys()
    assert_scored_like_its_weights(tmp_path / "out", tmp_path / "dense")


def assert_scored_like_its_weights(packed: Path, dense: Path) -> None:
    """Compares a checkpoint with its dequantized weights, and its export to `dense` with what transformers reads.

    The export rounds weights to float32, which recurrent states amplify by up to four orders of magnitude: its logits
    are compared with those of the rounded weights.
    """
    assert_scored_as(packed, compute_in_float64(load_dequantized(packed, dtype="float64")))
    export_checkpoint(packed, "dense", dense)
    assert_scored_as(dense, load_reference(dense))


def assert_scored_as(folder: Path, reference: PreTrainedModel) -> None:
    expected = reference_logits(reference, TOKENS)
    served = score(load_model(folder, dtype="float64"), TOKENS)
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-9 * float(expected.std() + 1))


STAGES = {
    "hqq": QuantizeStage("hqq", W4),
    "gptaq": QuantizeStage("gptaq", W4),
    "signround": QuantizeStage("signround", W4, options=SignRoundOptions(steps=4)),
    "wanda": PruneStage("wanda", sparsity=0.5),
    "owl": PruneStage("wanda", sparsity=0.5, layerwise="owl"),
    "sparsegpt": PruneStage("sparsegpt", NMSparsity(2, 4)),
    "svd-llm": FactorizeStage("svd-llm", keep=0.6, allocation="model"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", STAGES)
def test_every_other_method_takes_experts(mixture, tmp_path: Path, name: str) -> None:
    result = runs.compress(mixture("glm4_moe"), tmp_path / "out", STAGES[name])
    assert result.structure.ok
    changed = {each["module"] for block in result.report["blocks"] for each in block["linears"]}
    assert {name for name in changed if ".experts." in name} == {
        f"model.layers.1.mlp.experts.{index}.{part}_proj" for index in range(8) for part in ("gate", "up", "down")
    }
    assert score(load_model(tmp_path / "out", dtype="float32"), TOKENS).isfinite().all()


@pytest.mark.full
def test_experts_are_smoothed_for_8_bit_activations(mixture, tmp_path: Path) -> None:
    scheme = Int(8, None, activations=Activations.INT8)
    result = runs.compress(mixture("qwen2_moe"), tmp_path / "out", QuantizeStage("smoothquant", scheme))
    assert result.structure.ok
    edges = [edge for block in result.report["blocks"] for edge in block["smoothing"] if ".experts." in edge["source"]]
    assert any(edge["loss_after"] < edge["loss_before"] for edge in edges)
    served, dense = (
        score(load_model(path, dtype="float32"), TOKENS) for path in (tmp_path / "out", mixture("qwen2_moe"))
    )
    assert torch.nn.functional.cosine_similarity(served.flatten(), dense.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("family", quick(FAMILIES))
def test_routers_stay_dense_and_the_plan_says_why(mixture, family: str, tmp_path: Path) -> None:
    source = mixture(family)
    context = runs.prepared(source, tmp_path / "out", QuantizeStage("rtn", W4))
    reasons = {row.tensor: row.reason for row in context.plan.rows}
    routers = context.skeleton.routers
    assert routers
    assert all(reasons[f"{name}.weight"].startswith("router") for name in routers)
    assert not context.plan.layer_plans.keys() & set(routers)
    ignoring = QuantizeStage("rtn", W4, ignore=tuple(routers))
    assert runs.prepared(source, tmp_path / "out", ignoring).plan.layer_plans == context.plan.layer_plans


@pytest.mark.full
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_experts_beside_an_mlp(mixture, method: str, tmp_path: Path) -> None:
    assert runs.compress(mixture("gemma4_text"), tmp_path / "out", QuantizeStage(method, Int(4, 16))).structure.ok
    modules = PackedCheckpoint.open(tmp_path / "out").modules
    assert sum(".experts." in name for name in modules) == 3 * GEMMA4["num_hidden_layers"] * GEMMA4["num_experts"]
    reference = load_dequantized(tmp_path / "out", dtype="float64")
    expected = reference_logits(compute_in_float64(reference), TOKENS)
    found = score(load_model(tmp_path / "out", dtype="float64"), TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", sample(sorted(STACKED)))
@pytest.mark.parametrize("method", sample(["rtn", "gptq", "awq"]))
def test_experts_of_a_stack_are_written_one_by_one(mixture, family: str, method: str, tmp_path: Path) -> None:
    result = runs.compress(mixture(family), tmp_path / "out", QuantizeStage(method, Int(8, 16)))
    assert result.structure.ok
    smoothed = [edge["source"] for block in result.report["blocks"] for edge in block["smoothing"]]
    assert any(".experts." in name for name in smoothed) == (method == "awq" and family != "gpt_oss")
    endings = ("_proj.weight", "_proj_with_mqa.weight", "_linear.weight")
    weights = {name for name in open_source(mixture(family))[0].names() if name.endswith(endings)}
    assert {name.removesuffix(".weight") for name in weights} == PackedCheckpoint.open(tmp_path / "out").schemes.keys()
    assert any(".experts.7." in name for name in weights)
    assert_scored_like_its_weights(tmp_path / "out", tmp_path / "dense")
    found, before = (score(load_model(each, dtype="float64"), TOKENS) for each in (tmp_path / "out", mixture(family)))
    assert float((found - before).norm() / before.norm()) < 0.1


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(STACKED))
def test_the_plan_says_where_transformers_reads_no_single_experts(mixture, family: str, tmp_path: Path) -> None:
    result = runs.compress(mixture(family), tmp_path / "out", QuantizeStage("rtn", W4))
    options = {"dtype": torch.float32, "output_loading_info": True}
    model, loading = auto_class(family).from_pretrained(tmp_path / "out", **options)
    is_noted = any(f"{REFUSED_BY} {TRANSFORMERS} " in note for note in result.report["plan"]["notes"])
    assert is_noted == any("experts" in name for name in loading["missing_keys"])
    if not is_noted:
        served = score(load_model(tmp_path / "out", dtype="float32"), TOKENS)
        torch.testing.assert_close(reference_logits(model.eval(), TOKENS), served, rtol=0, atol=1e-4)


DENSE_EXPERTS = {
    "left out": QuantizeStage("rtn", W4, ignore=("*.experts.*",)),
    "pruned": PruneStage("wanda", sparsity=0.5),
}


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(STACKED))
@pytest.mark.parametrize("stage", DENSE_EXPERTS)
def test_transformers_loads_dense_experts_of_a_stack(mixture, family: str, stage: str, tmp_path: Path) -> None:
    result = runs.compress(mixture(family), tmp_path / "out", DENSE_EXPERTS[stage])
    assert result.structure.ok
    options = {"dtype": torch.float32, "experts_implementation": "eager", "output_loading_info": True}
    model, loading = auto_class(family).from_pretrained(tmp_path / "out", **options)
    assert not loading["missing_keys"]
    served = score(load_model(tmp_path / "out", dtype="float32"), TOKENS)
    torch.testing.assert_close(reference_logits(model.eval(), TOKENS), served, rtol=0, atol=1e-3 * float(served.std()))
