"""Tiny random models of several families, with the demo model's tokenizer, that the tests of this folder share."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from shared_store import SharedStore
from tiny_configs import GEMMA4_LAYERS, VARIANTS
from tiny_models import auto_class

from compress.common.cli import demo_model_path
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import Recipe

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 128, 256, 3, 4, 2
TinyModel = Callable[..., Path]


def build_model(family: str, **options):
    """A random model of a family, in float32, with biases and norms that are not 0 and 1."""
    import transformers

    common = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 8192,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 3,
    }
    special = {
        "llama": {},
        "llama_biased": {"attention_bias": True, "mlp_bias": True},
        "mistral": {"sliding_window": 16},
        "phi3": {},
        "falcon": {},
        "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
        "phimoe": VARIANTS["phimoe"] | {"head_dim": 16},
        "qwen3": {"head_dim": 64},
        # Qwen2 may mix full and windowed attention, so its blocks are passed different masks.
        "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    }
    fields = special[family] if family in special else VARIANTS[family] | {"head_dim": 32}
    if "kv_lora_rank" in fields:
        del fields["head_dim"]
    if "global_head_dim" in fields:
        fields = fields | GEMMA4_LAYERS | {"global_head_dim": 64}
    if "vocab_size_per_layer_input" in fields:
        fields = fields | {"vocab_size_per_layer_input": common["vocab_size"]}
    config = transformers.AutoConfig.for_model(family.removesuffix("_biased"), **common | fields | options)
    torch.manual_seed(0)
    model = auto_class(config.model_type).from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(mean=1.0 if parameter.dim() == 1 else 0.0, std=spread)
    return model


@pytest.fixture(scope="session")
def tiny_model(shared_store: SharedStore) -> TinyModel:
    """Writes (once per session and combination) a tiny model folder and returns its path."""

    def make(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **options) -> Path:
        def write(folder: Path) -> None:
            build_model(family, **options).to(dtype).save_pretrained(folder)
            for file in demo_model_path().glob("tokenizer*"):
                (folder / file.name).write_bytes(file.read_bytes())

        return shared_store.folder(family, (dtype, *sorted(options.items())), write)

    return make


@pytest.fixture(scope="session")
def packed_run(shared_store: SharedStore, tiny_model: TinyModel) -> Callable[..., Path]:
    """Runs a recipe on a tiny model (once per session and combination) and returns the checkpoint's folder."""

    def make(recipe: Recipe, name: str = "packed", measure: bool = False, **model) -> Path:
        source = tiny_model(**model)
        request = partial(RunRequest, source, str(source), recipe, measure=measure)
        key = (recipe, measure, *sorted(model.items()))
        return shared_store.folder(name, key, lambda out: run(prepare(request(out)), quiet=True))

    return make
