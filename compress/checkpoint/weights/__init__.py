"""The stored forms of a weight, one file each; importing this package registers them. Free of torch until used."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from compress.checkpoint.scheme import Activations, Scheme
from compress.checkpoint.weights.base import Weight
from compress.checkpoint.weights.block_fp8 import BlockFp8
from compress.checkpoint.weights.bnb4 import Bnb4
from compress.checkpoint.weights.codebooks import Nf4
from compress.checkpoint.weights.exl3 import Exl3
from compress.checkpoint.weights.fp8 import Fp8
from compress.checkpoint.weights.integer import Int
from compress.checkpoint.weights.k_quants import Q2K, Q3K, Q4K, Q5K, Q6K
from compress.checkpoint.weights.legacy_blocks import Q4Minima, Q5Minima
from compress.checkpoint.weights.low_rank import LowRank
from compress.checkpoint.weights.mxfp4 import Mxfp4
from compress.checkpoint.weights.mxfp8 import Mxfp8
from compress.checkpoint.weights.nonlinear import Iq4Nl
from compress.checkpoint.weights.nvfp4 import Nvfp4
from compress.checkpoint.weights.outlier_columns import OutlierColumns
from compress.checkpoint.weights.sparse_nm import NM, NMSparsity

__all__ = [
    "NM",
    "Q2K",
    "Q3K",
    "Q4K",
    "Q5K",
    "Q6K",
    "Activations",
    "BlockFp8",
    "Bnb4",
    "Exl3",
    "Fp8",
    "Int",
    "Iq4Nl",
    "LowRank",
    "Mxfp4",
    "Mxfp8",
    "NMSparsity",
    "Nf4",
    "Nvfp4",
    "OutlierColumns",
    "Q4Minima",
    "Q5Minima",
    "Scheme",
    "Weight",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
