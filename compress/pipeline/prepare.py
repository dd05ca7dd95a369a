"""Inputs of a run, opened and validated before it starts; printed by `--dry-run`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from calibration.sequences import SequenceSet, check_token_ids, load_tokenizer, pack_parts, separator_token
from calibration.sources import sample_sequences
from compress.checkpoint.config import dtype_name, quantization_block, read_config
from compress.checkpoint.dequantized import open_source, working_bytes
from compress.checkpoint.meta_model import auto_class, no_loading_bar
from compress.checkpoint.reader import stores_other_head
from compress.checkpoint.safetensors import TensorFiles
from compress.checkpoint.verify import parts_of_weights
from compress.common.device import resolve_devices
from compress.common.errors import CheckpointError, DataError, ToolkitError
from compress.common.files import check_out_folder
from compress.common.workers import Workers
from compress.make_plan import make_plan
from compress.models.config import context_length
from compress.models.registry import find_family
from compress.models.spec import ModelSpec
from compress.pipeline.expert_inputs import TOKENS_PER_CHANNEL
from compress.pipeline.memory import Peak, estimate_peak, first_micro_batch, return_freed_memory
from compress.pipeline.resume import RunDisplay
from compress.pipeline.rotated_source import RotatedSource
from compress.pipeline.skeleton import Skeleton, open_skeleton
from compress.pipeline.smaller_source import SmallerSource
from compress.plan import Plan
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.kv_cache import KVCacheStage
from compress.stages.mtp import MtpStage
from compress.stages.rotate import RotateStage
from compress.stages.shrink import ShrinkStage


@dataclass(frozen=True, slots=True)
class SourceModel:
    """Dense source model, with device and dtype of computation."""

    path: Path
    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False


def calibration_sequences(
    options: CalibrationOptions, source: SourceModel, seed: int, dry_run: bool = False
) -> SequenceSet:
    """Returns packed sequences of the text or mixture in `options`. Raises ToolkitError: the text is not usable, or
    memory is insufficient for sampling from the model. `dry_run`: use zeros instead of sampling text from the model."""
    tokenizer = load_tokenizer(source.path)
    sequences = pack_parts(
        options.parts,
        tokenizer,
        samples=options.samples,
        length=options.length,
        seed=seed,
        sampler=None if dry_run else partial(_write, source, tokenizer),
    )
    check_token_ids(sequences.tokens, read_config(source.path), source.path)
    return sequences


def _write(source: SourceModel, tokenizer: Any, prompts: Tensor, length: int, seed: int) -> Tensor:
    """Returns text sampled from the whole dense model, which is in memory during sampling only."""
    if prompts.numel():
        check_token_ids(prompts, read_config(source.path), source.path)
    _require_memory(source)
    with RunDisplay(1, unit="calibration text") as display:
        display.say(f"sampling {len(prompts)} sequences of {length} tokens from the model itself")
        model = _load(source)
        tokens = sample_sequences(
            model,
            prompts,
            length,
            start=separator_token(tokenizer),
            ends=_end_tokens(model, tokenizer),
            seed=seed,
            on_progress=lambda done, total: display.step("sampling", done / total),
        )
        display.finish(f"sampled {tokens.numel()} tokens")
    del model
    return_freed_memory()
    if source.device.type == "cuda":
        torch.cuda.empty_cache()
    return tokens


def _load(source: SourceModel) -> Any:
    config = read_config(source.path)
    if quantization_block(config):
        from compress.evaluate.scorers import load_dequantized

        with no_loading_bar():
            return load_dequantized(source.path, dtype=str(source.dtype).removeprefix("torch.")).to(source.device)
    try:
        with no_loading_bar():
            model = auto_class(config["model_type"]).from_pretrained(
                source.path, dtype=source.dtype, trust_remote_code=source.trust_remote_code, local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        problem = f"{source.path} cannot be loaded to write its calibration text ({reason})"
        raise CheckpointError(problem, "Calibrate on a text instead of self") from error
    return model.to(source.device).eval()


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = generation if isinstance(generation, list) else [generation]
    return {token for token in (*ends, getattr(tokenizer, "eos_token_id", None)) if token is not None}


def _require_memory(source: SourceModel) -> None:
    """Raises ToolkitError if memory is insufficient for sampling, which loads the whole dense model."""
    from compress.common.device import require_memory

    files, _ = open_source(source.path)
    needed = source.dtype.itemsize * sum(math.prod(files.shape(name)) for name in files.names())
    remedy = "Calibrate on a text instead of self, or on a machine with more memory"
    require_memory("text from the model itself needs the whole model", needed, source.device, remedy)


DTYPES = ("auto", "bfloat16", "float16", "float32")


def pick_dtype(name: str, model_dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of the forward passes; `auto` is the model's own if the device supports it natively, else
    float32. Raises ToolkitError: the dtype is not supported."""
    if name not in DTYPES:
        raise ToolkitError.unknown("dtype", name, DTYPES, "Use --dtype")
    if name == "auto":
        is_native = device.type == "cuda" or (model_dtype == "bfloat16" and _has_native_bfloat16())
        name = model_dtype if is_native else "float32"
    return cast(torch.dtype, getattr(torch, name))


def _has_native_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Request to compress a model.

    Attributes:
        model: folder of the dense model.
        devices: one device, or several separated by commas; see `resolve_devices`.
        source: recorded name of the source: `demo`, or the absolute path.
        micro_batch: sequences per forward pass; 0 is automatic.
        measure: whether to measure perplexity and KL at the end, with the whole dense and packed models in memory.
        command: command line of the run, for its report; empty without one.
        figures: names of the figures to measure at the end beyond quality, see `compress.evaluate.figures`.
    """

    model: Path
    source: str
    recipe: Recipe
    out: Path
    devices: str = "auto"
    dtype: str = "auto"
    restart: bool = False
    trust_remote_code: bool = False
    micro_batch: int = 0
    measure: bool = True
    tokens_per_channel: int = TOKENS_PER_CHANNEL
    command: str = ""
    figures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunContext:
    """Request with all inputs resolved.

    Attributes:
        sequences: calibration tokens; None if the recipe needs none.
        disk: bytes needed on the disk of the output during the run.
        dense: source of a shrink stage, of which `files`, `config` and `skeleton` are a part.
    """

    request: RunRequest
    config: dict[str, Any]
    files: TensorFiles
    skeleton: Skeleton
    plan: Plan
    workers: Workers
    dtype: torch.dtype
    sequences: SequenceSet | None
    micro_batch: int
    peak: Peak
    disk: int
    has_tokenizer: bool = True
    dense: SmallerSource | None = None

    @property
    def peak_memory(self) -> int:
        """Estimated peak bytes of the run, host and first device together."""
        return self.peak.host + self.peak.device

    @property
    def device(self) -> torch.device:
        """Device of what is not shared out among the workers."""
        return self.workers.device

    @property
    def tokens(self) -> Tensor:
        """Calibration tokens `[N, L]`, int64. Raises ValueError if the recipe needs none."""
        if self.sequences is None:
            raise ValueError("this recipe needs no calibration")
        return self.sequences.tokens

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the model, in which scales and unquantized values are stored."""
        return cast(torch.dtype, getattr(torch, self.plan.scale_dtype))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the plan and on the calibration text."""
        return self.plan.notes + (self.sequences.warnings if self.sequences else ())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for `--dry-run --json`."""
        return {
            "model": str(self.request.model),
            "source": self.request.source,
            "out": str(self.request.out),
            "recipe": self.request.recipe.to_dict(),
            "calibration": describe_calibration(self.request.recipe, self.sequences),
            "devices": str(self.workers),
            "dtype": str(self.dtype).removeprefix("torch."),
            "micro_batch": self.micro_batch,
            "peak_memory_bytes": self.peak_memory,
            "disk_bytes": self.disk,
            **self.plan.to_dict(),
        }


def prepare(request: RunRequest, dry_run: bool = False) -> RunContext:
    """Opens and validates all inputs, including the calibration text; writes nothing, and reads no weights unless
    calibration text is sampled from the source model. Raises ToolkitError: a problem that would make the run fail and
    can be detected in advance. `dry_run`: plan only: use zeros instead of text sampled from the model, and note an
    unusable output folder."""
    obstacles = _obstacles(request.out, dry_run)
    workers = Workers(resolve_devices(request.devices))
    device = workers.device
    files, config = open_source(request.model)
    _check_names(request.model, files)
    source_notes, working = [*files.notes], working_bytes(files.packed) if files.packed else 0
    if config.get("tie_word_embeddings") and stores_other_head(files):
        # transformers does not tie them either, and warns.
        config = config | {"tie_word_embeddings": False}
        source_notes += ["the stored output head differs from the embedding that config.json ties it to: both are kept"]
    skeleton = open_skeleton(request.model, config, request.trust_remote_code)
    rotated = dense = None
    removed_bytes = 0
    if shrinking := request.recipe.find(ShrinkStage):
        dense = SmallerSource(files, config, skeleton)
        planned = dense.planned(shrinking)
        files, config, skeleton, removed_bytes = planned.files, planned.config, planned.skeleton, planned.removed_bytes
        source_notes.append("what leaves is chosen in the run: the plan shows the last blocks and parts in its place")
    if stage := request.recipe.find(RotateStage):
        rotated = RotatedSource.of(files, config, skeleton, stage, request.recipe.seed, request.trust_remote_code)
        files, config, skeleton = rotated.files, rotated.config, rotated.skeleton
        working += rotated.working_bytes()
    model_dtype = _model_dtype(config, files)
    plan = make_plan(skeleton, files, request.recipe, model_dtype)
    plan = rotated.marked(plan) if rotated else plan
    lacking = [] if request.recipe.needs_calibration else _no_tokenizer(request.model)
    notes = (*obstacles, *source_notes, *plan.notes, *lacking)
    plan = replace(plan, notes=notes, removed_bytes=removed_bytes)
    dtype = pick_dtype(request.dtype, model_dtype, device)
    if dense is not None and shrinking is not None:
        working += dense.working_bytes(shrinking, dtype.itemsize)
    sequences = _calibration(request, config, device, dtype, dry_run) if request.recipe.needs_calibration else None
    count, length = sequences.tokens.shape if sequences else (0, 1)
    micro_batch = request.micro_batch or min(first_micro_batch(length, device.type), max(count, 1))
    # Each GPU has its own memory.
    in_memory = len(workers.all) if device.type == "cpu" else 1
    peak = estimate_peak(skeleton, plan, count, length, micro_batch, dtype.itemsize, in_memory)
    peak = peak._replace(host=peak.host + working)
    if (cache := request.recipe.find(KVCacheStage)) and cache.candidates:
        _check_measurable(request.model, config, plan, device, cache, cache.window_length(context_length(config)))
    if head := request.recipe.find(MtpStage):
        head_of(config, files)
        _check_measurable(request.model, config, plan, device, head, head.max_seq_length)
    streams = 2 if plan.needs.dense_model else 1
    disk = _disk_bytes(files, plan, streams * count * length * skeleton.model.config.hidden_size * dtype.itemsize)
    return RunContext(
        request, config, files, skeleton, plan, workers, dtype, sequences, micro_batch, peak, disk, not lacking, dense
    )


def _check_names(model: Path, files: TensorFiles) -> None:
    """Raises CheckpointError for tensors that the result would take for parts of packed weights."""
    taken = [name for name in files.names() if name.endswith(parts_of_weights()) and name not in files.other_parts]
    if taken:
        raise CheckpointError(
            f"{len(taken)} tensors of {model} have names of parts of packed weights, {taken[0]} first, but the "
            "quantization_config of config.json does not explain them",
            "Take config.json and the weights from one revision, or use the dense model",
        )


def _obstacles(out: Path, dry_run: bool) -> list[str]:
    """Returns a note for a dry run if the output folder cannot be written. Raises CheckpointError for a run."""
    try:
        check_out_folder(out)
    except CheckpointError as error:
        if not dry_run:
            raise
        return [f"a run without --dry-run stops here: {error}"]
    return []


def _no_tokenizer(model: Path) -> list[str]:
    """Returns a note if the folder has no tokenizer, which rounding alone does not need."""
    try:
        load_tokenizer(model)
    except DataError as error:
        return [f"{error.problem}: quality is not measured, and the result cannot be served without one"]
    return []


def source_identity(context: RunContext) -> dict[str, Any]:
    """Returns the identity of the source: its files, and their quantization, if any."""
    files, stored = [file.path for file in context.files.files], context.files.packed
    return {
        "source": context.request.source,
        "weights": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
        **({"quantization": quantization_block(stored.config)} if stored else {}),
    }


def describe_calibration(recipe: Recipe, sequences: SequenceSet | None) -> dict[str, Any] | None:
    """Returns text, size and hashes of the calibration; None without calibration."""
    if sequences is None:
        return None
    return {
        "source": sequences.source,
        "description": sequences.description,
        "sha256": sequences.sha256 or None,
        "token_sha256": sequences.token_sha256 if sequences.sha256 else None,
        "parts": [asdict(part) for part in sequences.parts],
        "samples": recipe.calibration.samples,
        "sequences": len(sequences.tokens),
        "length": sequences.tokens.shape[1],
        "tokens": sequences.num_tokens,
        "warnings": list(sequences.warnings),
    }


def _calibration(
    request: RunRequest, config: dict[str, Any], device: torch.device, dtype: torch.dtype, dry_run: bool
) -> SequenceSet:
    """Returns the calibration tokens, in sequences within the model's context."""
    options = request.recipe.calibration
    length = min(options.length, context_length(config) or options.length)
    source = SourceModel(request.model, device, dtype, request.trust_remote_code)
    found = calibration_sequences(replace(options, length=length), source, request.recipe.seed, dry_run)
    if length == options.length:
        return found
    cut = f"sequences have {length} tokens, the model's context, not --max-seq-length {options.length}"
    return replace(found, warnings=(cut, *found.warnings))


def _check_measurable(
    model: Path,
    config: dict[str, Any],
    plan: Plan,
    device: torch.device,
    stage: KVCacheStage | MtpStage,
    length: int,
) -> None:
    """Raises ToolkitError before the run, rather than after the last block, if a stage cannot measure the result on its
    text, in windows of `length` tokens."""
    from compress.evaluate.kv_cache import check_measurable, measured_windows

    check_measurable(config, plan.bytes_after, str(device))
    measured_windows(model, data=stage.data, tokens=stage.tokens, length=length)


def head_of(config: dict[str, Any], files: TensorFiles) -> ModelSpec:
    """Describes the multi-token prediction head of a source as a model of one layer. Raises CheckpointError: the source
    has none."""
    describe = find_family(config.get("model_type"))
    spec = None if describe is None else describe(config)
    if spec is None or spec.mtp is None or f"{spec.mtp.projection.name}.weight" not in files:
        raise CheckpointError("the model has no multi-token prediction head", "Leave the mtp stage out")
    return spec.mtp.model(spec)


def _model_dtype(config: dict[str, Any], files: TensorFiles) -> str:
    """Returns the dtype in config.json, else that of the largest tensor."""
    if config.get("dtype") or config.get("torch_dtype"):
        return dtype_name(config)
    largest = max(files.names(), key=lambda name: math.prod(files.shape(name)))
    return str(files.dtype(largest)).removeprefix("torch.")


def _disk_bytes(files: TensorFiles, plan: Plan, hidden: int) -> int:
    """Returns the disk space in bytes: pieces and the assembled checkpoint coexist at the end, inputs of two blocks
    before."""
    side = sum(file.stat().st_size for file in files.side_files())
    return 2 * plan.bytes_after + side + 2 * hidden
