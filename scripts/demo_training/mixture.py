"""The demo mixture: experts cut from the MLPs of a trained dense model (sparse upcycling, arXiv:2212.05055)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel

NUM_EXPERTS, NUM_CHOSEN, INNER = 8, 2, 128
BALANCE = 0.01
"""Weight of the balance loss, that of Switch transformers (arXiv:2101.03961, section 2.2)."""


class Expert(nn.Module):
    """A gated MLP, with the names that Mixtral has on disk."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)


class Mixture(nn.Module):
    """Experts that are all computed for all tokens: at this size it is faster than to gather rows, and it compiles."""

    def __init__(self, hidden: int, inner: int = INNER, count: int = NUM_EXPERTS, chosen: int = NUM_CHOSEN) -> None:
        super().__init__()
        self.chosen, self.inner = chosen, inner
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Computes `[..., H]` of `x [..., H]`."""
        probabilities = self.gate(x).float().softmax(-1)
        weights, indices = probabilities.topk(self.chosen, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, indices, weights / weights.sum(-1, keepdim=True))
        inner = functional.silu(x @ self._side_by_side("w1").T) * (x @ self._side_by_side("w3").T)
        inner = inner * weights.to(inner.dtype).repeat_interleave(self.inner, -1)
        down = torch.cat([expert.w2.weight for expert in self.experts], 1)
        return _AddLoss.apply(inner @ down.T, BALANCE * balance_loss(probabilities, weights > 0))

    def _side_by_side(self, name: str) -> Tensor:
        return torch.cat([getattr(expert, name).weight for expert in self.experts])


def balance_loss(probabilities: Tensor, used: Tensor) -> Tensor:
    """Computes 1 where experts are chosen equally often, and more where some are preferred.

    Args:
        probabilities: `[..., E]` of the router.
        used: bool `[..., E]`, the chosen experts.
    """
    shares = used.float().flatten(0, -2).mean(0)
    return len(shares) * (shares / shares.sum() * probabilities.flatten(0, -2).mean(0)).sum()


class _AddLoss(torch.autograd.Function):
    """Returns `x`, and gives a further loss the gradient of 1 in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, loss: Tensor) -> Tensor:
        context.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), dtype=context.dtype, device=gradient.device)


def upcycled(dense: PreTrainedModel, seed: int) -> nn.Module:
    """Replaces the MLPs of a trained Llama by mixtures whose experts are channels of them."""
    dense.config = mixture_config(dense.config)
    for layer in dense.model.layers:
        layer.mlp = cut(layer.mlp, torch.Generator().manual_seed(seed))
    return dense


@torch.no_grad()
def cut(mlp: nn.Module, generator: torch.Generator) -> Mixture:
    """Cuts an MLP of I channels into experts that take turns around its channels in a random order.

    Two experts of weight 1/2 each are as large as the channels they hold, so `w2` is doubled.
    """
    size, hidden = mlp.gate_proj.weight.shape
    mixture, order = Mixture(hidden), torch.randperm(size, generator=generator)
    mixture.gate.weight.normal_(0.0, 0.02, generator=generator)
    for index, expert in enumerate(mixture.experts):
        channels = order[torch.arange(index * INNER, (index + 1) * INNER) % size]
        expert.w1.weight.copy_(mlp.gate_proj.weight[channels])
        expert.w3.weight.copy_(mlp.up_proj.weight[channels])
        expert.w2.weight.copy_(NUM_CHOSEN * mlp.down_proj.weight[:, channels])
    return mixture


def mixture_config(dense: LlamaConfig) -> MixtralConfig:
    """Describes the mixture for the exported checkpoint."""
    kept = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id",
        "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return MixtralConfig(
        **{key: getattr(dense, key) for key in kept},
        intermediate_size=INNER,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        sliding_window=None,
        architectures=["MixtralForCausalLM"],
    )


def stored_name(name: str) -> str:
    """Name on disk of a parameter of the model in training."""
    return name.replace(".mlp.gate.", ".block_sparse_moe.gate.").replace(".mlp.experts.", ".block_sparse_moe.experts.")
