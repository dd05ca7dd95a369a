"""A family with layers of the toy mixer and of attention, as one file; transformers computes its oracle."""

from typing import Any

import torch
from torch import Tensor, nn
from toy_mixer import Mean
from transformers import LlamaConfig, LlamaForCausalLM

from compress.models.config import Config, attention, decoder, gated_mlp, positive
from compress.models.linear import Linear
from compress.models.registry import register
from compress.models.spec import ModelSpec

NAME = "toy_mean"
RECURRENT = "linear_attention"


@register(NAME)
def toy_mean(config: Config) -> ModelSpec:
    size = positive(config, "hidden_size")
    mean = Mean((Linear("self_attn.in_proj", 2 * size, size),), Linear("self_attn.out_proj", size, size, split="rows"))
    mixers = [mean if kind == RECURRENT else attention(config) for kind in config["layer_types"]]
    return decoder(config, mixers, gated_mlp(config))


class ToyConfig(LlamaConfig):
    model_type = NAME
    layer_types: list[str] | None = None


class ToyMean(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, size, bias=False)
        self.decay_logit = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        value, gate = self.in_proj(hidden_states).chunk(2, -1)
        mean, means = torch.zeros_like(value[:, 0]), []
        for row in value.unbind(1):
            mean = self.decay_logit.sigmoid() * mean + row
            means.append(mean)
        return self.out_proj(gate.sigmoid() * torch.stack(means, 1)), None


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            if kind == RECURRENT:
                layer.self_attn = ToyMean(config.hidden_size)
