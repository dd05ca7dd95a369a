"""The stored forms of a weight; importing this package registers them. Free of torch until used."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from compress.checkpoint.scheme import Activations as Activations
from compress.checkpoint.scheme import Scheme as Scheme
from compress.checkpoint.weights.base import Weight as Weight
from compress.checkpoint.weights.exl3 import Exl3 as Exl3
from compress.checkpoint.weights.forms import *  # noqa: F403
from compress.checkpoint.weights.integer import Int as Int
from compress.checkpoint.weights.low_rank import LowRank as LowRank
from compress.checkpoint.weights.outlier_columns import OutlierColumns as OutlierColumns
from compress.checkpoint.weights.rotated_inputs import RotatedInputs as RotatedInputs
from compress.checkpoint.weights.sparse_nm import NM as NM
from compress.checkpoint.weights.sparse_nm import NMSparsity as NMSparsity

for _module in iter_modules(__path__):  # noqa: F405
    import_module(f"{__name__}.{_module.name}")
