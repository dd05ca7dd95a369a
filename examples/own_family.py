"""Adds a model family from outside the package: `python examples/own_family.py FOLDER`.

The family is Llama with logits multiplied by `logit_scale`. The script makes a small model of it with random weights in
FOLDER, quantizes it and generates from the result.
"""

import sys
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.models.config import Config
from compress.models.families.llama import llama
from compress.models.registry import register
from compress.models.spec import ModelSpec
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import Recipe
from compress.stages.quantize import QuantizeStage
from runtime.core.request import SamplingParams
from runtime.llm import LLM


class ScaledConfig(LlamaConfig):
    """Configuration as transformers reads it; a family that transformers knows needs neither of these classes."""

    model_type = "scaled_llama"
    logit_scale: float = 0.25


class ScaledForCausalLM(LlamaForCausalLM):
    """The layers, whose names and shapes are compared with the description below."""

    config_class = ScaledConfig


@register("scaled_llama")
def scaled_llama(config: Config) -> ModelSpec:
    """Describes a Llama with scaled logits."""
    return replace(llama(config), logit_scale=float(config["logit_scale"]))


def save_model(folder: Path) -> None:
    """Saves a model with random weights and the tokenizer of the demo model."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ScaledForCausalLM(ScaledConfig(vocab_size=8192, **sizes)).save_pretrained(folder)
    for file in demo_model_path().glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())


def main(folder: Path) -> None:
    AutoConfig.register("scaled_llama", ScaledConfig)
    AutoModelForCausalLM.register(ScaledConfig, ScaledForCausalLM)
    source, out = folder / "source", folder / "packed"
    save_model(source)
    run(prepare(RunRequest(source, str(source), Recipe((QuantizeStage("rtn", Int(4, 64)),)), out, measure=False)))
    [answer] = LLM(out).generate(["It was"], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    print(f"{len(answer.token_ids)} tokens: {answer.text!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "scaled-llama"))
