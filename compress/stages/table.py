"""The kinds of stages, and how a recipe file spells them."""

from __future__ import annotations

from compress.stages.factorize import FactorizeStage
from compress.stages.kv_cache import KVCacheStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

TensorStage = QuantizeStage | PruneStage | FactorizeStage
"""Stages that change tensors."""
Stage = TensorStage | RotateStage | KVCacheStage

STAGE_NAMES = {
    RotateStage: "rotate",
    QuantizeStage: "quantize",
    PruneStage: "prune",
    FactorizeStage: "factorize",
    KVCacheStage: "kv_cache",
}
