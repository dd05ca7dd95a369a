"""Checkpoints in the layouts of other tools, whole and damaged: made from the demo model without those tools."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from bitsandbytes_files import pack_4bit, pack_model_as
from folders import change_config, change_tensors, private_copy
from tiny_wrappers import save_tiny_wrapper
from torch import Tensor

from compress.checkpoint.containers import containers
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.verify import verify_structure
from compress.checkpoint.weights import Int
from compress.checkpoint.weights.coded import CodedWeight
from compress.checkpoint.weights.packing import pack_bits
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError
from compress.doctor.examine import examine

Find = Callable[..., set[tuple[str, str]]]
Pack = Callable[[Tensor], dict[str, Tensor]]
MODULE = "model.layers.2.mlp.up_proj"
ACTIVATION_ORDER = ("warning", "activation-order")


def pack_as(folder: Path, pack: Pack, **block: object) -> Path:
    """Copies the demo model with packed projections, and the files that GPTQModel writes with them."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stored = pack(tensors.pop(name))
            tensors |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in stored.items()}

    change_tensors(private_copy(demo_model_path(), folder), change)
    (folder / "quant_log.csv").write_text("layer,module,loss,samples,damp,time\n0,self_attn.q_proj,0.1,9,0.05,1.0\n")
    (folder / "quantize_config.json").write_text(json.dumps(block))
    return change_config(folder, quantization_config=block)


def rounded(weight: Tensor, order: Tensor, symmetric: bool) -> CodedWeight:
    """Integers of groups of columns in `order`."""
    return Int(4, 32, symmetric).round(weight[:, order].float(), None, torch.float16)


def gptq(weight: Tensor, symmetric: bool = True, offset: int = 1, in_order: bool = False) -> dict[str, Tensor]:
    """GPTQ's tensors, columns in the order of activations or not."""
    columns = torch.arange(weight.shape[1])
    order = columns.flip(0).roll(7) if in_order else columns
    found, places = rounded(weight, order, symmetric), order.argsort()
    return {
        "qweight": pack_bits(found.qweight[:, places].T, 4, 0),
        "qzeros": pack_bits(found.zero_points.T - offset, 4, 1),
        "scales": found.scales.half().T.contiguous(),
        "g_idx": (columns // 32)[places].to(torch.int32),
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "pack_dtype": "int32", "lm_head": False}
V2 = {"method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2", "dynamic": {"-:.*head.*": {}}}
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "gptq": lambda folder: pack_as(folder, gptq, **GPTQ, checkpoint_format="gptq", desc_act=False),
    "gptq_v2": lambda folder: pack_as(folder, partial(gptq, symmetric=False, offset=0), **GPTQ | V2 | {"sym": False}),
    "desc_act": lambda folder: pack_as(folder, partial(gptq, in_order=True), **GPTQ, desc_act=True),
    "bitsandbytes": lambda folder: pack_model_as("nf4 twice", demo_model_path(), folder),
    "int8": lambda folder: pack_model_as("int8", demo_model_path(), folder),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return LAYOUTS[request.param](tmp_path / "model")


@pytest.fixture
def ordered(tmp_path: Path) -> Path:
    return LAYOUTS["desc_act"](tmp_path / "model")


def test_whole_files_are_clean(layout: Path, kinds: Find) -> None:
    expected = {ACTIVATION_ORDER} if PackedCheckpoint.open(layout).reordered else set()
    assert kinds(layout, against=demo_model_path()) == expected
    assert verify_structure(layout).ok


def test_columns_in_the_order_of_activations_are_not_served_here(ordered: Path) -> None:
    facts = examine(ordered, against=demo_model_path()).facts
    assert (facts["loaded by"], facts["not known of"]) == ("none", "transformers, vLLM, SGLang")
    assert float(facts["median relative error"].split("sym ")[1].split()[0]) < 0.12
    assert any("42 modules have columns in the order of" in note for note in verify_structure(ordered).notes)


def test_codes_in_the_order_of_activations_are_examined(ordered: Path, kinds: Find) -> None:
    change_tensors(ordered, lambda tensors: tensors[f"{MODULE}.scales"][:, 3].zero_())
    assert kinds(ordered) == {ACTIVATION_ORDER, ("error", "dead-scales")}
    change_tensors(ordered, lambda tensors: tensors[f"{MODULE}.qweight"].fill_(0x0F0F0F0F))
    assert kinds(ordered) == {ACTIVATION_ORDER, ("error", "dead-scales"), ("warning", "saturated-codes")}


def test_columns_in_the_order_of_activations_are_exported_as_numbers(ordered: Path, tmp_path: Path) -> None:
    listed = {each.format: each for each in containers(ordered)}
    assert listed["dense"].readers
    assert {name for name, each in listed.items() if "42 modules" in each.refusal} == {
        "compressed-tensors", "gptq", "awq", "fp8", "exl3", "compress-runtime",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="compress quantize"):
        export_checkpoint(ordered, "compressed-tensors", tmp_path / "packed")
    export_checkpoint(ordered, "dense", tmp_path / "dense")
    packed, dense = PackedCheckpoint.open(ordered), PackedCheckpoint.open(tmp_path / "dense")
    assert torch.equal(dense.tensor(f"{MODULE}.weight"), packed.values(MODULE, packed.dtype))


def test_measured_scales_of_keys_and_values_are_known(packed: Path, kinds: Find) -> None:
    """llm-compressor stores them next to the projections (`kv_cache_scheme`)."""
    names = [f"model.layers.{layer}.self_attn.{each}_scale" for layer in range(6) for each in "kv"]
    change_tensors(packed, lambda tensors: tensors.update(dict.fromkeys(names, torch.tensor([0.02]).bfloat16())))
    block = json.loads((packed / "config.json").read_text())["quantization_config"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    change_config(packed, quantization_config=block | {"kv_cache_scheme": scheme})
    assert kinds(packed) == set()


def test_a_packed_head_is_compared_with_the_embedding_that_it_was(tmp_path: Path, kinds: Find) -> None:
    def add_head(tensors: dict[str, Tensor]) -> None:
        head = pack_4bit(tensors["model.embed_tokens.weight"])
        tensors |= {f"lm_head{suffix}": tensor for suffix, tensor in head.items()}

    own = change_tensors(LAYOUTS["bitsandbytes"](tmp_path / "own"), add_head)
    change_config(own, tie_word_embeddings=False)
    assert kinds(own, against=demo_model_path()) == set()
    change_tensors(own, lambda tensors: tensors["lm_head.weight"].copy_(tensors["lm_head.weight"].flip(0)))
    assert kinds(own, against=demo_model_path()) == {("error", "large-error")}


def test_a_wrong_group_size_is_named(tmp_path: Path) -> None:
    folder = LAYOUTS["gptq"](tmp_path / "model")
    for changes, numbers in (
        ({"group_size": 64}, "8 groups for 256 columns.* mean 4 for 256"),
        ({"bits": 8}, "for 128"),
    ):
        change_config(folder, quantization_config=GPTQ | changes)
        found = next(each for each in examine(folder).findings if each.where == MODULE)
        assert re.search(numbers, found.problem)
        assert "group_size" in found.remedy
    assert "order" not in found.problem


def test_a_version_of_gptq_that_is_not_the_stored_one(tmp_path: Path, kinds: Find) -> None:
    """Each zero point is 1 off, and with it all values are shifted by a step."""
    folder = LAYOUTS["gptq_v2"](tmp_path / "model")
    change_config(folder, quantization_config=GPTQ | {"sym": False, "checkpoint_format": "gptq"})
    assert kinds(folder) == {("warning", "shifted-values")}


def test_scales_of_zero_of_floats(tmp_path: Path, kinds: Find) -> None:
    folder = pack_model_as("nf4", demo_model_path(), tmp_path / "model")
    change_tensors(folder, lambda tensors: tensors[f"{MODULE}.weight.absmax"][40:60].zero_())
    assert kinds(folder) == {("error", "dead-scales")}


def test_a_tied_head_that_is_not_listed_as_left_out(packed: Path, kinds: Find) -> None:
    """AutoRound's FP8_STATIC of a model with tied embeddings has `"ignore": []`."""
    block = json.loads((packed / "config.json").read_text())["quantization_config"]
    change_config(packed, quantization_config=block | {"ignore": []})
    assert kinds(packed) == set()
    assert verify_structure(packed).problems == ()
    change_config(packed, tie_word_embeddings=False)
    change_tensors(packed, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    assert ("error", "config") in kinds(packed)


def test_the_dtype_of_kernels_of_gptq_is_no_mistake(tmp_path: Path, kinds: Find) -> None:
    """AutoRound names float16 in the config of a bfloat16 model, whose norms and embedding it keeps."""
    folder = LAYOUTS["gptq"](tmp_path / "model")
    change_config(folder, dtype="float16")
    assert kinds(folder) == set()


def test_masks_that_are_only_copied_may_be_infinite(dense: Path, tmp_path: Path, kinds: Find) -> None:
    mask = torch.full((4, 4), float("-inf"))
    buffers = {"model.layers.0.self_attn.masked_bias": mask, "model.norm_of_nothing.weight": mask}
    change_tensors(dense, lambda tensors: tensors.update(buffers))
    assert {problem.split()[0] for problem in verify_structure(dense).problems} == {"model.norm_of_nothing.weight"}
    wrapper = save_tiny_wrapper(tmp_path / "wrapper", "gemma3")
    change_tensors(wrapper, lambda tensors: tensors.update({"model.vision_tower.mask": mask.clone()}))
    assert verify_structure(wrapper).problems == ()
    assert ("error", "non-finite") not in kinds(wrapper)
