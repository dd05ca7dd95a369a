"""End tokens: whether a packed model ends answers, and reasoning, where its dense model does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.common.evaluation import Finding
from compress.evaluate.figures.base import FIGURES, MeasuredFigure

if TYPE_CHECKING:
    from torch import Tensor

    from compress.evaluate.side import Side


@dataclass(frozen=True, slots=True)
class Ends:
    """End tokens at each place of an answer, all answers one after the other.

    Attributes:
        names: of the kinds of end: the end of the sequence, and the closing mark of reasoning where it is a token.
        first: int64 `[N]`, the kind of the most likely token; -1 for one that ends nothing.
        probability: float32 `[kinds, N]`.
    """

    names: tuple[str, ...]
    first: Tensor
    probability: Tensor


class EndTokens(MeasuredFigure):
    """Recall of the places at which an end token is the most likely one of the dense model.

    The text is that of bundled questions with answers, so that both models read the same.
    """

    help = "share of the places where the dense model ends an answer at which the packed one does"
    word = "at least"
    usual = 0.9

    def observe(self, side: Side) -> Ends:
        import torch

        from compress.evaluate.prompts import reasoning_of, written_exchanges

        kinds = {"end of sequence": sorted(side.config.eos_token_ids)}
        if reasoning := reasoning_of(side.tokenizer):
            closing = side.tokenizer.encode(reasoning.closing, add_special_tokens=False)
            kinds |= {reasoning.closing: closing} if len(closing) == 1 else {}
        written = list(written_exchanges(side.tokenizer))
        texts = [torch.tensor(tokens) for tokens, _ in written]
        places = [slice(start - 1, None) for _, start in written]
        first, probability = [], []
        for logp in side.log_probabilities(texts, places):
            best = logp.argmax(-1)
            kind = torch.full_like(best, -1)
            for index, ids in enumerate(kinds.values()):
                kind[torch.isin(best, torch.tensor(ids))] = index
            first.append(kind)
            probability.append(torch.stack([logp[:, ids].exp().sum(-1) for ids in kinds.values()]).float())
        return Ends(tuple(kinds), torch.cat(first), torch.cat(probability, 1))

    def judge(self, dense: Ends, packed: Ends) -> Finding:
        found = {name: _recall(dense, packed, index) for index, name in enumerate(dense.names)}
        places = sum(each["places"] for each in found.values())
        if not places:
            return Finding.nothing("an end is the most likely token of the dense model at no place")
        kept = sum(each["kept"] for each in found.values())
        false = int(((packed.first >= 0) & (dense.first != packed.first)).sum())
        text = ", ".join(
            f"{name}: {each['kept']} of {each['places']}, probability {each['dense']:.3f} -> {each['packed']:.3f}"
            for name, each in found.items()
            if each["places"]
        )
        text += f"; {false} ends at other places"
        return Finding(kept / places, text, details={"kinds": found, "false_ends": false})


def _recall(dense: Ends, packed: Ends, kind: int) -> dict[str, float]:
    """Returns the number of places of a kind of end, of those that are kept, and mean probabilities there."""
    there = dense.first == kind
    count = int(there.sum())
    means = {
        name: float(side.probability[kind, there].mean()) if count else 0.0
        for name, side in (("dense", dense), ("packed", packed))
    }
    return {"places": count, "kept": int((packed.first[there] == kind).sum()), **means}


FIGURES.register("ends", order=10)(EndTokens())
