"""Folding a scale along an edge leaves the block's function as it was, for every family in the table."""

import pytest
import torch

from compress.checkpoint.config import read_config
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.weights import Int
from compress.common.workers import Workers
from compress.methods import base
from compress.methods.base import Needs
from compress.pipeline.block import BlockJob, load_block
from compress.pipeline.capture import capture_inputs, run_all
from compress.pipeline.observe import observe
from compress.pipeline.skeleton import open_skeleton
from compress.pipeline.smoothing import HeadLayout, fold_scale, head_layout, search_scale, trace_modules
from compress.plan import LayerPlan

CPU = torch.device("cpu")
ONE = Workers([CPU])
TOKENS = torch.randint(10, 8000, (4, 32), generator=torch.Generator().manual_seed(2))


class OpenBlock:
    """Block 1 of a model in float32, with the inputs that reach it."""

    def __init__(self, path) -> None:
        self.skeleton = open_skeleton(path, read_config(path))
        self.files = TensorFiles.open(path)
        self.inputs = capture_inputs(self.skeleton, self.files, TOKENS, 2, CPU, torch.float32)
        names = set(self.skeleton.linears(self.skeleton.blocks[1]))
        self.block = load_block(self.skeleton, self.files, 1, names, CPU, torch.float32)
        self.job = BlockJob(
            1,
            {name: LayerPlan(base.QUANTIZATION.find("awq"), Int(3, 32)) for name in names},
            tuple(each for each in self.skeleton.architecture.mappings if names >= set(each.balance_layers)),
            torch.bfloat16,
            self.skeleton.head_dim(0),
        )

    @torch.no_grad()
    def output(self) -> torch.Tensor:
        for name, weight in self.block.weights.items():
            self.block.set_weight(name, weight)
        return run_all(self.block, self.inputs, 1, ONE)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama_biased",
        "mistral",
        "qwen2",
        "qwen3",
        pytest.param("deepseek_v3", marks=pytest.mark.full),
        "deepseek_v32",
        "glm4_moe",
        "mixtral",
        "qwen2_moe",
    ],
)
@torch.no_grad()
def test_every_edge_of_the_table_folds_exactly(tiny_model, family: str) -> None:
    opened = OpenBlock(tiny_model(family, dtype=torch.float32))
    expected = opened.output()
    for seed, edge in enumerate(opened.job.smoothing_mappings):
        layout = head_layout(opened.block, edge, opened.job.head_dim)
        width = opened.block.weights[edge.balance_layers[0]].shape[1]
        scale = torch.rand(width, generator=torch.Generator().manual_seed(seed)) * 3 + 0.3
        if layout.heads_per_group > 1:
            heads = scale.view(-1, layout.heads_per_group, layout.head_dim)
            scale = heads[:, :1].expand_as(heads).reshape(-1)
        before = {name: opened.block.weights[name].clone() for name in edge.balance_layers}
        fold_scale(opened.block, edge, scale, layout)
        assert not torch.equal(before[edge.balance_layers[0]], opened.block.weights[edge.balance_layers[0]])
        torch.testing.assert_close(opened.output(), expected, rtol=1e-4, atol=1e-4)


def test_rounding_of_a_folded_norm_is_undone_by_its_readers(tiny_model) -> None:
    opened = OpenBlock(tiny_model("llama"))
    expected = opened.output()
    edge = opened.job.smoothing_mappings[0]
    scale = torch.rand(128, generator=torch.Generator().manual_seed(0)) + 0.5
    fold_scale(opened.block, edge, scale, HeadLayout())
    assert opened.block.dense["input_layernorm.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(opened.output(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_search_finds_the_scale_that_an_outlier_channel_needs(tiny_model) -> None:
    opened = OpenBlock(tiny_model("llama", dtype=torch.float32))
    # One input channel of the attention is a hundred times larger than the others, as in trained models.
    norm = opened.block.dense["input_layernorm.weight"].clone()
    norm[5] *= 100
    opened.block.set_dense("input_layernorm.weight", norm)
    edge = opened.job.smoothing_mappings[0]
    needs = dict.fromkeys(opened.job.layer_plans, Needs())
    observed = observe(opened.block, opened.inputs, 1, needs, ONE)
    traces, _ = trace_modules(opened.block, opened.inputs, 1, [edge.parent], CPU)
    untouched = {name: opened.block.linear(name).weight.clone() for name in edge.balance_layers}
    seen = observed.statistics[edge.balance_layers[0]]
    result = search_scale(opened.block, edge, traces[edge.parent], seen, opened.job.layer_plans, HeadLayout())
    assert result.loss_after < 0.9 * result.loss_before
    assert result.scale[5] > 3 * result.scale.median()
    assert all(torch.equal(opened.block.linear(name).weight, weight) for name, weight in untouched.items())


@torch.no_grad()
def test_siblings_share_statistics_by_what_they_receive(tiny_model) -> None:
    opened = OpenBlock(tiny_model("llama"))
    needs = {name: Needs(hessian=name.endswith("v_proj")) for name in opened.job.layer_plans}
    observed = observe(opened.block, opened.inputs, 1, needs, ONE)
    groups = {frozenset(group) for group in observed.groups}
    assert frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}) in groups
    assert frozenset({"mlp.gate_proj", "mlp.up_proj"}) in groups
    assert observed.statistics["self_attn.q_proj"] is observed.statistics["self_attn.v_proj"]
    assert observed.statistics["self_attn.q_proj"].hessian.shape == (128, 128)
    assert all(statistics.count == TOKENS.numel() for statistics in observed.statistics.values())
