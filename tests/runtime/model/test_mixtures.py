"""Mixtures of experts: packed experts as stored, and the choice of experts."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import answer_all, small_engine
from safetensors.torch import load_file, save_file
from tiny_configs import GEMMA4_EXPERTS, VARIANTS
from tiny_models import load_reference, pack_model, reference_logits, save_tiny_model
from torch import Tensor

from compress.checkpoint.config import ModelConfig, read_config, write_config
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.cpu.binding import library
from compress.models.linear import Linear
from compress.models.registry import find_family
from compress.models.router import Router
from runtime.backends.backend import BACKENDS, Backend
from runtime.backends.measured import Verdict
from runtime.backends.mlp import route
from runtime.backends.torch.quantized_linear import REFERENCE
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.memory.advice import inspect
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(3, 112, (2, 40), generator=torch.Generator().manual_seed(3))


def write_dequantized(packed: Path, dense: Path, out: Path) -> Path:
    """Writes the checkpoint that transformers computes what is packed with."""
    checkpoint = PackedCheckpoint.open(packed)
    modules = {name: checkpoint.weight(name).dequantize(torch.float64) for name in checkpoint.schemes}
    rest = {
        name: checkpoint.tensor(name).double()
        for name in PackedCheckpoint.open(dense).files.names()
        if name.removesuffix(".weight") not in modules
    }
    out.mkdir()
    tensors = {**rest, **{f"{name}.weight": weight for name, weight in modules.items()}}
    save_file(stack_experts(tensors, read_config(dense)), out / "model.safetensors")
    write_config(out, read_config(dense))
    return out


def stack_experts(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Puts the tensors of all experts into one where the published checkpoints of a family have them so."""
    describe = find_family(config["model_type"])
    assert describe is not None
    places, stacks = describe(config).slices(), defaultdict(dict)
    for name in [name for name in tensors if name in places]:
        stacks[places[name].stack][places[name].expert, places[name].part] = tensors.pop(name)
    for stack, parts in stacks.items():
        each = torch.stack([parts[key] for key in sorted(parts)]).unflatten(0, (-1, len(stack.parts)))
        rows = each.transpose(1, 2).flatten(1, 2) if stack.interleaved else each.flatten(1, 2)
        tensors[stack.name] = (rows.mT if stack.transposed else rows).contiguous()
    return tensors


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "granitemoe", "llama4_text", "qwen2_moe", "qwen3_moe"])
def test_packed_experts_are_multiplied_as_stored(family: str, tmp_path: Path) -> None:
    dense, packed = save_tiny_model(tmp_path / "dense", family, **VARIANTS[family]), tmp_path / "packed"
    weights = pack_model(dense, packed, lambda module: Int(4, 32) if "experts" in module else None)
    assert len(weights) >= 2 * 8 * 3 - 24
    reference = load_reference(write_dequantized(packed, dense, tmp_path / "plain"))
    found = score(load_model(packed, dtype="float64"), TOKENS)
    torch.testing.assert_close(found, reference_logits(reference, TOKENS), rtol=0, atol=1e-9)


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_whole_layers_in_one_call_answer_as_alone(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    options = VARIANTS[family] | sizes
    dense, packed = save_tiny_model(tmp_path / "dense", family, **options), tmp_path / "packed"
    pack_model(dense, packed, lambda module: Int(4, 32) if "experts" in module else None)
    decoder = load_model(packed, dtype="bfloat16")
    limits = {"block_size": 16, "max_num_batched_tokens": 32, "prefill_chunk": 24}
    assert any("all experts in one call" in line for line in decoder.description)
    assert small_engine(decoder, **limits).runner.kernels.layers is not None
    prompts = {str(length): TOKENS[0, -length:].tolist() for length in (5, 30, 40)}
    requests = [(name, prompt, SamplingParams(temperature=0, max_tokens=8)) for name, prompt in prompts.items()]
    together = answer_all(small_engine(decoder, **limits), requests, gap=1)
    for request in requests:
        assert together[request[0], 0] == answer_all(small_engine(decoder, **limits), [request])[request[0], 0]


@pytest.mark.full
@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("family", ["gemma4_text", "gpt_oss", "llama4_text", "phimoe"])
def test_compiled_mixtures_come_as_near_as_plain_torch(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(
        tmp_path / "model", family, **(GEMMA4_EXPERTS if family == "gemma4_text" else VARIANTS[family])
    )
    compiled, plain = (load_model(folder, dtype="bfloat16", kernels=kernels) for kernels in ("auto", "reference"))
    assert any("all experts in one call" in line for line in compiled.description)
    exact = score(load_model(folder, dtype="float64"), TOKENS)
    error, usual = ((score(model, TOKENS) - exact).square().mean().sqrt() for model in (compiled, plain))
    assert error < 1.3 * usual


def test_kernels_that_were_measured_faster_multiply_no_experts(tmp_path: Path) -> None:
    """Those are multiplied together, by a kernel that reads the layout of one backend."""
    dense, packed = save_tiny_model(tmp_path / "dense", "qwen3_moe", **VARIANTS["qwen3_moe"]), tmp_path / "packed"
    pack_model(dense, packed, lambda module: Int(4, 32) if "layers" in module else None)
    faster = replace(REFERENCE, name="faster", mode="faster", verdict=lambda *_: Verdict(True, "was measured"))
    BACKENDS.register()(Backend("measured", linears=(faster,)))
    try:
        linears = load_model(packed, dtype="bfloat16").linears
    finally:
        BACKENDS.remove("measured")
    kernels = {name: kernel for name, form, kernel in linears if form != "dense bfloat16"}
    assert kernels["q_proj+k_proj+v_proj"] == kernels["o_proj"] == "faster"
    assert not {kernels["gate_proj+up_proj"], kernels["down_proj"]} & {"faster"}


def test_mxfp4_experts_are_served_as_published(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "gpt_oss", **VARIANTS["gpt_oss"])
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        groups = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, groups, generator=generator).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    block = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    write_config(folder, {**read_config(folder), "quantization_config": block})
    checkpoint = PackedCheckpoint.open(folder)
    assert len(checkpoint.schemes) == 2 * 8 * 3
    up = checkpoint.packed_weight("model.layers.1.mlp.experts.5.up_proj").tensors(torch.bfloat16)
    stored = tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"][5, 1::2].flatten(1)
    assert torch.equal(up[".weight_packed"], stored)
    found = score(load_model(folder, dtype="float64"), TOKENS)
    torch.testing.assert_close(found, reference_logits(load_reference(folder), TOKENS), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["qwen3_moe", "phi3"])
def test_no_command_that_fails_is_advised(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family, **VARIANTS[family])
    lines = list(inspect(folder, "", RuntimeConfig()).lines())
    assert any("--kv-cache" in line for line in lines)
    assert not any("smoothquant" in line for line in lines)  # some families have no norms to smooth


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    router = Router(Linear("gate", 4, 8), 2, "sigmoid", normalizes=False, scale=2.0)
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, chosen = route(scores, router, torch.tensor([0.0, -1.0, 0.0, 0.0]))
    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, 2 * scores[:, [0, 2]].sigmoid())


def test_experts_outside_of_the_best_groups_are_not_chosen() -> None:
    router = Router(Linear("gate", 6, 8), 2, num_groups=3, num_chosen_groups=1)
    scores = torch.tensor([[5.0, -9.0, 4.0, 4.1, 3.0, 3.5]])
    _, chosen = route(scores.log_softmax(-1), Router(Linear("gate", 6, 8), 2), None)
    assert sorted(chosen[0].tolist()) == [0, 3]
    _, chosen = route(scores, Router(Linear("gate", 6, 8), 2, "sigmoid", num_groups=3, num_chosen_groups=1), None)
    assert sorted(chosen[0].tolist()) == [2, 3]
    assert route(scores, router, None)[0].sum().item() == pytest.approx(1.0)


def test_sparsemixer_weighs_each_expert_among_those_that_come_near() -> None:
    router = Router(Linear("gate", 4, 8), 2, "sparsemixer", margin=0.5)
    weights, chosen = route(torch.tensor([[4.0, 3.0, 1.0, -2.0], [1.0, 1.0, 9.0, 1.0]]), router, None)
    assert chosen.tolist() == [[0, 1], [2, 0]]
    first = torch.tensor([4.0, 3.0]).softmax(-1)[0].item()
    assert weights.tolist() == [pytest.approx([first, 1.0]), pytest.approx([1.0, 1 / 3])]
