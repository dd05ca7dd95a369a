"""Attention sinks and a window, token by token and by definition: the oracle of the streaming attention.

Each layer keeps a list of keys that are not rotated. In every step the tokens that stay are numbered again from 0, keys
and query are rotated by these numbers, and a plain softmax follows. Nothing is shared with the runtime.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel


def rotate(heads: Tensor, positions: Tensor, model: PreTrainedModel) -> Tensor:
    """`[n, heads, D]` at positions `[n]`, with angles in float64."""
    embedding = model.model.rotary_emb
    angles = positions.double()[:, None] * embedding.inv_freq.double()
    cos, sin = (
        torch.cat((f(angles), f(angles)), -1)[:, None] * embedding.attention_scaling for f in (torch.cos, torch.sin)
    )
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


class NaiveStream:
    """One sequence of a float64 model of transformers."""

    def __init__(self, model: PreTrainedModel, sinks: int, window: int) -> None:
        self.model, self.sinks, self.window = model, sinks, window
        self.kept: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in model.model.layers]

    @torch.no_grad()
    def push(self, token: int) -> Tensor:
        """Logits `[V]` after one more token."""
        hidden = self.model.model.embed_tokens(torch.tensor([token]))
        for layer, (keys, values) in zip(self.model.model.layers, self.kept, strict=True):
            hidden = hidden + self._attend(layer.self_attn, layer.input_layernorm(hidden), keys, values)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.model.lm_head(self.model.model.norm(hidden))[0]

    def _attend(self, attention: torch.nn.Module, hidden: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        query, key, value = (
            getattr(attention, f"{name}_proj")(hidden).view(-1, attention.head_dim) for name in ("q", "k", "v")
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        keys.append(key)
        values.append(value)
        if len(keys) > self.sinks + self.window:
            del keys[self.sinks], values[self.sinks]
        positions = torch.arange(len(keys))
        rotated = rotate(torch.stack(keys), positions, self.model)
        query = rotate(query[None], positions[-1:], self.model)[0]
        shared = len(query) // rotated.shape[1]
        output = []
        for head, vector in enumerate(query):
            weights = (rotated[:, head // shared] @ vector * attention.scaling).softmax(0)
            output.append(weights @ torch.stack(values)[:, head // shared])
        return attention.o_proj(torch.cat(output))[None]


def naive_logits(model: PreTrainedModel, tokens: list[int], sinks: int, window: int) -> Tensor:
    """Logits `[T, V]` of a stream of tokens."""
    stream = NaiveStream(model, sinks, window)
    return torch.stack([stream.push(token) for token in tokens])
