"""`compress quantize`: integers or 8-bit floats for the linear layers, in one command."""

from __future__ import annotations

from compress.checkpoint.option_groups import with_groups
from compress.cli.job import carry_out
from compress.cli.option_groups import JobOptions, TextOptions
from compress.cli.options import DEFAULT_OUT, Ignore, Model, Out
from compress.cli.quantize_options import EndOptions, KVDefault, Rotate, RoundingOptions
from compress.stages.kv_cache import KVCacheStage
from compress.stages.quantize import end_stages
from compress.stages.rotate import RotateStage
from compress.stages.table import Stage


@with_groups
def quantize(
    *,
    model: Model = None,
    out: Out = DEFAULT_OUT,
    rounding: RoundingOptions,
    ends: EndOptions,
    kv_cache: KVDefault = None,
    rotate: Rotate = False,
    ignore: Ignore = None,
    text: TextOptions,
    job: JobOptions,
) -> None:
    """Quantize a model's linear layers to integers of 2 to 8 bits, or to 8-bit floats.

    Works block by block with little memory; killed at any moment, the same command continues where it stopped and gives
    the same bytes. The result is checked, measured and loads in vLLM, SGLang and transformers.
    """
    stage = rounding.stage(tuple(ignore or ()))
    stages: list[Stage] = [stage, *end_stages(stage, ends.head_bits, ends.embedding_bits)]
    name = f"{'fp' if stage.scheme.fp8 else 'int'}{stage.scheme.bits}-{stage.method}"
    if rotate:
        stages, name = [RotateStage(), *stages], f"{name}-rotated"
    if kv_cache is not None:
        stages, name = [*stages, KVCacheStage(kv_cache)], f"{name}-kv-{kv_cache}"
    carry_out(model, text.recipe(tuple(stages), name), out, job)
