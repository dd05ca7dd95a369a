"""Moving a channel scale from one side of an activation to the other: `W x = (W s)(x / s)`.

The producer's output is divided by s, its readers' columns are multiplied by s. The producer is a norm, or a linear
whose output reaches the readers without mixing channels: up_proj to down_proj (the product with the gate is
elementwise), v_proj to o_proj (attention mixes tokens, not channels).
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_norm(norm: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Divides a norm's weight `[I]` by `scale [I]`.

    Returns the weight in its own dtype, and the scale this rounded weight undoes exactly: the one for the readers.
    """
    divided = (norm.float() / scale).to(norm.dtype)
    undone = norm.float() / divided.float()
    return divided, torch.where(torch.isfinite(undone) & (undone > 0), undone, scale)


def scale_outputs(weight: Tensor, scale: Tensor) -> Tensor:
    """Divides the outputs of a linear, its `weight [O, I]` or `bias [O]`, by `scale [O]`; same dtype out."""
    divisor = scale.unsqueeze(-1) if weight.dim() == 2 else scale
    return (weight.float() / divisor).to(weight.dtype)


def scale_inputs(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiplies the columns of `weight [O, I]` by `scale [I]`; same dtype out."""
    return (weight.float() * scale).to(weight.dtype)


def share_across_heads(scale: Tensor, heads_per_group: int, head_dim: int) -> Tensor:
    """Ties the scale of o_proj's input `[query_heads * head_dim]` across query heads that read one key-value head.

    With grouped queries, v_proj's output channel d of a key-value head feeds channel d of all its query heads, so
    these can only share one factor: their geometric mean. The fold is then exact for any grouping; with one query
    head each nothing changes.
    """
    if heads_per_group == 1:
        return scale
    heads = scale.view(-1, heads_per_group, head_dim)
    return heads.log().mean(1, keepdim=True).exp().expand_as(heads).reshape(-1)


def one_per_value_head(scale: Tensor, heads_per_group: int, head_dim: int) -> Tensor:
    """The tied scale `[query_heads * head_dim]` as v_proj sees it: `[value_heads * head_dim]`."""
    return scale.view(-1, heads_per_group, head_dim)[:, 0].reshape(-1)
