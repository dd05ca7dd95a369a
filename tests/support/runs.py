"""Short runs of the pipeline on small models, and what holds of every checkpoint that they write."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.writer import export_checkpoint
from compress.common.cli import demo_model_path
from compress.common.evaluation import Evaluation
from compress.cpu.binding import library
from compress.evaluate.perplexity import cut_windows, evaluate
from compress.evaluate.scorers import RuntimeScorer
from compress.pipeline.prepare import RunContext, RunRequest, prepare
from compress.pipeline.run import RunResult, run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.base import Stage
from runtime.backends.base import Target
from runtime.backends.registry import is_fast
from runtime.core.model_config import parse_config
from runtime.memory.estimate import Weights

SMALL = CalibrationOptions(samples=6, length=48)
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def prepared(
    model: Path, out: Path, *stages: Stage, calibration: CalibrationOptions = SMALL, seed: int = 0, **options: Any
) -> RunContext:
    """A run whose quality is not measured unless that is asked for."""
    recipe = Recipe(stages, calibration, seed)
    return prepare(RunRequest(model, str(model), recipe, out, **{"measure": False} | options))


def compress(model: Path, out: Path, *stages: Stage, **options: Any) -> RunResult:
    return run(prepared(model, out, *stages, **options), quiet=True)


def num_forms() -> int:
    """Number of formats of activations in which the check after compression measures packed integers here."""
    return 2 if library() is not None and is_fast(torch.bfloat16) and not torch.cuda.is_available() else 1


def same_bytes(left: Path, right: Path) -> bool:
    return (left / "model.safetensors").read_bytes() == (right / "model.safetensors").read_bytes()


def some_tokens(count: int = 32) -> torch.Tensor:
    return torch.randint(10, 4000, (1, count), generator=torch.Generator().manual_seed(0))


def assert_served_as_exported(packed: Path, dense: Path) -> None:
    """The dense export rounds numbers to the model's dtype, and is nothing but dense."""
    served = RuntimeScorer(packed, dtype="float32").logits(some_tokens())
    export_checkpoint(packed, "dense", dense)
    assert not PackedCheckpoint.open(dense).schemes
    exported = RuntimeScorer(dense, dtype="float32").logits(some_tokens())
    torch.testing.assert_close(exported, served, rtol=0, atol=0.06)


def foreseen_bytes(packed: Path, dtype: torch.dtype = torch.bfloat16, kernels: str = "auto") -> int:
    """Bytes of prepared weights by the estimate that loads nothing."""
    checkpoint, target = PackedCheckpoint.open(packed), Target(torch.device("cpu"), dtype)
    return Weights(checkpoint, parse_config(checkpoint.config, {}), target, kernels, 2**40).prepared()


def compared_with(dense: Path, packed: Path, tokens: int, length: int = 256) -> Evaluation:
    """Evaluates a checkpoint against the dense model, on other text than that of the calibration."""
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(demo_model_path()), length=length, max_tokens=tokens)
    packed_scorer, dense_scorer = (RuntimeScorer(path, dtype="float32") for path in (packed, dense))
    return evaluate(packed_scorer, windows, dense_scorer)


def with_outliers(source: Path, folder: Path, channels: list[int], factor: float) -> Path:
    """The same function with outlier channels after the norms of each block, as large models have them: the weights
    that read them are smaller. Powers of two keep it exactly the same."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.rpartition(".")[0].endswith(tuple(READERS))]:
        block, norm = name.removesuffix(".weight").rsplit(".", 1)
        tensors[name][channels] *= factor
        for reader in READERS[norm]:
            tensors[f"{block}.{reader}.weight"][:, channels] /= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
