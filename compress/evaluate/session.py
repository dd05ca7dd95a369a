"""One evaluation, from a request of paths and names to a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.sequences import SequenceSet, check_token_ids, load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.activations import (
    ACTIVATIONS,
    ACTIVATIONS_MEASURED_KEY,
    AS_STORED,
    EIGHT_BITS,
    SIXTEEN_BITS,
    MeasuredActivations,
)
from compress.checkpoint.config import compression_block, dtype_name, read_config, write_config
from compress.checkpoint.dequantized import open_source
from compress.checkpoint.gguf.folder import folder_of
from compress.checkpoint.kv_cache import AUTO, UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.locate import find_source
from compress.checkpoint.locate.hub import HubModel
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.state_dtype import STATE_DTYPES, STATE_FLOAT32, MeasuredStates, with_measured_states
from compress.common.device import available_bytes, format_bytes, require_memory, resolve_device
from compress.common.errors import DataError
from compress.common.evaluation import Evaluation
from compress.evaluate.checks import (
    Domain,
    SeenText,
    check_same_tokens,
    compare_domains,
    domain_sample,
    overlap_warning,
    shared_spans,
)
from compress.evaluate.perplexity import Windows, batches, cut_windows, score_positions
from compress.evaluate.positions import summarize
from compress.evaluate.scorers import BACKENDS, Scorer, check_states, default_backend, open_scorer
from compress.evaluate.server import TOP_TOKENS, Server, ServerScorer
from compress.evaluate.stream_plan import ModelCost, StreamPlan, stored_tensors
from compress.evaluate.streamed import Report, StreamedScorer, Streaming
from compress.models.config import context_length

if TYPE_CHECKING:
    from runtime.activations import ActivationChoice

DEFAULT_DATA = "pydoc"
DEFAULT_LENGTH = 512
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
QUICK_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Request of an evaluation.

    Attributes:
        model, baseline: a folder, or a running server, of which the most likely tokens are known only. The baseline is
            what the model is compared with; None is the recorded source of a packed checkpoint.
        data: text source, see `calibration.sources.load_texts`.
        kv_cache: form of keys and values of the model; the baseline has 16 bits.
        activations: of the model: see `runtime.activations.choose_activations`; `auto` is as stored. Those of the
            baseline are as stored.
        state_dtype: dtype of kept recurrent states of the model; the baseline has float32.
        streaming: None keeps both models in memory.
        tokenizer: folder with the tokenizer of both; None for that of the model, or of the baseline of a server.
    """

    model: Path | Server
    baseline: Path | Server | None = None
    data: str = DEFAULT_DATA
    length: int = DEFAULT_LENGTH
    max_tokens: int | None = None
    backend: str = "runtime"
    device: str = "auto"
    dtype: str = "auto"
    kv_cache: KVCacheScheme = UNCOMPRESSED
    kernels: str = "auto"
    trust_remote_code: bool = False
    state_dtype: str = STATE_FLOAT32
    streaming: Streaming | None = None
    activations: str = AUTO
    tokenizer: Path | None = None

    @property
    def folders(self) -> list[Path]:
        """Folders of the model, of its baseline and of the tokenizer, of those that are named and no servers."""
        return [each for each in (self.model, self.baseline, self.tokenizer) if isinstance(each, Path)]

    @property
    def servers(self) -> list[Server]:
        return [each for each in (self.model, self.baseline) if isinstance(each, Server)]

    @property
    def options(self) -> dict[str, Any]:
        """Options that a model and its baseline share."""
        return {"device": self.device, "dtype": self.dtype, "trust_remote_code": self.trust_remote_code}

    @property
    def forms(self) -> dict[str, Any]:
        """Forms of what the model keeps; its baseline keeps all as it is."""
        return {"kv_cache": self.kv_cache, "state_dtype": self.state_dtype}


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Result of an evaluation, with everything needed to repeat it.

    Attributes:
        overlap: share of the evaluation text in the calibration text; None where that is unknown.
        domain: loss of the baseline on the calibration text and on this text; None where that is unknown.
    """

    request: EvaluationRequest
    result: Evaluation
    windows: Windows
    baseline: Path | Server | None
    warnings: tuple[str, ...] = field(default=())
    overlap: float | None = None
    domain: Domain | None = None

    def to_dict(self) -> dict[str, Any]:
        return self.result.to_dict() | {
            "model": str(self.request.model),
            "baseline": str(self.baseline) if self.baseline else None,
            "data": self.windows.source,
            "data_sha256": self.windows.sha256,
            "protocol": self.windows.protocol,
            "backend": self.request.backend,
            "dtype": self.request.dtype,
            "kv_cache": self.request.kv_cache.to_dict(),
            "kernels": self.request.kernels,
            "activations": self.request.activations,
            "state_dtype": self.request.state_dtype,
            "top_tokens": TOP_TOKENS if self.request.servers else None,
            "calibration_overlap": self.overlap,
            "bits_per_byte": asdict(self.domain) if self.domain else None,
            "warnings": list(self.warnings),
        }


def run_evaluation(
    request: EvaluationRequest,
    on_progress: Report = lambda _what, _done, _all: None,
    calibration: SequenceSet | None = None,
) -> EvaluationReport:
    """Loads models and text of a request and evaluates them. Raises ToolkitError: a path, text or option that cannot be
    used, or logits that are not finite.

    Args:
        on_progress: is told what is done, how many steps of it are, and how many there are.
        calibration: calibration sequences of the checkpoint; None packs the recorded text again.
    """
    return run_evaluations(request, (request.activations,), on_progress, calibration)[0]


def run_evaluations(
    request: EvaluationRequest,
    activations: Sequence[str],
    on_progress: Report = lambda _what, _done, _all: None,
    calibration: SequenceSet | None = None,
) -> list[EvaluationReport]:
    """Evaluates a model with several forms of activations, side by side with one baseline; see `run_evaluation`."""
    prepared = _prepare(request, calibration)
    windows, seen, sample = prepared.windows, prepared.seen, prepared.sample
    choices = [_choose_activations(request, each) for each in activations]
    with _scorers(prepared, choices, on_progress) as (models, reference):
        scored = score_positions(models, windows, reference, partial(on_progress, "scoring"))
        results = [summarize(positions, reference is not None) for positions in scored]
        scorer = reference or models[0]
        domain = None if sample is None else compare_domains(scorer, sample, windows, results[0], prepared.tokenizer)
        padded = () if reference is None or request.servers else _padding(models[0].vocab_size, reference.vocab_size)
    shared = shared_spans(seen, windows)
    warnings = prepared.warnings + overlap_warning(shared, seen, windows) + _kept_inputs(request, choices) + padded
    if domain and seen:
        warnings += domain.warnings(seen.name, windows.source)
    return [
        EvaluationReport(
            replace(request, activations=choice.activations),
            result,
            windows,
            prepared.baseline,
            warnings,
            shared,
            domain,
        )
        for choice, result in zip(choices, results, strict=True)
    ]


def plan_evaluation(request: EvaluationRequest) -> StreamPlan:
    """Plans the evaluation of a request that streams; reads no weights. Raises ToolkitError: see `run_evaluation`."""
    models, reference = _streamed(_prepare(request, None), [_choose_activations(request, SIXTEEN_BITS)])
    scorers = models if reference is None else [*models, reference]
    parts = [part for scorer in scorers for part in scorer.parts]
    target = scorers[0].model.loader.reader.target
    checkpoints = (scorer.model.loader.reader.checkpoint for scorer in scorers)
    spec, itemsize = scorers[0].model.config.spec, target.dtype.itemsize
    return StreamPlan(
        spec,
        tuple(ModelCost.of(spec, stored_tensors(checkpoint), itemsize) for checkpoint in checkpoints),
        sum(part.numel() for part in parts),
        max(part.numel() for part in parts),
        max(part.shape[1] for part in parts),
        target,
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request with its text."""

    request: EvaluationRequest
    config: dict[str, Any]
    baseline: Path | Server | None
    tokenizer: Any
    windows: Windows
    seen: SeenText | None
    sample: Windows | None
    warnings: tuple[str, ...]

    @property
    def as_dense(self) -> bool:
        """Whether the baseline is compared with as the run read it, whatever kernels would make of it: a quantized
        source."""
        source = recorded_source(self.config)
        return source is not None and isinstance(self.baseline, Path) and source.resolve() == self.baseline.resolve()


def _prepare(request: EvaluationRequest, calibration: SequenceSet | None) -> _Prepared:
    """Finds the baseline and cuts the text; see `run_evaluation`."""
    _check_choices(request)
    if not request.folders:
        problem = "two servers say nothing of their tokenizer"
        raise DataError(problem, "Name a folder that has it with --tokenizer")
    folder = request.folders[0]
    config = read_config(folder)
    baseline, warnings = _find_baseline(request, config)
    tokenizer = load_tokenizer(request.tokenizer or folder)
    # Servers compute a token after the prompt.
    longest = (context_length(config) or request.length + 1) - bool(request.servers)
    length = min(request.length, longest)
    if length < request.length:
        warnings += (f"windows have {length} tokens, the model's context, not --max-seq-length {request.length}",)
    windows = cut_windows(load_texts(request.data), tokenizer, length=length, max_tokens=request.max_tokens)
    check_token_ids(windows.tokens, config, folder)
    if isinstance(baseline, Path):
        check_same_tokens(windows, tokenizer, baseline)
    warnings += tuple(f"{server}: {_BOUND}" for server in request.servers)
    seen = SeenText.of(calibration) if calibration else SeenText.recorded(compression_block(config), tokenizer)
    sample = None if request.servers else domain_sample(seen)
    return _Prepared(request, config, baseline, tokenizer, windows, seen, sample, warnings)


_BOUND = (
    f"its {TOP_TOKENS} most likely tokens are known, and all others are compared as one: KL is a lower bound, and the "
    "acceptance an upper bound"
)


def _choose_activations(request: EvaluationRequest, asked: str) -> ActivationChoice:
    from runtime.activations import ActivationChoice, choose_activations

    if request.backend != "runtime" or isinstance(request.model, Server):
        return ActivationChoice(request.kernels)
    if asked == AUTO and request.kernels == AUTO and PackedCheckpoint.open(request.model).inputs:
        asked = AS_STORED
    return choose_activations(request.model, asked, kernels=request.kernels, **request.options)


def _kept_inputs(request: EvaluationRequest, choices: Sequence[ActivationChoice]) -> tuple[str, ...]:
    """Returns a warning where inputs keep 16 bits that the checkpoint rounds."""
    if isinstance(request.model, Server):
        return ()
    stored = PackedCheckpoint.open(request.model).describe_inputs()
    if not stored or all(choice.rounds_inputs for choice in choices):
        return ()
    return (f"inputs keep 16 bits, where the checkpoint rounds them: {stored} (--activations {AS_STORED})",)


@contextmanager
def _scorers(
    prepared: _Prepared, choices: Sequence[ActivationChoice], report: Report
) -> Iterator[tuple[Sequence[Scorer], Scorer | None]]:
    """Opens the model with each form of activations and its baseline, and streams the text through them where that is
    asked for."""
    request, baseline = prepared.request, prepared.baseline
    if request.streaming is not None:
        with request.streaming.scorers(*_streamed(prepared, choices), report) as scorers:
            yield scorers
        return
    forms: dict[str, Any] = request.options | request.forms
    models = [_open(prepared, request.model, forms | {"kernels": choice.kernels}) for choice in choices]
    dense = request.options | {"kernels": AS_STORED, "as_dense": prepared.as_dense}
    yield models, _open(prepared, baseline, dense) if baseline else None


def _open(prepared: _Prepared, source: Path | Server, options: dict[str, Any]) -> Scorer:
    if isinstance(source, Server):
        return ServerScorer(source, prepared.tokenizer)
    return open_scorer(source, prepared.request.backend, **options)


def _streamed(
    prepared: _Prepared, choices: Sequence[ActivationChoice]
) -> tuple[list[StreamedScorer], StreamedScorer | None]:
    """Opens the model with each form of activations and its baseline; reads no weights. Raises DataError for a request
    that does not stream."""
    from runtime.model.streamed import StreamedModel

    request, baseline, options = prepared.request, prepared.baseline, prepared.request.options
    if request.streaming is None:
        raise DataError("only streamed evaluations are planned", "Add --stream, or leave --dry-run out")
    if isinstance(request.model, Server) or isinstance(baseline, Server):
        raise DataError("the layers of a server cannot be streamed", "Leave --stream out")
    models = [StreamedModel.open(request.model, kernels=choice.kernels, **options) for choice in choices]
    check_states(models[0].config, request.model, request.state_dtype)
    opened = (
        models
        if baseline is None
        else [
            *models,
            StreamedModel.open(baseline, kernels=AS_STORED, as_dense=prepared.as_dense, **options),
        ]
    )
    largest = max(model.config.spec.vocab_size for model in opened)
    alone = batches(prepared.windows.tokens, largest)
    # The baseline is compared with the calibration text, or the model where there is none.
    sampled = opened[-1 if baseline else 0].config.spec.vocab_size
    texts = alone if prepared.sample is None else (*alone, *batches(prepared.sample.tokens, sampled))
    folder, first = request.streaming.folder, texts if baseline is None else alone
    scorers = [
        StreamedScorer.of(model, folder / name, seen, **request.forms)
        for model, name, seen in zip(models, ("model", f"model-{EIGHT_BITS}"), (first, alone), strict=False)
    ]
    return scorers, None if baseline is None else StreamedScorer.of(opened[-1], folder / "baseline", texts)


def record_states(report: EvaluationReport) -> MeasuredStates:
    """Writes the cost of recurrent states into the config.json of a checkpoint that was its own baseline. Raises
    DataError: the checkpoint is in the hub's cache, whose files must stay as they are."""
    request = report.request
    if isinstance(request.model, Server):
        raise DataError(f"{request.model} has no config.json to write to", "Name the folder that is served")
    if model := HubModel.of_cached(request.model):
        problem = f"{model} is in the cache of the hub, whose files stay as they are"
        raise DataError(problem, f"Make a folder of your own: hf download {model.repo} --local-dir FOLDER")
    measured = MeasuredStates.of(request.state_dtype, report.to_dict())
    write_config(request.model, with_measured_states(read_config(request.model), measured))
    return measured


def recorded_source(config: dict[str, Any]) -> Path | None:
    """Returns the recorded source of a packed checkpoint, which may not exist any more; None for a dense checkpoint."""
    if (name := compression_block(config).get("source")) is None:
        return None
    source = find_source(name)
    return folder_of(source) if source.exists() else source


def _check_choices(request: EvaluationRequest) -> None:
    choices = {
        "backend": (request.backend, BACKENDS),
        "dtype": (request.dtype, DTYPES),
        "state-dtype": (request.state_dtype, STATE_DTYPES),
        "activations": (request.activations, ACTIVATIONS),
    }
    for option, (value, known) in choices.items():
        if value not in known:
            raise DataError(f"{option} {value!r} is unknown", f"Use --{option} " + " or ".join(known))
    if request.backend == "runtime":
        return
    refusals = (
        (not request.kv_cache.is_exact, f"cannot read keys and values as {request.kv_cache}", ", or --kv-cache 16bit"),
        (request.state_dtype != STATE_FLOAT32, f"keeps no states in {request.state_dtype}", ""),
        (request.activations in (EIGHT_BITS, AS_STORED), "does not round activations", ""),
        (request.kernels != "auto", f"has no kernels {request.kernels}", ""),
        (request.streaming is not None, "computes whole models only", ", or leave --stream out"),
    )
    for refused, problem, instead in refusals:
        if refused:
            raise DataError(f"{request.backend} {problem}", f"Use --backend runtime{instead}")


def _padding(model: int, baseline: int) -> tuple[str, ...]:
    """Returns a warning where vocabularies differ, which they do by padding only."""
    if model == baseline:
        return ()
    first = min(model, baseline)
    return (f"the model has {model} tokens and the baseline {baseline}: the first {first} of both are compared",)


def _find_baseline(request: EvaluationRequest, config: dict[str, Any]) -> tuple[Path | Server | None, tuple[str, ...]]:
    """Returns the baseline, and a warning when the recorded one does not exist any more."""
    if request.baseline is not None:
        return request.baseline, ()
    source = recorded_source(config)
    if source is None or source.exists():
        return source, ()
    return None, (f"the source {source} is not there any more: no baseline and no KL (name it with --baseline)",)


def quick_check(
    packed: Path,
    source: Path,
    tokens: int = QUICK_TOKENS,
    calibration: SequenceSet | None = None,
    streaming: Streaming | None = None,
    on_progress: Report = lambda _what, _done, _all: None,
    say: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Measures perplexity and KL of a new checkpoint against its source on a fixed slice of the default text, as it
    would be served on this machine. On a CPU that decides the form of activations. Raises CheckpointError: the packed
    checkpoint does not compute, or both models do not fit in memory and cannot be streamed. `streaming`: in use where
    both models do not fit in memory; None refuses that."""
    from runtime.activations import can_round_activations

    length = min(DEFAULT_LENGTH, context_length(read_config(packed)) or DEFAULT_LENGTH)
    request = EvaluationRequest(packed, source, length=length, max_tokens=tokens, backend=default_backend(packed))
    device, needed = resolve_device("auto"), both_bytes(source)
    if streaming is None or request.backend != "runtime":
        remedy = "Run compress eval on a machine with more memory"
        require_memory("the check holds the dense and the packed model", needed, device, remedy)
    elif needed > (free := available_bytes(device)):
        taken = f"the dense and the packed model take about {format_bytes(needed)}, {format_bytes(free)} are free"
        say(f"quality check: {taken} on {device}: one layer at a time")
        request = replace(request, streaming=streaming)
    can_round = request.backend == "runtime" and can_round_activations(packed)
    forms = (SIXTEEN_BITS, EIGHT_BITS) if can_round else (SIXTEEN_BITS,)
    return _gated(run_evaluations(request, forms, on_progress, calibration))


def _gated(reports: Sequence[EvaluationReport]) -> dict[str, Any]:
    """Returns the report of the form that is served, with the KL of both where there are two."""
    if len(reports) == 1:
        return reports[0].to_dict() | {ACTIVATIONS_MEASURED_KEY: None}
    exact, rounded = (report.to_dict() for report in reports)
    measured = MeasuredActivations.of(exact["kl_mean"], rounded["kl_mean"], exact)
    return (rounded if measured.is_within_limit else exact) | {ACTIVATIONS_MEASURED_KEY: asdict(measured)}


def both_bytes(source: Path) -> int:
    """Returns the bytes of two whole models."""
    from runtime.model.loader import resolve_dtype

    files, config = open_source(source)
    item_bytes = resolve_dtype("auto", dtype_name(config), resolve_device("auto")).itemsize
    return 2 * item_bytes * sum(math.prod(files.shape(name)) for name in files.names())
