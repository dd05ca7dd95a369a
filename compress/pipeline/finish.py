"""Assembly of the checkpoint from finished blocks, its verification, quality check and report."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.checkpoint.activations import ACTIVATIONS_MEASURED_KEY
from compress.checkpoint.config import (
    COMPRESSION_KEY,
    QUANTIZATION_KEY,
    is_embedding,
    packed_config,
    quantization_block,
    read_config,
    write_config,
)
from compress.checkpoint.dequantized import describe_source
from compress.checkpoint.formats import format_for
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.kv_cache import (
    KV_CACHE_KEY,
    KV_MEASURED_KEY,
    KVCacheRecord,
    KVCacheScheme,
    MeasuredKVCache,
    with_kv_cache,
)
from compress.checkpoint.scale_search import range_kernel
from compress.checkpoint.verify import (
    StructureReport,
    is_only_copied,
    recorded_digests,
    verify_against,
    verify_structure,
)
from compress.checkpoint.weights import Scheme, Weight
from compress.common.cli import DISTRIBUTION, tool_version
from compress.common.errors import CheckpointError
from compress.common.files import REPORT_FILE, sync
from compress.methods.shared.column_solver import column_kernel
from compress.models.config import context_length
from compress.pipeline.block import BlockOutcome, check_finite
from compress.pipeline.prepare import RunContext, describe_calibration
from compress.pipeline.resume import MTP, REST, Progress, RunDisplay
from compress.reporting.model_card import write_card
from compress.stages.kv_cache import KVCacheStage, KVChoice, choose_kv_cache

if TYPE_CHECKING:
    from compress.common.evaluation import Evaluation


def provenance(context: RunContext, progress: Progress) -> dict[str, Any]:
    """Returns `compression_config`, the provenance of a checkpoint. Equal runs give equal values."""
    request, packed = context.request, _packed_mtp(progress)
    return {
        "source": request.source,
        **({"source_form": describe_source(context.files.packed)} if context.files.packed else {}),
        "recipe": request.recipe.to_dict(),
        "seed": request.recipe.seed,
        "tool": f"{DISTRIBUTION} {tool_version()}",
        "calibration": describe_calibration(request.recipe, context.sequences),
        "dense": {
            row.tensor.removesuffix(".weight"): row.reason
            for row in context.plan.rows
            if row.reason and len(row.shape) > 1 and row.kept is None and row.tensor not in packed
        }
        | _kept_whole(context, progress),
    }


def _packed_mtp(progress: Progress) -> set[str]:
    """Returns the weights of a packed multi-token prediction head by their names in the source."""
    packed = progress.pieces.read_metadata(MTP)["schemes"] if progress.pieces.has(MTP) else ()
    return {f"{module}.weight" for module in packed}


def _kept_whole(context: RunContext, progress: Progress) -> dict[str, str]:
    """Returns layers that stay dense by decision of their block, with the reason."""
    blocks = (progress.facts(index) for index in range(context.skeleton.num_blocks))
    linears = (linear for facts in blocks for linear in facts["linears"] if linear["module"] not in facts["schemes"])
    return {linear["module"]: linear["kept_whole"] for linear in linears if linear["kept_whole"]}


def full_report(
    context: RunContext,
    progress: Progress,
    structure: StructureReport,
    quality: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Returns `compression_report.json`: plan, losses and fallbacks of every block, verification and quality.
    `seconds`: wall time of this process, without earlier interrupted ones."""
    num_blocks = context.skeleton.num_blocks
    facts = progress.all_facts(num_blocks)
    recovered = [each for block in facts for each in block["linears"] if each["recovery"]]
    return {
        "format_version": 1,
        **provenance(context, progress),
        "command": context.request.command,
        "environment": environment(context),
        "plan": context.to_dict(),
        "recovered": recovered,
        "blocks": facts[:num_blocks],
        "ends": facts[num_blocks:],
        "structure": structure.as_dict() | {"path": str(context.request.out)},
        "bit_compared": sum(len(block["digests"]) for block in facts),
        "quality": quality,
        "seconds": round(seconds, 2),
    }


def environment(context: RunContext) -> dict[str, Any]:
    """Returns the versions and devices that may affect the last bits of a result."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if context.device.type == "cuda" else platform.machine(),
        "threads": context.workers.num_threads,
        "columns": column_kernel(context.device),
        "ranges": range_kernel(context.device),
    }


def save_rest(context: RunContext, progress: Progress) -> None:
    """Writes all tensors outside the blocks, bit for bit unchanged. Raises NumericsError on NaN or infinity."""
    blocks = tuple(f"{context.skeleton.block_name(index)}." for index in range(context.skeleton.num_blocks))
    outside = [row for row in context.plan.rows if row.bytes_after and not row.tensor.startswith(blocks)]
    packed = _packed_mtp(progress)
    names = [row.tensor for row in outside if row.layer_plan is None and row.kept is None and row.tensor not in packed]
    kept = kept_weights(context, [row.tensor.removesuffix(".weight") for row in outside if row.kept is not None])
    outcome = BlockOutcome(kept=kept, dense={name: context.files.tensor(name) for name in names})
    for name, tensor in outcome.dense.items():
        if not is_only_copied(context.files, name):
            check_finite(name, tensor)
        context.files.release()
    facts = outcome.facts() | {"block": REST} if kept else None
    progress.pieces.write(REST, outcome.tensors(context.scale_dtype), facts, context.files)


def kept_weights(context: RunContext, modules: Iterable[str]) -> dict[str, Weight]:
    """Returns the weights of modules that keep the codes of a quantized source."""
    stored = context.files.packed
    return {module: stored.packed_weight(module) for module in modules} if stored else {}


def checkpoint_config(context: RunContext, progress: Progress) -> dict[str, Any]:
    """Returns config.json of the checkpoint."""
    finished = progress.all_facts(context.skeleton.num_blocks)
    schemes = {module: Scheme.from_dict(fields) for facts in finished for module, fields in facts["schemes"].items()}
    # Pruned weights with stored zeros need no quantization format.
    codec = format_for(schemes) if schemes else DENSE
    quantization = codec.quantization_config(schemes, _dense_linears(context, schemes))
    return packed_config(context.config, quantization, schemes, provenance(context, progress))


def check_checkpoint(context: RunContext, folder: Path, digests: dict[str, str]) -> StructureReport:
    """Re-reads the written checkpoint and compares it with the digests taken when the codes were chosen. Raises
    CheckpointError: verification finds a problem."""
    try:
        structure = verify_structure(folder, context.files)
        problems = [*structure.problems, *verify_against(folder, digests)]
    except CheckpointError as error:
        raise _unverified([error.problem]) from error
    if problems:
        raise _unverified(problems)
    return structure


def _unverified(problems: Sequence[str]) -> CheckpointError:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return CheckpointError(
        f"the checkpoint just written does not verify: {problems[0]}{more}",
        "Nothing was put in place. Run the same command again: it keeps intact pieces. If that fails too, report it",
    )


def put_in_place(folder: Path, out: Path, report: dict[str, Any]) -> None:
    """Adds report and model card, and renames the finished folder to `out`, atomically."""
    (folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_card(folder)
    folder.rename(out)
    sync(out.parent)


def _dense_linears(context: RunContext, schemes: Mapping[str, Scheme]) -> list[str]:
    """Returns every linear that stays dense, by full name: loaders that target the class `Linear` need them."""
    skeleton = context.skeleton
    packed = {f"{name}.weight" for name in schemes}
    stored = {
        row.tensor.removesuffix(".weight")
        for row in context.plan.rows
        if row.tensor not in packed and len(row.shape) == 2 and row.tensor.endswith(".weight")
    }
    # Loaders treat a matrix without such a name as a linear.
    stored -= {skeleton.architecture.embedding} if is_embedding(skeleton.architecture.embedding) else set()
    looked_up = skeleton.ties_head and skeleton.architecture.embedding in schemes
    heads = {skeleton.architecture.head} if skeleton.architecture.head and not looked_up else set()
    return sorted((skeleton.all_linears().keys() | stored | heads | set(skeleton.renamed)) - schemes.keys())


def compare_with_report(folder: Path) -> list[str] | None:
    """Returns problems found by comparing the stored codes with `compression_report.json`; None without a report.
    Raises CheckpointError: the report cannot be read."""
    digests = recorded_digests(folder)
    return None if digests is None else verify_against(folder, digests)


@dataclass(frozen=True, slots=True)
class KVResult:
    """Chosen KV cache; `record` is None if 16 bits were requested, which needs no measurement."""

    choice: KVChoice
    record: KVCacheRecord | None

    @property
    def warnings(self) -> tuple[str, ...]:
        return (self.choice.warning,) if self.choice.warning else ()

    def describe(self) -> str:
        """Returns the default with its figures in one line."""
        scheme, record = self.choice.scheme, self.record
        if record is None:
            return str(scheme)
        exact = f"{record.token_bytes:,} bytes per token in 16 bits"
        found = record.find(scheme)
        if found is None:
            return f"{scheme}: {exact}"
        return (
            f"{scheme}: {found.token_bytes:,} bytes per token ({exact}), KL {found.kl_mean:.5f} to 16 bits, perplexity "
            f"{record.perplexity:.3f} -> {found.perplexity:.3f} ({record.tokens} tokens of {record.data}, "
            f"{record.length} per window)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for the report."""
        return {
            "default": self.choice.scheme.to_dict(),
            "warning": self.choice.warning,
            "measured": self.record.to_dict() if self.record else None,
        }


def choose_default(context: RunContext, folder: Path, quiet: bool) -> KVResult | None:
    """Measures the recipe's formats, chooses one, and records both in config.json of the finished checkpoint in
    `folder`. Raises ToolkitError: the text is not usable, or the model fails. Returns result, or None without such a
    stage."""
    stage = context.request.recipe.find(KVCacheStage)
    if stage is None:
        return None
    record = _measure(context, stage, folder, quiet) if stage.candidates else None
    result = KVResult(choose_kv_cache(stage, record), record)
    config = read_config(folder)
    config[COMPRESSION_KEY][KV_CACHE_KEY] = result.choice.scheme.to_dict()
    if QUANTIZATION_KEY in config:
        config[QUANTIZATION_KEY] = with_kv_cache(quantization_block(config), result.choice.scheme)
    if record is not None:
        config[COMPRESSION_KEY][KV_MEASURED_KEY] = record.to_dict()
    write_config(folder, config)
    return result


def record_activations(folder: Path, quality: Mapping[str, Any]) -> None:
    """Records the measured forms of activations in config.json of the finished checkpoint in `folder`, if there are."""
    if quality.get(ACTIVATIONS_MEASURED_KEY) is not None:
        config = read_config(folder)
        config[COMPRESSION_KEY][ACTIVATIONS_MEASURED_KEY] = quality[ACTIVATIONS_MEASURED_KEY]
        write_config(folder, config)


def _measure(context: RunContext, stage: KVCacheStage, folder: Path, quiet: bool) -> KVCacheRecord:
    from compress.evaluate.kv_cache import measure_kv_caches

    length = stage.window_length(context_length(context.config))
    with RunDisplay(1, 0, quiet, unit="KV cache") as display:
        display.say(f"measuring {len(stage.candidates)} KV caches on {stage.tokens:,} tokens, {length:,} in a window")
        display.step("loading")
        found = measure_kv_caches(
            folder,
            stage.candidates,
            data=stage.data,
            tokens=stage.tokens,
            length=length,
            device=str(context.device),
            on_progress=lambda done, total: display.step(f"window {done} of {total}", done / total),
        )
        display.finish(f"measured on {len(found.windows.tokens)} windows")
    measured = zip(stage.candidates, found.token_bytes, found.results, strict=True)
    windows, first = found.windows, found.results[0]
    return KVCacheRecord(
        stage.max_kl,
        first.tokens,
        length,
        windows.source,
        windows.sha256,
        windows.protocol,
        first.baseline_perplexity or first.perplexity,
        found.exact_token_bytes,
        tuple(_candidate(*each) for each in measured),
    )


def _candidate(scheme: KVCacheScheme, token_bytes: int, result: Evaluation) -> MeasuredKVCache:
    return MeasuredKVCache(
        scheme,
        token_bytes,
        result.kl_mean or 0.0,
        result.kl_p999 or 0.0,
        result.perplexity,
        result.top1_agreement or 0.0,
        result.kl_standard_error,
    )
