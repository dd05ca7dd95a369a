"""The lightning indexer of DeepSeek sparse attention (arXiv:2512.02556, section 2.1), which chooses the tokens that a
token sees."""

from __future__ import annotations

from dataclasses import dataclass

from compress.models.config import Config, positive
from compress.models.linear import Linear
from compress.models.norm import Norm

KEY_NORM_EPS = 1e-6
"""Eps of the norm of index keys."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """A few small heads with one key for all of them, whose weighted sum of scores ranks the earlier tokens.

    Attributes:
        num_heads, head_dim: index heads, and channels D of each; the first ones rotate, as many as those of attention.
        num_chosen: tokens that a token sees at most.
        query: reads the normalized latent of queries.
        key: gives the index key, which is kept of every token; reads what attention reads.
        weights: gives the weight of every head, reads what attention reads, and stays dense: a rounded one chooses
            other tokens.
        interleaved: channels 2i and 2i + 1 rotate as a pair, see `Rope`.
    """

    num_heads: int
    head_dim: int
    num_chosen: int
    query: Linear
    key: Linear
    weights: Linear
    norm: Norm
    interleaved: bool = False


def lightning_indexer(config: Config, interleaved: bool = False) -> Indexer:
    """Composes the indexer named as in DeepSeek-V3.2. Raises CheckpointError where queries have no latent."""
    hidden, rank = positive(config, "hidden_size"), positive(config, "q_lora_rank")
    heads, head_dim = positive(config, "index_n_heads"), positive(config, "index_head_dim")
    name = "self_attn.indexer"
    return Indexer(
        heads,
        head_dim,
        positive(config, "index_topk"),
        Linear(f"{name}.wq_b", heads * head_dim, rank),
        Linear(f"{name}.wk", head_dim, hidden),
        Linear(f"{name}.weights_proj", heads, hidden),
        Norm(f"{name}.k_norm", head_dim, KEY_NORM_EPS, centered=True, bias=True),
        interleaved,
    )
