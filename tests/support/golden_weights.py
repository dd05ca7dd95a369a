"""Weights of every form in every container as files hold them, with the digest of their values.

`python tests/support/golden_weights.py` adds what is missing to the file and changes no entry of it: checkpoints that
were written before have to open with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from bitsandbytes_files import CASES, Pack
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import random_weight
from torch import Tensor

from compress.checkpoint.formats import check_held
from compress.checkpoint.formats.base import CONTAINERS, Container
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.formats.exl3 import EXL3
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import GROUP_SIZES, MAX_BITS, MIN_BITS, targets
from compress.checkpoint.weights import NM, Activations, Exl3, Fp8, Int, LowRank, NMSparsity, OutlierColumns, Scheme
from compress.checkpoint.weights.base import Weight, dequantized
from compress.checkpoint.weights.low_rank import LowRankWeight
from compress.checkpoint.weights.outlier_columns import OutlierWeight, without_columns
from compress.checkpoint.weights.sparse_nm import SparseWeight
from compress.common.errors import SchemeError

FILE = Path(__file__).parents[1] / "compress" / "checkpoint" / "golden.safetensors"
MODULE = "model.layers.0.mlp.down_proj"
SHAPE = (16, 256)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": SHAPE[0],
    "intermediate_size": SHAPE[1],
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
Cases = dict[str, tuple[dict[str, object], dict[str, Tensor]]]
"""`quantization_config` and stored tensors, by container and form."""


def digests_of(checkpoint: PackedCheckpoint) -> dict[str, str]:
    """Returns the SHA-256 of the dequantized values by dtype; those of factors, as products vary with processors."""
    found = {name: _values(checkpoint, getattr(torch, name)) for name in ("float32", "bfloat16")}
    return {
        name: hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, values in found.items()
    }


def _values(checkpoint: PackedCheckpoint, dtype: torch.dtype) -> Tensor:
    weight = checkpoint.packed_weight(MODULE)
    if not isinstance(weight, LowRankWeight):
        return checkpoint.values(MODULE, dtype)
    return torch.cat([dequantized(factor, dtype).flatten() for factor in weight.parts])


def _integers() -> Iterator[Int]:
    for bits in range(MIN_BITS, MAX_BITS + 1):
        for group in (*GROUP_SIZES, None):
            for symmetric in (True, False):
                yield Int(bits, group, symmetric)
    yield Int(8, None, activations=Activations.INT8)


def _plain() -> Iterator[Weight]:
    """Yields a weight of each form that wraps no other."""
    for scheme in (*_integers(), Fp8()):
        yield random_weight(SHAPE, scheme)
    source = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) ** 3 * 0.01
    for form in targets().values():
        if form is not Int:
            yield form.target().round(source)
    for bits in (2, 3, 4, 6, 8):
        yield random_weight(SHAPE, Exl3(bits, ("3inst", "mcg", "mul1")[bits % 3]))
    for bits in (1.5, 2.5, 3.5, 4.5):
        yield random_weight(SHAPE, Exl3(bits, "mul1"))


def _wrapped() -> Iterator[Weight]:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).bfloat16()
    for pattern in (NMSparsity(2, 4), NMSparsity(4, 8), NMSparsity(1, 4)):
        kept = values.float().abs().view(SHAPE[0], -1, pattern.m).argsort(-1).argsort(-1) >= pattern.m - pattern.n
        mask = kept.view(SHAPE)
        yield SparseWeight(values * mask, NM(None, pattern))
        for inner in (Int(4, 64), Int(8, None), Int(3, 32)):
            codes = inner.round(values.float() * mask)
            yield SparseWeight(codes, NM(inner, pattern))
    for inner in (Int(4, 128), Int(3, 32, symmetric=False)):
        columns = torch.tensor([3, 77, 200], dtype=torch.int32)
        base = without_columns(random_weight(SHAPE, inner), columns)
        yield OutlierWeight(base, columns, values[:, columns.long()].contiguous(), OutlierColumns(inner, 3))
    left, right = values[:, :16].contiguous(), values.contiguous()
    yield LowRankWeight(left, right[:16], LowRank(None, 16))
    inner = Int(8, 16)
    yield LowRankWeight(inner.round(left.float()), inner.round(right[:16].float()), LowRank(inner, 16))


def _held(container: Container, scheme: Scheme) -> bool:
    try:
        check_held(container, scheme, SHAPE)
    except (SchemeError, NotImplementedError):
        return False
    return True


def _bitsandbytes() -> Cases:
    source = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)) * 0.02
    return {f"bitsandbytes {name}": _published(*case, source) for name, case in CASES.items()}


def _published(pack: Pack, entries: dict[str, object], source: Tensor) -> tuple[dict[str, object], dict[str, Tensor]]:
    tensors = {MODULE + suffix: tensor for suffix, tensor in pack(source).items()}
    return {"quant_method": "bitsandbytes", **entries}, tensors


def made_cases() -> Cases:
    """Makes a weight of every form in every container that is written."""
    cases = _bitsandbytes()
    for weight in (*_plain(), *_wrapped()):
        for container in CONTAINERS.values():
            if container in (EXL3, DENSE) or not _held(container, weight.scheme):
                continue
            name = f"{container.name} {weight.scheme}"
            config = container.quantization_config({MODULE: weight.scheme}, [])
            cases[name] = config, container.encode(MODULE, weight, torch.bfloat16)
        if isinstance(weight.scheme, Exl3):
            config = {"quant_method": "exl3", "bits": weight.scheme.bits, "codebook": weight.scheme.codebook}
            tensors = {MODULE + suffix: tensor for suffix, tensor in weight.tensors(torch.float16).items()}
            cases[f"exl3 {weight.scheme}"] = config, tensors
    return cases


def opened(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> PackedCheckpoint:
    """Writes one stored weight as a checkpoint of its own and opens it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return PackedCheckpoint.open(folder)


def recorded_cases() -> tuple[Cases, dict[str, dict[str, str]]]:
    """Reads the cases of the file and the digests of their values."""
    with safe_open(FILE, "pt") as file:
        about = json.loads(file.metadata()["cases"])
    cases: Cases = {name: (each["config"], {}) for name, each in about.items()}
    for full, tensor in load_file(FILE).items():
        name, _, tensor_name = full.rpartition(" / ")
        cases[name][1][tensor_name] = tensor
    return cases, {name: each["digests"] for name, each in about.items()}


def main() -> None:
    cases, digests = recorded_cases() if FILE.is_file() else ({}, {})
    cases = made_cases() | cases
    for name, (config, tensors) in cases.items():
        if name not in digests:
            with tempfile.TemporaryDirectory() as folder:
                digests[name] = digests_of(opened(Path(folder), config, tensors))
    about = {name: {"config": config, "digests": digests[name]} for name, (config, _) in cases.items()}
    stored = {f"{name} / {key}": each.clone() for name, (_, tensors) in cases.items() for key, each in tensors.items()}
    save_file(stored, FILE, {"cases": json.dumps(about)})
    FILE.chmod(0o644)


if __name__ == "__main__":
    main()
