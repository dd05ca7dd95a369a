"""Finished work as it goes to disk: the tensors of a piece, and the facts that stand beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.digest import digest
from compress.checkpoint.formats.table import format_for
from compress.pipeline.block_job import BlockOutcome
from compress.pipeline.prepare import Prepared
from compress.report import environment


def stored_form(prepared: Prepared, outcome: BlockOutcome) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by full name, and what happened, with the scheme and the digest of every weight.

    Raises:
        SchemeError: a weight that the format of this plan cannot hold.
    """
    model_dtype = getattr(torch, prepared.plan.scale_dtype)
    codec = format_for(prepared.plan.schemes)
    tensors = outcome.dense | outcome.pruned
    for module, weight in outcome.weights.items():
        tensors |= codec.encode(module, weight, model_dtype)
    facts = outcome.facts() | {
        "schemes": {module: weight.scheme.to_dict() for module, weight in outcome.weights.items()},
        "digests": {name: digest(weight) for name, weight in (outcome.weights | outcome.pruned).items()},
        "environment": environment(prepared),
    }
    return tensors, facts
