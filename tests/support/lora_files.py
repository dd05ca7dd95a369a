"""Adapters in PEFT's files, written without PEFT, and what they add to weights."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights.base import dequantized
from compress.models.spec import ModelSpec
from runtime.adapters.store import open_adapters
from runtime.core.config import RuntimeConfig
from runtime.core.request import RequestOptions, SamplingParams
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

ALPHA = 3
ALWAYS = {"peft_type": "LORA", "lora_alpha": ALPHA, "bias": "none", "init_lora_weights": True}


def save_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int = 2, seed: int = 0, size: float = 0.3, **more: Any
) -> Path:
    """Writes random factors for modules `[O, I]`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (rows, columns) in shapes.items():
        for name, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            tensors[f"base_model.model.{module}.{name}.weight"] = torch.randn(shape, generator=generator) * size
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({module.rpartition(".")[2] for module in shapes})
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": names, **ALWAYS, **more}))
    return folder


def deltas_of(folder: Path) -> dict[str, Tensor]:
    """Products that the adapter of `save_adapter` adds to each weight, in float64."""
    tensors = {name: tensor.double() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    rank = json.loads((folder / "adapter_config.json").read_text())["r"]
    ends = ".lora_A.weight", ".lora_B.weight"
    modules = [name.removesuffix(ends[0]) for name in tensors if name.endswith(ends[0])]
    return {
        module.removeprefix("base_model.model."): tensors[module + ends[1]] @ tensors[module + ends[0]] * ALPHA / rank
        for module in modules
    }


def shapes_of(spec: ModelSpec, modules: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Shapes of linears by name."""
    return {linear.name: linear.shape for linear in spec.linears() if linear.name in set(modules)}


def adapted_engine(folder: Path, adapters: Mapping[str, Path], **options: Any) -> Engine:
    """An engine in float64 with blocks of four tokens."""
    config = RuntimeConfig(**({"block_size": 4, "num_blocks": 200, "enable_lora": True, "seed": 1} | options))
    decoder = load_model(folder, dtype="float64")
    runner = build_runner(decoder, config)
    assert runner.adapters is not None
    engine = Engine(
        runner,
        None,
        config,
        adapters=open_adapters(decoder.config.spec, decoder.dtype, runner.adapters.modules, config),
    )
    for name, path in adapters.items():
        engine.adapters.load(name, path)
    return engine


def merged_engine(folder: Path, adapter: Path | None, **options: Any) -> Engine:
    """An engine whose weights, dequantized, have an adapter added to them."""
    deltas, read = {} if adapter is None else deltas_of(adapter), PackedCheckpoint.weight

    def weight(self: PackedCheckpoint, module: str) -> Any:
        found = read(self, module)
        return found if module not in deltas else dequantized(found, torch.float64) + deltas[module]

    config = RuntimeConfig(**({"block_size": 4, "num_blocks": 200, "seed": 1} | options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedCheckpoint, "weight", weight)
        decoder = load_model(folder, dtype="float64")
    return Engine(build_runner(decoder, config), None, config)


GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=3)


def answers(
    engine: Engine, requests: Iterable[tuple[str, list[int]]], sampling: SamplingParams = GREEDY
) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities of requests that name an adapter each, all at once. None of them fails."""
    names = [
        engine.add_request(prompt, sampling, None, RequestOptions(adapter=adapter)) for adapter, prompt in requests
    ]
    found: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in names}
    while engine.has_work:
        for delta in engine.step():
            assert not delta.error, delta.error
            tokens, logprobs = found[delta.request_id]
            tokens.extend(delta.token_ids)
            logprobs.extend(each.logprob for each in delta.logprobs)
        engine.scheduler.check()
    return [found[name] for name in names]
