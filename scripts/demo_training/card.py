"""The model card that is written next to the weights. It only states what this run measured or was told."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill

import torch
from transformers import PretrainedConfig

from demo_training.evaluation import Perplexity
from demo_training.snapshot import Progress

TEMPLATE = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {title}

A small language model of the {family} architecture, trained for this project so that every command has something real
to work on offline. It writes English-looking text; it knows nothing and must not be relied on for facts.

## Architecture

{architecture}

## Training

{training}

```
{command}
```

## Held-out perplexity

Windows that each start cold, from the start of the text; the first token of a window is not scored. bfloat16 weights
as shipped, float32 arithmetic.

| text | window | scored tokens | perplexity |
|---|---|---|---|
{table}

## License

Apache-2.0.
"""

ARCHITECTURE = (
    "{parameters:.1f}M parameters in bfloat16. Hidden size {c.hidden_size}, {c.num_hidden_layers} layers, "
    "{c.num_attention_heads} heads of {c.head_dim}, {c.num_key_value_heads} key-value heads, "
    "feed-forward {c.intermediate_size}{experts}, tied embeddings, context {c.max_position_embeddings}. The tokenizer "
    "is a byte-level BPE of {c.vocab_size} in which every digit is a token of its own. "
    "The chat template uses `<|im_start|>` and `<|im_end|>`."
)
TRAINING = (
    "{tokens}. Texts: {texts}. The training text is not shipped. Batches of {batch}, Muon on the matrices and Adam on "
    "embeddings and norms, warm-up, constant, then linear decay to zero over the last half; float32 weights{autocast}. "
    "{minutes:.0f} minutes of training. The command:"
)


@dataclass(frozen=True)
class Run:
    """Facts of a training run for the model card."""

    title: str
    about_texts: str
    tokens_before: int
    batch: str
    autocast: bool
    command: str


def render(run: Run, model: torch.nn.Module, progress: Progress, results: list[Perplexity]) -> str:
    config: PretrainedConfig = model.config
    family = config.architectures[0].removesuffix("ForCausalLM")
    count = getattr(config, "num_local_experts", 0)
    experts = f" in each of {count} experts, {config.num_experts_per_tok} of them for a token" if count else ""
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    architecture = ARCHITECTURE.format(parameters=parameters, c=config, experts=experts)
    training = TRAINING.format(
        tokens=_tokens(progress.tokens, run.tokens_before),
        texts=run.about_texts,
        batch=run.batch,
        autocast=", bfloat16 autocast" if run.autocast else "",
        minutes=progress.seconds / 60,
    )
    return TEMPLATE.format(
        title=run.title,
        family=family,
        architecture=fill(architecture, 120, break_on_hyphens=False),
        training=fill(training, 120, break_on_hyphens=False),
        command=run.command,
        table="\n".join(f"| {r.text} | {r.window} | {r.tokens:,} | {r.value:.2f} |" for r in results),
    )


def _tokens(here: int, before: int) -> str:
    if not before:
        return f"Trained from scratch on {here / 1e6:.1f}M tokens"
    total = (here + before) / 1e6
    return f"Trained on {total:.1f}M tokens: {before / 1e6:.1f}M by its starting checkpoint and {here / 1e6:.1f}M more"
