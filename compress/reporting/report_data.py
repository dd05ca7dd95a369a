"""Models of `compression_report.json` and of what a checkpoint's own files add to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from compress.checkpoint.config import dtype_name, read_config
from compress.checkpoint.kv_cache import KVCacheRecord, KVCacheScheme
from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import CheckpointError, SchemeError, ToolkitError
from compress.common.files import REPORT_FILE, read_json
from compress.models.registry import find_family
from compress.targets import without_indices

FORMAT_VERSION = 1
# Numbers are at most 1e30, and those below 1e-30 count as 0: ratios of both stay finite.
_LARGEST = 1e30

Number = Annotated[
    float,
    Field(strict=True, ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False),
    AfterValidator(lambda value: value if abs(value) >= 1 / _LARGEST else 0.0),
]
Count = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
"""Reports write null for text that is not there."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class SearchedUnit(_Record):
    """Layers that share one choice.

    Attributes:
        chosen: what they become: `w4g128`, `asvd0.8`.
        sensitivity: KL of the whole model, in nats, when only these layers are changed, by what they become.
    """

    modules: Annotated[tuple[str, ...], Field(min_length=1)]
    chosen: str
    sensitivity: Annotated[dict[str, Number], Field(min_length=1)]


class SearchTry(_Record):
    """A checkpoint that was made on the way to a target of quality."""

    predicted: Number
    measured: Number
    bytes: Count


class SearchRecord(_Record):
    """A search.

    Attributes:
        measured_tokens: length of the text that sensitivities were measured on.
        predicted: sum of the sensitivities of what was chosen.
    """

    target: str
    measured_tokens: Count
    predicted: Number
    units: Annotated[tuple[SearchedUnit, ...], Field(min_length=1)]
    tries: tuple[SearchTry, ...]

    @property
    def typical(self) -> str:
        """The scheme that most units were offered and most chose."""
        offered = Counter(scheme for unit in self.units for scheme in unit.sensitivity)
        chosen = Counter(unit.chosen for unit in self.units)
        return max(offered, key=lambda scheme: (offered[scheme], chosen[scheme], scheme))

    @property
    def uniform(self) -> dict[str, float]:
        """Sum of sensitivities by scheme, for schemes that every unit was offered, largest first."""
        shared = [scheme for scheme in self.units[0].sensitivity if all(scheme in u.sensitivity for u in self.units)]
        sums = {scheme: sum(unit.sensitivity[scheme] for unit in self.units) for scheme in shared}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


class Linear(_Record):
    """One linear.

    Attributes:
        relative_error: squared error of the weight over its square, each column weighted by its input.
        recovery: fallback where the method could not be applied; empty otherwise.
        input_outlier: as in `compress.pipeline.block.LinearRecord`; None where it was not recorded.
    """

    module: str
    method: str
    pruning: Text = ""
    relative_error: Number
    zeros: Number | None = None
    recovery: Text = ""
    input_outlier: Number | None = None


class Smoothed(_Record):
    """One smoothed layer: its exponent (`ratio`), and the loss without and with smoothing."""

    source: str
    ratio: Number
    loss_before: Number
    loss_after: Number

    @property
    def gain(self) -> float:
        """Share of the loss that smoothing removed."""
        return 1 - self.loss_after / self.loss_before if self.loss_before > 0 else 0.0


class ExpertCoverage(_Record):
    """Calibration tokens of the experts of one mixture.

    Attributes:
        tokens: those that the router sent to each expert.
        added: other tokens that its statistics count as well, for each expert.
        least: tokens that statistics count at least, where the calibration has as many.
    """

    module: str
    tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    added: tuple[Count, ...]
    least: Count

    @model_validator(mode="after")
    def _check_lengths(self) -> ExpertCoverage:
        if len(self.tokens) != len(self.added):
            raise ValueError(f"tokens of {len(self.tokens)} experts and added ones of {len(self.added)}")
        return self

    @property
    def num_rare(self) -> int:
        """Experts with fewer tokens than their statistics need."""
        return sum(count < self.least for count in self.tokens)


class Block(_Record):
    """One transformer block; `relative_error` is None where its outputs were not computed, and `experts` are the
    mixtures that were calibrated."""

    block: str
    relative_error: Number | None = None
    linears: tuple[Linear, ...]
    smoothing: tuple[Smoothed, ...]
    experts: tuple[ExpertCoverage, ...] = ()

    def kind(self, module: str) -> str:
        """Name of a module inside this block, indices (experts) as `*`."""
        return without_indices(f".{module.removeprefix(f'{self.block}.')}").removeprefix(".")


class BlockShare(_Record):
    """Share of a block's weights that a first pass chose to prune; `pattern` is `n:m` or None."""

    block: str
    outlier_ratio: Number
    share: Number
    pattern: str | None = None


class PlannedKind(_Record):
    """Stored tensors that differ in nothing but their indices, and what became of them."""

    tensor: str
    shape: tuple[Count, ...]
    count: Count
    method: Text = ""
    pruning: Text = ""
    factoring: Text = ""
    scheme: Text = ""
    reason: Text = ""
    bytes_before: Count
    bytes_after: Count

    @property
    def name(self) -> str:
        return self.tensor.removesuffix(".weight")

    @property
    def becomes(self) -> str:
        work = [each for each in (self.pruning, self.factoring) if each]
        return " + ".join([*work, f"{self.method} {self.scheme}"] if self.method else work or [self.scheme])


class Planned(_Record):
    """The plan: kinds of tensors, bytes of the source, and notes."""

    layers: tuple[PlannedKind, ...]
    bytes_before: Count
    notes: tuple[str, ...] = ()


class Quality(_Record):
    """Perplexity and divergence from the dense model; fields as in `compress.common.evaluation.Evaluation`."""

    perplexity: Number
    baseline_perplexity: Number | None = None
    tokens: Count
    kl_mean: Number | None = None
    kl_p999: Number | None = None
    kl_standard_error: Number | None = None
    top1_agreement: Number | None = None
    kl_p999_standard_error: Number | None = None
    acceptance: Number | None = None
    acceptance_standard_error: Number | None = None
    flips_standard_error: Number | None = None
    protocol: str
    data: str
    data_sha256: str
    backend: str
    dtype: str
    warnings: tuple[str, ...] = ()


class FigureFinding(_Record):
    """A measured figure of a gate; fields as in `compress.common.evaluation.Finding`."""

    value: Number | None
    text: str = ""
    applies: bool = True
    details: dict[str, Any] = {}


class Structure(_Record):
    """Findings of re-reading the finished checkpoint; `quantized` gives each packed layer its scheme."""

    ok: Annotated[bool, Field(strict=True)] = False
    format: str
    quantized: dict[str, str]
    bits_per_weight: Number
    bits_per_parameter: Number
    num_parameters: Count
    num_quantized: Count
    total_bytes: Count
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def _with_schemes(record: Any) -> Any:
    """Reads the forms in a record by `KVCacheScheme.from_dict`, which knows the names of their stored fields."""
    if not isinstance(record, dict) or not isinstance(record.get("candidates"), list):
        return record
    candidates = [
        each | {"scheme": KVCacheScheme.from_dict(each["scheme"])}
        if isinstance(each, dict) and "scheme" in each
        else each
        for each in record["candidates"]
    ]
    return record | {"candidates": candidates}


class KVCacheFacts(_Record):
    """Choice of the stage kv_cache; `measured` is None where nothing was measured, `warning` is mostly empty."""

    default: Annotated[KVCacheScheme, BeforeValidator(KVCacheScheme.from_dict)]
    warning: Text = ""
    measured: Annotated[KVCacheRecord | None, BeforeValidator(_with_schemes)] = None

    @property
    def token_bytes(self) -> int | None:
        """Keys and values of one token in the chosen form; None where that was not measured."""
        found = self.measured.find(self.default) if self.measured else None
        return found.token_bytes if found else None


class RunReport(_Record):
    """A whole report.

    Attributes:
        calibration: empty for data-free methods.
        layerwise: pruned share of each block where a first pass chose it; in the order of the blocks.
        quality: None when it was not measured; `not_measured` says why.
        search: how its schemes were found; None where a recipe gave them.
    """

    path: Path
    source: str
    tool: str
    seed: Count
    seconds: Number
    recipe: dict[str, Any]
    command: Text = ""
    calibration: dict[str, Any] | None = None
    environment: dict[str, Any]
    plan: Planned
    blocks: tuple[Block, ...]
    layerwise: tuple[BlockShare, ...] | None = None
    structure: Structure
    bit_compared: Count
    quality: Quality | None
    not_measured: str = ""
    kv_cache: KVCacheFacts | None = None
    search: SearchRecord | None = None
    figures: dict[str, FigureFinding] = {}

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, values: Any) -> Any:
        """Refuses other versions. Moves the reason that stands in place of quality to a field of its own."""
        if not isinstance(values, dict):
            raise ValueError("it is not an object")
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            problem = f"{values['path']} has format_version {version!r}; this version reads {FORMAT_VERSION}"
            raise CheckpointError(problem, "Use the release of this toolkit that wrote it")
        quality = values.get("quality")
        if isinstance(quality, dict) and quality.get("not_measured") is not None:
            return values | {"quality": None, "not_measured": quality["not_measured"]}
        return values

    @property
    def name(self) -> str:
        """Name of the recipe, or of the folder where it has none."""
        return str(self.recipe.get("name") or self.path.resolve().parent.name)

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def linears(self) -> list[Linear]:
        return [linear for block in self.blocks for linear in block.linears]


def read_report(path: Path) -> RunReport:
    """Reads the report of a checkpoint folder, or a report file by its own name. Raises CheckpointError: it is
    missing or damaged (the field is named), or another version wrote it."""
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        values = read_json(file)
        return RunReport.model_validate(values | {"path": file} if isinstance(values, dict) else values)
    except FileNotFoundError as error:
        raise CheckpointError.missing(
            "file", file, "Name a checkpoint folder that this toolkit wrote, with its report"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(file, f"{_place(first['loc'])}: {first['msg']}".removeprefix(": ")) from error
    except SchemeError as error:
        raise _damaged(file, f"kv_cache: {error.problem}") from error


def _damaged(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a readable report: {problem}", "Copy this file again, or repeat the run")


def _place(parts: tuple[int | str, ...]) -> str:
    """`blocks[2].linears[0].relative_error`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


# Some configs say "no limit" by a number past every real size.
_UNLIMITED = 2**31
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
# Biases, and the shapes that are written next to packed weights for loaders.
_NO_WEIGHT = ("bias", "weight_shape")


class KeyValues(_Record):
    """Keys and values of one token in all layers, in the model's dtype.

    Attributes:
        numbers: of all layers; other than those of `layers` times `kv_heads` times `head_dim` where layers differ.
        max_tokens: longest sequence the model was made for; 2,048 where the config names none.
    """

    layers: int
    kv_heads: int
    head_dim: int
    numbers: int
    dtype: str
    max_tokens: int

    @property
    def token_bytes(self) -> int:
        return self.numbers * _BYTES[self.dtype]

    @property
    def layout(self) -> str:
        """The numbers of a token as a product where all layers are alike."""
        alike = self.numbers == 2 * self.layers * self.kv_heads * self.head_dim
        product = f"2 x {self.layers} layers x {self.kv_heads} heads x {self.head_dim}"
        return f"{product if alike else f'{self.numbers:,}'} x {self.dtype}"


class Headers(_Record):
    """Facts from config.json and the weight files' headers.

    Attributes:
        key_values: None when the config does not say enough; `no_memory` says why.
        layer_bits: stored bits per weight by module; empty without weight files; `no_bits` says why.
    """

    key_values: KeyValues | None = None
    no_memory: str = ""
    layer_bits: dict[str, float] = {}
    no_bits: str = ""


def read_headers(report: RunReport) -> Headers:
    """Reads config.json and the headers of weight files; a report without its checkpoint is still worth a page."""
    found: dict[str, Any] = {}
    try:
        found["key_values"] = _key_values(read_config(report.folder))
        if found["key_values"] is None:
            found["no_memory"] = "memory per token is not known: config.json lacks layers, heads or sizes"
    except ToolkitError as error:
        found["no_memory"] = f"memory per token is not known: {error}"
    try:
        found["layer_bits"] = _layer_bits(report)
    except ToolkitError as error:
        found["no_bits"] = f"bits of each layer are not known: {error}"
    return Headers(**found)


def _key_values(config: Mapping[str, Any]) -> KeyValues | None:
    layers, heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    if not (layers and heads and hidden):
        return None
    kv_heads, head_dim = _size(config, "num_key_value_heads") or heads, _size(config, "head_dim") or hidden // heads
    describe = find_family(config.get("model_type"))
    alike = 2 * layers * kv_heads * head_dim
    numbers = alike if describe is None else describe(config).kv_token_bytes(lambda key, value: key + value)
    if not numbers:
        return None
    return KeyValues(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        numbers=numbers,
        dtype=dtype_name(config),
        max_tokens=_size(config, "max_position_embeddings") or 2048,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number of the config; 0 when it is missing or something else."""
    value = config.get(key)
    return value if type(value) is int and 0 < value < _UNLIMITED else 0


def _layer_bits(report: RunReport) -> dict[str, float]:
    files = TensorFiles.open(report.folder)
    stored: Counter[str] = Counter()
    for name in files.names():
        module, _, part = name.rpartition(".")
        if part not in _NO_WEIGHT:
            stored[module] += files.tensor_nbytes(name)
    sizes = {kind.name: math.prod(kind.shape) for kind in report.plan.layers if len(kind.shape) > 1}
    counts = {linear.module: sizes.get(without_indices(linear.module), 0) for linear in report.linears}
    return {module: 8 * stored[module] / count for module, count in counts.items() if count and module in stored}
