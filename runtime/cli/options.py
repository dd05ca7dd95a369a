"""Options that several commands share, under the same names everywhere. Free of torch."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.common.cli import DEMO_NAME, demo_model_path
from compress.common.errors import CheckpointError, RequestError, ToolkitError
from runtime.core.config import RuntimeConfig

if TYPE_CHECKING:
    from runtime.bench.load import Lengths, Workload
    from runtime.bench.run import Load
    from runtime.core.request import Grammar


PACKED = Path("packed")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KiB|MiB|GiB)?", re.IGNORECASE)
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Device(StrEnum):
    """Where to compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Of activations, and of keys and values that are not quantized."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Kernels(StrEnum):
    """How quantized weights are multiplied."""

    AUTO = "auto"
    W4A8 = "w4a8"
    SEMI_STRUCTURED = "semi_structured"
    REFERENCE = "reference"


class KVFormat(StrEnum):
    """Form of keys and values; those of `compress.checkpoint.kv_cache.KV_FORMATS`, and auto."""

    AUTO = "auto"
    EXACT = "16bit"
    FP8 = "fp8"
    INT8 = "int8"
    K8V4 = "k8v4"
    INT4 = "int4"


class SpecVerify(StrEnum):
    """How guesses are verified."""

    EXACT = "exact"
    REJECTION = "rejection"


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `512MiB` or `1000000`. Raises typer.BadParameter for anything else."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 512MiB or 4GiB")
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])


ModelArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Checkpoint folder, packed or dense. Without it: the folder 'packed' if there is one, else the bundled "
        "demo model.",
        show_default=False,
    ),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to compute; auto takes a GPU if there is one.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of activations and KV cache; auto: the checkpoint's.")]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        "--linear-backend",
        help="auto: the fastest that fit; w4a8: activations in 8 bits, faster and less exact; semi_structured: 2:4 "
        "weights in 16 bits by a GPU's sparse tensor cores; reference: plain torch, the oracle.",
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", min=0, help="Makes sampling reproducible.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens of this joint probability.")]
TopKOption = Annotated[int, typer.Option("--top-k", min=0, help="Keep this many tokens; 0 keeps all.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="Drop tokens less likely than this times the best.")]
ContextOption = Annotated[
    int | None,
    typer.Option("--max-model-len", min=2, help="Longest prompt plus output in tokens; default: the model's context."),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--kv-memory",
        parser=parse_size,
        metavar="SIZE",
        help="Memory of the KV cache, e.g. 4GiB. Default: 512MiB; on a GPU what weights and steps leave.",
        show_default=False,
    ),
]
HostMemoryOption = Annotated[
    int,
    typer.Option(
        "--kv-offload",
        parser=parse_size,
        metavar="SIZE",
        help="Host memory for prefixes that the KV cache has no room for, e.g. 4GiB; 0 is off.",
    ),
]
KVFormatOption = Annotated[
    KVFormat,
    typer.Option(
        "--kv-cache",
        help="Form of keys and values: 16bit (the dtype), fp8, int8, k8v4 (keys int8, values int4) or int4; auto: what "
        "the checkpoint records, else 16bit.",
    ),
]
KVRotateOption = Annotated[
    bool | None,
    typer.Option(
        "--kv-rotate/--no-kv-rotate",
        help="Spread outliers of quantized keys by a Hadamard matrix. Default: for int4.",
        show_default=False,
    ),
]
KVSinksOption = Annotated[
    int | None,
    typer.Option("--kv-sinks", min=0, metavar="TOKENS", help="First tokens whose keys and values stay in 16 bits."),
]
KVRecentOption = Annotated[
    int | None,
    typer.Option(
        "--kv-residual-length",
        min=0,
        metavar="TOKENS",
        help="Last tokens that every token sees in 16 bits: most of the quality back for a few MiB per sequence, but "
        "prefixes cannot be cached then.",
    ),
]
SequencesOption = Annotated[int, typer.Option("--max-num-seqs", min=1, help="Computed together at most.")]
SpeculateOption = Annotated[
    str,
    typer.Option(
        "--speculative-model",
        metavar="DRAFTER",
        help="Guess several tokens at once and verify them together: ngram (repeats the text), ngram-tree (several "
        "earlier continuations at once), self:2bit, self:3bit (the model rounded further), self:skip or self:skip=N "
        "(without N layers), demo (the bundled draft model), or the folder of a smaller checkpoint with the same "
        "tokenizer. Switches itself off where it does not pay.",
        show_default=False,
    ),
]
DraftTokensOption = Annotated[
    int, typer.Option("--num-speculative-tokens", min=1, max=16, help="Guesses in a row at most.")
]
DraftModeOption = Annotated[
    SpecVerify,
    typer.Option(
        "--spec-verify",
        help="exact: the same tokens as without drafting, up to rounding; rejection: the same distribution.",
    ),
]
SinksOption = Annotated[
    int,
    typer.Option(
        "--attention-sinks", min=0, help="First tokens that stay visible beside --attention-window; 4 are enough."
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        "--attention-window",
        min=1,
        metavar="TOKENS",
        help="Serve endless streams (StreamingLLM): tokens see the --attention-sinks and so many last tokens, memory "
        "does not grow with the text, and --max-model-len may exceed the model's context.",
        show_default=False,
    ),
]


def resolve_model(model: Path | None) -> tuple[Path, str]:
    """The folder to load and how to name it to the user, with the reason when none was given.

    Raises:
        CheckpointError: the given path is no folder.
    """
    if model is None and PACKED.is_dir():
        return PACKED, f"{PACKED}/ (found here; no model was named)"
    if model is None:
        return demo_model_path(), f"{DEMO_NAME} (no model was named and there is no folder '{PACKED}')"
    if not model.is_dir():
        first = "Make it with compress quantize, name" if model == PACKED else "Name"
        remedy = f"{first} a folder with config.json and safetensors files, or none to use the bundled demo model"
        raise CheckpointError(f"there is no folder {model}", remedy)
    return model, str(model)


def check_targets(*files: Path | None) -> None:
    """Refuses, before anything runs, files that could not be written in the end."""
    for file in files:
        if file is not None and file.is_dir():
            raise ToolkitError(f"{file} is a folder", "Name a file in it")
        if file is not None and not file.absolute().parent.is_dir():
            raise ToolkitError(f"there is no folder {file.parent} for {file.name}", "Make it, or name another file")


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Where and how to compute."""

    device: DeviceOption = Device.AUTO
    dtype: DtypeOption = Dtype.AUTO
    linear_backend: KernelsOption = Kernels.AUTO


@dataclass(frozen=True, slots=True)
class KVOptions:
    """Form of keys and values."""

    kv_cache: KVFormatOption = KVFormat.AUTO
    kv_rotate: KVRotateOption = None
    kv_sinks: KVSinksOption = None
    kv_residual_length: KVRecentOption = None


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What tokens see."""

    max_model_len: ContextOption = None
    attention_sinks: SinksOption = 0
    attention_window: WindowOption = None


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What guesses tokens, and how guesses are verified."""

    speculative_model: SpeculateOption = ""
    num_speculative_tokens: DraftTokensOption = 4
    spec_verify: DraftModeOption = SpecVerify.EXACT


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What many requests share."""

    kv_memory_bytes: MemoryOption = None
    kv_offload_bytes: HostMemoryOption = "0"  # type: ignore[assignment]  # Typer parses defaults too
    max_num_seqs: SequencesOption = 64


@dataclass(frozen=True, slots=True)
class TruncationOptions:
    """Which tokens may be drawn."""

    top_p: TopPOption = 1
    top_k: TopKOption = 0
    min_p: MinPOption = 0


@dataclass(frozen=True, slots=True)
class PenaltyOptions:
    """What the text so far makes less likely."""

    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Divides the logits of tokens in prompt or text; 1 is off.")
    ] = 1
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Lowers the logits of tokens that are in the text.")
    ] = 0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Lowers them as many times as they are in the text.")
    ] = 0


def runtime_config(
    *groups: ComputeOptions | KVOptions | ContextOptions | DraftOptions | PoolOptions, **others: Any
) -> RuntimeConfig:
    """The configuration that groups and other fields ask for: fields of groups have the names of the configuration."""
    chosen = {name: value for group in groups for name, value in asdict(group).items()}
    return RuntimeConfig(**chosen, **others)


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Where clients reach the server, with which key, and by what name they call the model."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key that clients must send.")] = None
    name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model name for clients; default: the folder's.")
    ] = None


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """What becomes `runtime.server.limits.Limits`, whose names the fields have; the context length comes later."""

    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Running and waiting at most; more get status 429.")
    ] = 256
    max_body_bytes: Annotated[
        int, typer.Option("--max-body", parser=parse_size, metavar="SIZE", help="Longest request body.")
    ] = "4MiB"  # type: ignore[assignment]  # Typer parses defaults too
    queue_seconds: Annotated[
        float, typer.Option("--queue-timeout", min=0.1, help="Seconds until the first token; later is status 503.")
    ] = 600
    request_seconds: Annotated[
        float, typer.Option("--request-timeout", min=0.1, help="Seconds until the last token; later is status 504.")
    ] = 3600
    client_seconds: Annotated[
        float, typer.Option("--client-timeout", min=0.1, help="Seconds for clients to send a request or read on.")
    ] = 30


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """What the text must look like; one of the two at most."""

    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", metavar="FILE", help="The text must be JSON of this schema.")
    ] = None
    regex: Annotated[
        str | None, typer.Option("--regex", help="The text must be matched by this regular expression, all of it.")
    ] = None

    def grammar(self) -> Grammar | None:
        """What the options say. Raises RequestError when both are given, or the file cannot be read."""
        from runtime.core.request import Grammar, GrammarKind

        if self.json_schema is not None and self.regex is not None:
            raise RequestError("--json-schema and --regex exclude each other", "Give one of them")
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.json_schema is None:
            return None
        try:
            return Grammar(GrammarKind.JSON_SCHEMA, self.json_schema.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"{self.json_schema} cannot be read: {error}", "Name a file with a JSON schema"
            ) from error


DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which server is measured: a running one, or an own one."""

    url: Annotated[
        str | None, typer.Option("--url", help="A running server; without it one is started for the time.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key that the server at --url asks for.")] = None
    serve_options: Annotated[
        str, typer.Option("--serve", metavar="OPTIONS", help="For the own server, e.g. '--max-num-seqs 16'.")
    ] = ""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests follow each other."""

    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="Closed loop: so many clients. Default: 8.")
    ] = None
    rate: Annotated[
        float | None, typer.Option("--rate", "-r", min=1e-3, help="Open loop: Poisson arrivals, so many a second.")
    ] = None

    def load(self) -> Load:
        """What the options say. Raises ToolkitError for both at once."""
        from runtime.bench.run import Load

        if self.rate is not None and self.concurrency is not None:
            raise ToolkitError("--rate and --concurrency exclude each other", "Give one: open or closed loop")
        return Load(self.concurrency or DEFAULT_CONCURRENCY, self.rate)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Which requests are sent."""

    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests to measure.")] = 64
    input_lengths: Annotated[
        str, typer.Option("--input", help="Own prompt tokens of a request: 128, or 32:256 for uniform.")
    ] = "32:256"
    output_lengths: Annotated[str, typer.Option("--output", help="Tokens of an answer, exactly: 64, or 32:256.")] = (
        "32:256"
    )
    shared_prefix: Annotated[
        int, typer.Option("--shared-prefix", min=0, help="Tokens in front of every prompt, the same for all.")
    ] = 0
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help='JSON lines {"prompt": ...} or {"messages": [...]} instead of the manual.'),
    ] = None
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy.")] = 0.0
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of lengths, texts and arrivals.")] = 0

    def workload(self) -> Workload:
        """What the options say. Raises typer.BadParameter for what is no range of token counts."""
        from runtime.bench.load import Workload

        return Workload(
            parse_lengths("--input", self.input_lengths),
            parse_lengths("--output", self.output_lengths),
            self.requests,
            self.shared_prefix,
            self.temperature,
            self.seed,
        )


def parse_lengths(option: str, text: str) -> Lengths:
    """Raises typer.BadParameter for what is no range of token counts."""
    from runtime.bench.load import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: write tokens as 128, or as 32:256 for uniform") from error
