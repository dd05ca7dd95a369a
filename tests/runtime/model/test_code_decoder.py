"""Decoders without a family, computed by transformers' own modeling code over our attention."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
from engines import drain, small_engine, tokens_of
from folders import change_config, change_tensors
from mixture_configs import OTHER_MIXTURES
from runtime_command import runtime_here
from safetensors.torch import save_file
from tiny_configs import SIZES
from tiny_models import compute_in_float64, load_reference, pack_model, put_weights, reference_logits, save_tiny_model
from transformers import AutoConfig

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, ToolkitError
from compress.evaluate.scorers import default_backend, open_scorer
from compress.models.registry import FAMILIES
from compress.stages.quantize import QuantizeStage
from runtime.core.request import SamplingParams
from runtime.model.code_decoder import check_tokens
from runtime.model.loader import load_model
from runtime.model.scoring import score

TOKENS = torch.randint(0, 112, (2, 70), generator=torch.Generator().manual_seed(3))
QUICK = {
    "gpt_neox": {},
    "nemotron": {"head_dim": 16},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "diffllama": {},
}
OTHERS = {
    "biogpt": {},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 2.0, "use_qk_norm": True},
    "ctrl": {},
    "granite_swa": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {},
    "gpt_bigcode": {},
    "gptj": {"rotary_dim": 8},
    "helium": {"head_dim": 16},
    "modernbert-decoder": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "nanochat": {"head_dim": 16},
    "olmo": {"clip_qkv": 0.5},
    "persimmon": {},
    "phi": {"partial_rotary_factor": 0.5},
    "vaultgemma": {
        **{"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 24},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE |= {"original_max_position_embeddings": 64, "factor": 4.0, "short_mscale": 1.0, "long_mscale": 1.2}
ALL = QUICK | OTHERS | OTHER_MIXTURES


def models(quick):
    """Models as parameters; those that are not quick are for the full tier."""
    return [
        pytest.param(name, options, id=name, marks=() if name in quick else pytest.mark.full)
        for name, options in ALL.items()
    ]


def load_exact(folder, **options):
    decoder = load_model(folder, device="cpu", dtype="float64", **options)
    for part in (decoder.body, decoder.language_model):
        compute_in_float64(part)
    return decoder


@pytest.mark.parametrize(("family", "options"), models(QUICK))
def test_logits_in_float64(family, options, tmp_path):
    folder = save_tiny_model(tmp_path / "model", family, **options)
    expected = reference_logits(load_reference(folder), TOKENS)
    found = score(load_exact(folder), TOKENS)
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_packed_linears_equal_their_dequantized_weights(kernels, tmp_path):
    dense = save_tiny_model(tmp_path / "dense", "stablelm", **QUICK["stablelm"])
    weights = pack_model(dense, tmp_path / "packed", lambda module: Int(4, 16, symmetric="mlp" in module))
    assert len(weights) == 14
    expected = reference_logits(put_weights(load_reference(dense), weights), TOKENS)
    found = load_exact(tmp_path / "packed", kernels=kernels)
    torch.testing.assert_close(score(found, TOKENS), expected, rtol=0, atol=1e-10)
    assert any("w4" in line for line in found.description)
    assert found.nbytes < load_exact(dense).nbytes or kernels == "auto"
    assert len(engine_tokens(found, dense, [TOKENS[0].tolist()])[0]) == 12
    rounded = load_exact(tmp_path / "packed", as_dense=True)
    torch.testing.assert_close(score(rounded, TOKENS), expected, rtol=0, atol=0.05)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    folder = save_tiny_model(tmp_path / "model", "stablelm")
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, device="cpu")


def test_drafts_of_its_own_layers_and_streams_are_refused(tmp_path):
    folder = save_tiny_model(tmp_path / "model", "stablelm")
    decoder = load_model(folder, device="cpu")
    for options in ({"speculative_model": "self:skip"}, {"attention_window": 32}, {"max_model_len": 300}):
        with pytest.raises(ToolkitError):
            small_engine(decoder, folder, **options)


CODE = """
from transformers import StableLmConfig, StableLmForCausalLM

class MineConfig(StableLmConfig):
    model_type = "mine"

class MineForCausalLM(StableLmForCausalLM):
    config_class = MineConfig
"""


def test_code_of_the_folder_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = save_tiny_model(tmp_path / "model", "stablelm")
    expected = score(load_model(folder, device="cpu"), TOKENS)
    classes = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    change_config(folder, model_type="mine", architectures=["MineForCausalLM"], auto_map=classes)
    (folder / "mine.py").write_text(CODE)
    with pytest.raises(CheckpointError, match="--trust-remote-code"):
        load_model(folder, device="cpu")
    assert torch.equal(score(load_model(folder, device="cpu", trust_remote_code=True), TOKENS), expected)


UNSERVED = {
    "bloom": {},
    "falcon": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "xglm": {},
}
DOCUMENTED = ALL | UNSERVED
DOCS = Path(__file__).parents[3] / "docs/families.md"


def documented_rows():
    """Rows of the table of decoders without a family: whether they are compressed, evaluated by what, and served."""
    lines = DOCS.read_text().partition("\n## Other decoders")[2].splitlines()
    rows = [tuple(cell.strip("` ") for cell in line.strip("|").split("|")) for line in lines if line.startswith("| `")]
    return {name: tuple(cells[:3]) for name, *cells in rows if name != "model_type"}


def test_the_table_of_the_docs_has_every_model():
    assert sorted(documented_rows()) == sorted(DOCUMENTED)
    assert not DOCUMENTED.keys() & set(FAMILIES)


@pytest.mark.full
@pytest.mark.parametrize("family", DOCUMENTED)
def test_the_table_of_the_docs_is_true(family, tmp_path):
    source = save_tiny_model(tmp_path / "source", family, **DOCUMENTED[family] | {"vocab_size": 8192})
    for file in demo_model_path().glob("tokenizer*"):
        shutil.copy(file, source)
    try:
        packed = runs.compress(source, tmp_path / "packed", QuantizeStage("rtn", Int(4, 4))).out
    except CheckpointError:
        packed = None
    backend = default_backend(packed or source)
    logits = open_scorer(packed or source, backend).logits(TOKENS)
    assert logits.isfinite().all()
    yes = {True: "yes", False: "no"}
    assert documented_rows()[family] == (yes[packed is not None], backend, yes[backend == "runtime"])


REFUSED = {
    "bamba": {},
    "falcon_mamba": {},
    "recurrent_gemma": {},
    "bloom": {},
    "falcon": {},
    "bart": {},
    "bert": {"is_decoder": False},
    "phi": {"rope_parameters": LONGROPE},
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_says_why_in_one_line(family, tmp_path):
    """Recurrent states, biases on scores, two towers, later tokens, rotation by the longest sequence of a step."""
    config = AutoConfig.for_model(family, **(SIZES | REFUSED[family]))
    config.save_pretrained(tmp_path / "model")
    save_file({"model.embed_tokens.weight": torch.zeros(112, 64)}, tmp_path / "model" / "model.safetensors")
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path / "model")
    answer = runtime_here("generate", "model", "--prompt", "A", cwd=tmp_path)
    error = answer.stderr.splitlines()[-1]
    assert (answer.returncode, answer.stdout, answer.stderr.count("error:")) == (1, "", 1)
    assert error.startswith("error:")
    assert f"'{family}'" in error


def engine_tokens(decoder, folder, prompts, **options):
    engine = small_engine(decoder, folder, **options)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    names = [engine.add_request(prompt, sampling) for prompt in prompts[:1]]
    deltas = drain(engine)
    names += [engine.add_request(prompt, sampling) for prompt in prompts[1:]]
    drain(engine, deltas)
    assert len(prompts) == 1 or engine.scheduler.stats.num_prefix_hits
    return [tokens_of(deltas[name]) for name in names]


@pytest.mark.parametrize(("family", "options"), models(("stablelm",)))
def test_greedy_tokens_alone_and_in_a_crowd(family, options, tmp_path):
    """Prompts with a common beginning, in chunks, with drafts, and with blocks for two of them."""
    folder = save_tiny_model(tmp_path / "model", family, **options)
    reference, decoder = load_reference(folder), load_exact(folder)
    first = TOKENS[0, :40].tolist()
    prompts = [first[:5], first, first[:20] + TOKENS[1, :20].tolist(), (first * 4)[:130]]
    expected = [
        reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None)[0]
        for prompt in prompts
    ]
    wanted = [tokens[len(prompt) :].tolist() for tokens, prompt in zip(expected, prompts, strict=True)]
    assert engine_tokens(decoder, folder, prompts) == wanted
    assert [engine_tokens(decoder, folder, [prompt])[0] for prompt in prompts[:2]] == wanted[:2]
    crowded = {"prefill_chunk": 7, "num_blocks": 50, "speculative_model": "ngram"}
    assert engine_tokens(decoder, folder, prompts + prompts, **crowded) == wanted + wanted


class Rounded(torch.nn.Module):
    """A language model whose logits depend on the rows of the tokens, by a share of them."""

    def __init__(self, inner: torch.nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, inputs_embeds: torch.Tensor, **options: object) -> object:
        output = self.inner(inputs_embeds=inputs_embeds, **options)
        rows = torch.arange(inputs_embeds.shape[1])[:, None]
        output.logits = output.logits * (1 + self.share * rows)
        return output


def test_modeling_code_may_round_to_float32_in_a_float64_model(tmp_path: Path) -> None:
    decoder = load_model(save_tiny_model(tmp_path, "stablelm"), dtype="float64")
    check_tokens(replace(decoder, language_model=Rounded(decoder.language_model, 1e-6)))
    with pytest.raises(CheckpointError, match="attention"):
        check_tokens(replace(decoder, language_model=Rounded(decoder.language_model, 1e-2)))
