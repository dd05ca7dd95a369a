"""A family added from outside the package: compressed, verified and served. Llama with GELU and a logit scale."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import load_reference, put_checkpoint, reference_logits
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.models.config import Config
from compress.models.registry import find_family, register
from compress.models.spec import ModelSpec
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import QuantizeStage
from runtime.backends.fused_layers import layers_unsupported
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(10, 8000, (2, 40), generator=torch.Generator().manual_seed(3))


class ToyConfig(LlamaConfig):
    model_type = "toy_llama"
    logit_scale: float = 1.0


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.config.logit_scale
        return output


@pytest.fixture(scope="module", autouse=True)
def toy_family() -> None:
    """All that a family is: what it has in common with Llama, and what not. The activation is in config.json."""
    AutoConfig.register("toy_llama", ToyConfig)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)

    @register("toy_llama")
    def toy_llama(config: Config) -> ModelSpec:
        llama = find_family("llama")
        assert llama is not None
        return replace(llama(config), logit_scale=float(config["logit_scale"]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    config = ToyConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8192,
        max_position_embeddings=256,
        hidden_act="gelu",
        logit_scale=0.25,
    )
    torch.manual_seed(0)
    model = ToyForCausalLM(config)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    model.save_pretrained(folder)
    for file in demo_model_path().glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "packed"
    recipe = Recipe((QuantizeStage("awq", Int(4, 64)),), CalibrationOptions(samples=4, length=48))
    result = run(prepare(RunRequest(source, str(source), recipe, out, measure=False)), quiet=True)
    assert result.structure.ok
    assert not result.structure.notes, "names and shapes were compared with the family's"
    assert all(len(block["smoothing"]) == 4 for block in result.report["blocks"]), "its mappings are Llama's"
    return out


def logits_of(folder: Path, source: Path, tokens: Tensor = TOKENS) -> Tensor:
    """By transformers in float64, from the weights that a checkpoint holds."""
    return reference_logits(put_checkpoint(load_reference(source), PackedCheckpoint.open(folder)), tokens)


def test_logits_of_the_dense_and_of_the_packed_model(source: Path, packed: Path) -> None:
    dense = logits_of(source, source)
    for folder in (source, packed):
        expected = logits_of(folder, source)
        found = score(load_model(folder, device="cpu", dtype="float64", kernels="reference"), TOKENS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert torch.nn.functional.cosine_similarity(expected.flatten(), dense.flatten(), dim=0) > 0.85
    assert dense.std() > 0.05


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_it_is_served(source: Path, packed: Path, dtype: str) -> None:
    """Through the engine and its pages: greedy tokens are the reference's, or nearly as likely in 16 bits."""
    prompt = TOKENS[0].tolist()
    llm = LLM(packed, RuntimeConfig(device="cpu", dtype=dtype, num_blocks=64))
    [answer] = llm.generate([prompt], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    logits = logits_of(packed, source, torch.tensor([prompt + answer.token_ids]))[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
    margin = 0.0 if dtype == "float64" else 0.1 * float(logits.std())
    assert (chosen >= logits.amax(-1) - margin).all()


def test_layers_that_compute_silu_say_so() -> None:
    family = find_family("toy_llama")
    assert family is not None
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 8, "logit_scale": 1}
    for activation, supported in (("silu", True), ("gelu", False)):
        spec = family({**sizes, "num_hidden_layers": 1, "hidden_act": activation})
        assert (layers_unsupported(spec) == "") is supported
