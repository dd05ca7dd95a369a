"""The model sizes, their tokenizer, and the folder in the Hugging Face layout that all end up in."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

from demo_training.mixture import stored_name, upcycled

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES = {
    "demo": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 768, "head_dim": 64},
    "draft": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
              "intermediate_size": 384, "head_dim": 64},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
             "intermediate_size": 64, "head_dim": 16},
}  # fmt: skip
MIXTURE = "mixture"
"""A shape that starts from the MLPs of a dense model."""
CONTEXT = 2048


def config_for(shape: str, vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        **SHAPES[shape], vocab_size=vocab_size, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0, pad_token_id=3, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def create(shape: str, vocab_size: int, init: Path | None, seed: int) -> torch.nn.Module:
    """A float32 model to train: fresh from `seed`, or the weights of the checkpoint `init`."""
    torch.manual_seed(seed)
    # On a CPU the plain attention compiles to faster code than the fused operator at these sizes.
    attention = "sdpa" if torch.cuda.is_available() else "eager"
    if init is not None:
        model = AutoModelForCausalLM.from_pretrained(init, dtype=torch.float32, attn_implementation=attention).train()
        return upcycled(model, seed) if shape == MIXTURE else model
    config = config_for(shape, vocab_size)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).train()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Tokenizer files that transformers 4 and 5 both read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, *_, pad = SPECIAL_TOKENS
    _write_json(
        folder / "tokenizer_config.json",
        {
            "additional_special_tokens": list(SPECIAL_TOKENS[1:3]), "bos_token": end, "eos_token": end,
            "model_max_length": CONTEXT, "pad_token": pad, "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )  # fmt: skip
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def export(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path, card: str) -> None:
    """Write the checkpoint next to `out`, then rename it into place."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_tokenizer(partial, tokenizer.backend_tokenizer)
    _write_json(partial / "config.json", model.config.to_diff_dict() | {"dtype": "bfloat16"})
    ends = {"bos_token_id": 0, "eos_token_id": [0, 2], "pad_token_id": 3}
    _write_json(partial / "generation_config.json", ends)
    named = model.named_parameters()
    weights = {stored_name(name): p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in named}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)
    (partial / "README.md").write_text(card)
    old = out.with_name(out.name + ".old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(partial, out)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
