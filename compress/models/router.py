"""The router of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compress.models.linear import Linear


@dataclass(frozen=True, slots=True)
class Router:
    """Choice of experts for each token, and their weights (arXiv:1701.06538, arXiv:2101.03961).

    Attributes:
        scores: one score for each expert, perhaps with a bias; stays dense.
        activation: from scores to weights; `sparsemixer` is `softmax` among the best (arXiv:2409.12136, appendix).
        normalizes: the weights of the chosen experts are divided by their sum plus `added_sum`, or by `least_sum` if
            that is more.
        bias: name of a vector that is added where experts are chosen, not to their weights; "" for none
            (arXiv:2408.15664).
        bias_is_row: that vector is stored as a matrix of one row.
        num_groups, num_chosen_groups: experts are chosen among those of the best groups, whose rank is the sum of
            their `num_ranked` best experts (arXiv:2412.19437, section 2.1.2).
        margin: with activation `sparsemixer`, how far below the best score the others count.
        weighs_inputs: weights multiply what an expert reads instead of what it gives.
        expert_scales: name of a vector of factors on the weights of each expert; "" for none.
    """

    scores: Linear
    num_chosen: int
    activation: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalizes: bool = True
    scale: float = 1.0
    bias: str = ""
    bias_is_row: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    in_float32: bool = False
    least_sum: float = 0.0
    margin: float = 0.0
    weighs_inputs: bool = False
    score_scale: float = 1.0
    expert_scales: str = ""
    num_ranked: int = 2
    added_sum: float = 0.0

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shape of its bias and of its factors by tensor name."""
        count = self.scores.out_features
        found = {self.bias: (1,) * self.bias_is_row + (count,), self.expert_scales: (count,)}
        return {name: shape for name, shape in found.items() if name}
