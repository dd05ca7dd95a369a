"""The kinds of stages, and how a recipe file spells them."""

from __future__ import annotations

from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

Stage = QuantizeStage | PruneStage | FactorizeStage

STAGE_NAMES = {QuantizeStage: "quantize", PruneStage: "prune", FactorizeStage: "factorize"}
