"""Text models of multimodal checkpoints: served as they are published, under the names of both layouts."""

import json
from pathlib import Path

import pytest
import torch
from folders import change_tensors
from tiny_configs import SIZES
from tiny_models import compute_in_float64, reference_logits
from tiny_wrappers import WRAPPERS, load_wrapper, save_tiny_wrapper

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import CheckpointError
from compress.models.registry import WRAPPERS as REGISTERED
from compress.models.wrappers import text_part
from runtime.core.model_config import parse_config
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(3, 112, (2, 40), generator=torch.Generator().manual_seed(3))


def test_every_wrapper_has_a_tiny_model() -> None:
    assert set(REGISTERED) == WRAPPERS.keys() | {"paligemma"}


def test_prompts_that_attend_to_later_tokens_are_refused(tmp_path: Path) -> None:
    """PaliGemma reads images and prompts in both directions, which its config leaves to its class."""
    for bidirectional in ({"use_bidirectional_attention": True}, {}):
        text = {"model_type": "gemma2", **SIZES, **bidirectional}
        whole = {"model_type": "paligemma", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}
        with pytest.raises(CheckpointError, match="later tokens"):
            parse_config(text_part(whole))


def exchange_layout(folder: Path) -> None:
    """Stores the text model under the names that transformers before 4.52 wrote, or those since; under those where it
    has its own."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        old, new = "language_model.model.", "model.language_model."
        if not any(name.startswith((old, new)) for name in tensors):
            for name in [name for name in tensors if name.startswith("model.")]:
                tensors[name.replace("model.", new, 1)] = tensors.pop(name)
            return
        is_old = any(name.startswith(old) for name in tensors)
        for name in list(tensors):
            before, after = (old, new) if is_old else (new, old)
            renamed = name.replace(before, after) if name.startswith(before) else name
            renamed = renamed.removeprefix("language_model.") if is_old and "lm_head" in name else renamed
            renamed = f"language_model.{name}" if not is_old and name.startswith("lm_head") else renamed
            tensors[renamed] = tensors.pop(name)

    change_tensors(folder, rename)


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_logits_in_float64(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny_wrapper(tmp_path / "model", model_type)
    expected = reference_logits(compute_in_float64(load_wrapper(folder, torch.float64)), TOKENS)
    assert expected.std() > 0.5
    for _ in range(2):
        found = score(load_model(folder, dtype="float64"), TOKENS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        others = PackedCheckpoint.open(folder).files.other_parts
        assert others
        assert all("vi" in name or "projector" in name or name.endswith("image_newline") for name in others), others
        exchange_layout(folder)


def test_layers_of_kimi_have_the_names_that_were_published_or_those_that_transformers_writes(tmp_path: Path) -> None:
    folder = save_tiny_wrapper(tmp_path / "model", "kimi_k25")
    written = PackedCheckpoint.open(folder).files
    saved, published = "language_model.model.blocks.", "language_model.model.layers."

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        assert any(name.startswith(saved) for name in tensors)
        for name in list(tensors):
            tensors[name.replace(saved, published)] = tensors.pop(name)

    change_tensors(folder, rename)
    assert PackedCheckpoint.open(folder).files.names() == written.names()


def test_the_config_of_a_text_model_may_stand_beside_that_of_other_parts(tmp_path: Path) -> None:
    """Qwen2.5-VL is published so, by transformers 4."""
    folder = save_tiny_wrapper(tmp_path / "model", "qwen2_5_vl")
    expected = score(load_model(folder, dtype="float64"), TOKENS)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    text["rope_theta"] = 1e4
    (folder / "config.json").write_text(json.dumps(text | config))
    assert torch.equal(score(load_model(folder, dtype="float64"), TOKENS), expected)
    reference = reference_logits(compute_in_float64(load_wrapper(folder, torch.float64)), TOKENS)
    torch.testing.assert_close(expected, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_transposed", [True, False])
def test_experts_of_qwen3_vl_are_published_transposed(tmp_path: Path, is_transposed: bool) -> None:
    folder = save_tiny_wrapper(tmp_path / "model", "qwen3_vl_moe", moe_intermediate_size=24)

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if is_transposed and ".experts." in name]:
            tensors[name] = tensors[name].mT.contiguous()

    change_tensors(folder, transpose)
    expected = reference_logits(compute_in_float64(load_wrapper(folder, torch.float64)), TOKENS)
    torch.testing.assert_close(score(load_model(folder, dtype="float64"), TOKENS), expected, rtol=0, atol=1e-10)
