"""The choice of activations: rounded as the checkpoint says, or with packed weights on CPUs 16-bit or 8-bit ones, by a
recorded or own measurement.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint.activations import ACTIVATIONS, AS_STORED, EIGHT_BITS, SIXTEEN_BITS, MeasuredActivations
from compress.checkpoint.kv_cache import AUTO
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Scheme
from compress.common.errors import CheckpointError, ToolkitError
from compress.common.files import atomic_file, cache_folder, read_json
from runtime.backends.base import Target
from runtime.backends.prepared_weight import LAYOUT_VERSION
from runtime.backends.registry import REFERENCE, linear_kernels
from runtime.core.model_config import DecoderConfig
from runtime.core.progress import Report, Stage, ignore
from runtime.model.loader import open_weights, packed_matrices
from runtime.model.prepared_key import PreparedKey
from runtime.model.streamed import StreamedModel, advance, begin
from runtime.model.weight_reader import WeightReader
from runtime.text.tokenizer import Tokenizer

TEXTS = ("encyclopedia", "code", "conversations", "documentation", "stories", "problems", "languages")
"""Bundled texts, of each of which one window is read."""
WINDOW, CHARACTERS = 64, 4096
"""Tokens of a window, and characters that have as many."""
FEWEST_WINDOWS = 2
MOST_PRODUCTS = 5e11
"""Limit of multiplications with one form of activations, some seconds of a core: larger models get fewer windows."""
LIMIT_4_BITS = 1.4e-3
"""Limit of the KL in nats between both forms of activations for 4-bit weights without a record. A tenth of 0.01, which
is less than any 4-bit quantization had to its dense model, may be added to that KL; what is added was measured to be at
most 1 / 1.4 of the KL between both forms. Rounding errors of weights halve with each further bit, so that KL falls to a
quarter, and the limit with it."""


@dataclass(frozen=True, slots=True)
class ActivationChoice:
    """Form of activations of one model.

    Attributes:
        kernels: mode or kernel of `runtime.backends.registry`.
        reason: in one line; "" for a model without packed weights.
        rounds_inputs: whether inputs are rounded as the checkpoint says.
    """

    kernels: str
    reason: str = ""
    rounds_inputs: bool = False

    @property
    def activations(self) -> str:
        if self.rounds_inputs:
            return AS_STORED
        return EIGHT_BITS if self.kernels == EIGHT_BITS else SIXTEEN_BITS

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the description of a model."""
        return (f"activations: {self.activations} ({self.reason})",) if self.reason else ()


@dataclass(frozen=True, slots=True)
class AddedDivergence:
    """Own measurement of a model without a record.

    Attributes:
        kl: mean KL in nats of the model with 8-bit activations to the same model with 16-bit ones.
        limit: for a model of such bits.
        tokens: number of compared positions.
    """

    kl: float
    limit: float
    tokens: int

    @property
    def is_within_limit(self) -> bool:
        return self.kl <= self.limit

    def __str__(self) -> str:
        return (
            f"KL to 16-bit activations {self.kl:.2g} on {self.tokens} tokens of bundled text (limit {self.limit:.2g})"
        )


def choose_activations(
    path: str | Path,
    asked: str = AUTO,
    *,
    device: str = AUTO,
    dtype: str = AUTO,
    kernels: str = AUTO,
    trust_remote_code: bool = False,
    report: Report = ignore,
) -> ActivationChoice:
    """Chooses the form of activations; measures a model without a record once, and keeps the result.

    Args:
        asked: `auto`, `16bit`, `8bit` or `stored`.
        kernels: as asked for; anything but `auto` keeps 16 bits, except that `reference` computes what is stored.
        report: progress callback.

    Raises:
        CheckpointError: see `load_model`.
        ToolkitError: an unknown form, or 8 bits that no kernel supports here.
    """
    if asked not in ACTIVATIONS:
        raise ToolkitError.unknown("form of activations", asked, ACTIVATIONS, "Use --activations")
    if kernels == EIGHT_BITS:
        raise ToolkitError(f"{kernels} is not a kernel", f"Use --activations {EIGHT_BITS}")
    if asked == AS_STORED and kernels not in (AUTO, REFERENCE):
        raise ToolkitError(f"kernel {kernels} keeps activations in 16 bits", f"Use --linear-backend {REFERENCE}")
    packed = PackedCheckpoint.open(path)
    if kernels == REFERENCE and packed.inputs:
        if asked not in (AUTO, AS_STORED):
            raise ToolkitError(f"{REFERENCE} rounds inputs as stored: {packed.describe_inputs()}", "Use other kernels")
        return ActivationChoice(REFERENCE, f"{REFERENCE} rounds them as stored: {packed.describe_inputs()}", True)
    if asked == AS_STORED:
        return ActivationChoice(AS_STORED, f"as asked: {packed.describe_inputs() or '16 bits'}", bool(packed.inputs))
    if asked == SIXTEEN_BITS:
        return ActivationChoice(kernels, "as asked")
    if asked == AUTO and packed.inputs:
        return ActivationChoice(
            kernels, f"no kernel multiplies what is stored, {packed.describe_inputs()}: --activations {AS_STORED}"
        )
    if asked == AUTO and not packed.modules:
        return ActivationChoice(kernels)
    if asked == AUTO and any(scheme.activations for scheme in packed.schemes.values()):
        return ActivationChoice(kernels, f"as the checkpoint says: {packed.describe()}", True)
    config, reader = open_weights(path, device, dtype, kernels, False, trust_remote_code)
    refusal = refusal_of_8_bits(config, reader)
    if asked == EIGHT_BITS and refusal:
        raise ToolkitError(f"{path} cannot be served with 8-bit activations: {refusal}", f"Use --activations {AUTO}")
    if asked == EIGHT_BITS:
        return ActivationChoice(EIGHT_BITS, "as asked")
    if refusal or reader.target.dtype != torch.bfloat16:
        return ActivationChoice(kernels, refusal or "float32 is computed exactly")
    try:
        measured, where = _measured(config, reader, report)
    except ToolkitError as error:
        return ActivationChoice(kernels, f"not measured: {error.problem}")
    return ActivationChoice(EIGHT_BITS if measured.is_within_limit else kernels, f"{measured}, {where}")


def can_round_activations(path: str | Path) -> bool:
    """Returns whether a checkpoint could be served with 8-bit activations here by default."""
    config, reader = open_weights(path, AUTO, AUTO, AUTO, False, False)
    return reader.target.dtype == torch.bfloat16 and not refusal_of_8_bits(config, reader)


def refusal_of_8_bits(config: DecoderConfig, reader: WeightReader) -> str:
    """Returns why no packed weight of a model can be multiplied by 8-bit activations; "" if one can."""
    if reader.kernels != AUTO:
        return f"--linear-backend {reader.kernels} was asked for"
    matrices = packed_matrices(reader.checkpoint, config)
    reasons = dict.fromkeys(scheme_refusal(scheme, columns, reader.target) for scheme, _, columns in matrices)
    return "" if "" in reasons else "; ".join(reasons) or "it has no packed weights"


def scheme_refusal(scheme: Scheme, columns: int, target: Target) -> str:
    """Returns why a packed matrix cannot be multiplied by 8-bit activations; "" if it can."""
    kernel = next(kernel for kernel in linear_kernels() if kernel.mode == EIGHT_BITS)
    if not kernel.takes(scheme):
        return f"kernel {kernel.name} does not multiply by {scheme}"
    reason = kernel.unsupported_reason(scheme, columns, target)
    return f"kernel {kernel.name} {reason}" if reason else ""


def _measured(
    config: DecoderConfig, reader: WeightReader, report: Report
) -> tuple[MeasuredActivations | AddedDivergence, str]:
    """Returns the record of a checkpoint, or the measurement of an earlier start, or measures and keeps the result;
    also says which, for people."""
    if config.activations_measured is not None:
        return config.activations_measured, "recorded in config.json"
    file = _file(reader.checkpoint.path)
    with suppress(OSError, CheckpointError, TypeError):
        return AddedDivergence(**read_json(file)), f"kept in {file}"
    began = time.monotonic()
    measured = measure(config, reader, report)
    took = f"measured in {time.monotonic() - began:.1f} s"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as stream:
            stream.write(json.dumps(asdict(measured)).encode())
    except (OSError, CheckpointError) as error:
        return measured, f"{took}, not kept: {error}"
    return measured, f"{took}, kept in {file}"


def _file(checkpoint: Path) -> Path:
    """Returns the file for the measurement of a checkpoint on machines with this instruction set."""
    key = PreparedKey.of(checkpoint, LAYOUT_VERSION).fields() | {"path": str(checkpoint.resolve()), "texts": TEXTS}
    return cache_folder("activations") / f"{sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def measure(config: DecoderConfig, reader: WeightReader, report: Report = ignore) -> AddedDivergence:
    """Compares a model with 8-bit activations with itself, one layer in memory at a time.

    Raises:
        ToolkitError: a model that cannot be computed layer by layer, or without a tokenizer.
    """
    eligible = [
        (scheme.bits, rows * columns)
        for scheme, rows, columns in packed_matrices(reader.checkpoint, config)
        if not scheme_refusal(scheme, columns, reader.target)
    ]
    numbers = sum(size for _, size in eligible)
    bits = sum(bits * size for bits, size in eligible) / numbers
    tokens = _windows(reader.checkpoint.path, config.spec.vocab_size, numbers)
    models = [StreamedModel.of(config, replace(reader, kernels=kernels)) for kernels in (reader.kernels, EIGHT_BITS)]
    # Log-probabilities of one form are kept, those of the other pass window by window.
    exact, rounded = (_log_probabilities(model, tokens, report) for model in models)
    divergence = [(own.exp() * (own - other)).sum(-1) for own, other in zip(list(exact), rounded, strict=True)]
    return AddedDivergence(torch.cat(divergence).mean().item(), LIMIT_4_BITS * 4 ** (4 - bits), tokens.numel())


def _windows(path: Path, vocab_size: int, numbers: int) -> Tensor:
    """Cuts windows `[N, WINDOW]`, one of each text; fewer for a model of more weights.

    Raises:
        CheckpointError: there is no tokenizer, or one of another model.
    """
    tokenizer = Tokenizer.open(path)
    count = max(FEWEST_WINDOWS, min(len(TEXTS), int(MOST_PRODUCTS / (WINDOW * numbers))))
    data = files("calibration") / "data"
    texts = (data.joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in TEXTS[:count])
    tokens = torch.tensor([tokenizer.encode(text[:CHARACTERS])[:WINDOW] for text in texts])
    if (largest := int(tokens.max())) >= vocab_size:
        raise CheckpointError(f"token {largest} of its tokenizer has no embedding", "Use the model's own tokenizer")
    return tokens


@torch.inference_mode()
def _log_probabilities(model: StreamedModel, tokens: Tensor, report: Report) -> Iterator[Tensor]:
    """Yields log-probabilities `[T, V]` of each window of tokens `[N, T]`."""
    partial = begin(model.with_embedding(), tokens)
    for index in range(model.num_layers):
        report(Stage.ACTIVATIONS, index, model.num_layers)
        advance(model.with_layer(index), tokens, partial)
        model.release()
    head = model.with_head()
    for hidden in partial.passing.finish().split(tokens.shape[1]):
        yield torch.log_softmax(head.logits(hidden), -1)
