"""Options that several commands share. Imports no heavy modules, which keeps --help fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.kv_cache import AUTO, KVCacheScheme, stored_kv_cache, wished_kv_cache
from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.common.errors import DataError, RecipeError
from compress.common.files import PARTIAL_SUFFIX, in_home
from compress.common.model_folder import PACKED
from compress.recipe import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationOptions, parse_size
from compress.search.space import Goal

if TYPE_CHECKING:
    from compress.evaluate.session import EvaluationRequest
    from compress.evaluate.streamed import Streaming


Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Dense Hugging Face model: a folder, a name of the hub (ORG/NAME[@REVISION]), a GGUF file (FILE or "
        "ORG/NAME:FILE), or one of the bundled: demo or demo-mixture. Default: demo.",
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder to write; must not exist.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="Dtype of the calibration passes: auto, bfloat16, float16 or float32."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume/--restart", help="Resume unfinished progress of this output, or discard it."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan for every tensor, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Execute Python files of the model folder. Read them first.")
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="Layer to leave unchanged: a name (down_proj), a glob, or re:PATTERN. Repeatable."),
]
CalibrationText = Annotated[
    str,
    typer.Option(
        "--calibration",
        metavar="TEXT[:WEIGHT,...]",
        help="Text to calibrate on: bundled, self (the model writes it), a .txt, .jsonl or .parquet file, a datasets "
        "name, or several with weights: bundled:0.5,chats.jsonl:0.5",
    ),
]
Samples = Annotated[int, typer.Option("--num-calibration-samples", help="Calibration sequences.")]
Length = Annotated[int, typer.Option("--max-seq-length", help="Tokens per calibration sequence.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed for choosing calibration sequences.")]

DEFAULT_OUT = PACKED


def check_rounded(bits: int | None, group_size: int | None) -> None:
    """Raises RecipeError for a group size without bits."""
    if bits is None and group_size is not None:
        raise RecipeError(f"--group-size {group_size} needs --bits", "Add --bits 4, or leave it out")


DEFAULT_TEXT = "bundled"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Calibration text."""

    calibration: CalibrationText = DEFAULT_TEXT
    samples: Samples = DEFAULT_SAMPLES
    length: Length = DEFAULT_LENGTH
    seed: Seed = 0

    @property
    def options(self) -> CalibrationOptions:
        return CalibrationOptions(self.calibration, self.samples, self.length)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a run."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    resume: Resume = True
    dry_run: DryRun = False
    as_json: AsJson = False
    trust_remote_code: TrustRemoteCode = False


KVDefault = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Default KV cache format, measured on long texts: auto (smallest within a mean KL of 0.01), "
        "int4, k8v4, int8 or fp8. Default: 16 bits, not measured.",
        show_default=False,
    ),
]
MtpBits = Annotated[
    int | None,
    typer.Option(
        "--mtp-bits",
        metavar="BITS",
        help="Bits of the multi-token prediction head, 2 to 8; applied only if its acceptance rate is at least 95 % "
        "of the dense head's. Default: the head stays dense.",
        show_default=False,
    ),
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="Rotate the residual stream by a Hadamard matrix first, folded into the weights: helps with one scale "
        "per row and with outlier channels.",
    ),
]


@dataclass(frozen=True, slots=True)
class EndOptions:
    """Bits of the matrices outside the blocks."""

    head_bits: Annotated[
        int | None,
        typer.Option(help="Bits of an output head that is not tied to the embedding. Default: 16.", show_default=False),
    ] = None
    embedding_bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of the token embedding, and of a head tied to it. Default: 16, which every engine loads; 8 "
            "loses almost no quality, but loads in this runtime only.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Target of a search: exactly one of three."""

    target_bpw: Annotated[
        float | None,
        typer.Option("--target-bpw", help="Best quality within this many bits per weight, scales included."),
    ] = None
    target_size: Annotated[
        str | None, typer.Option("--target-size", metavar="SIZE", help="Best quality within a size: 5GB, 800MB.")
    ] = None
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Least size whose measured KL to the dense model is at most this.")
    ] = None

    def goal(self) -> Goal:
        """Builds the goal. Raises RecipeError."""
        size = None if self.target_size is None else parse_size(self.target_size)
        return Goal(self.target_bpw, size, self.max_kl)


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """Files that a search reads and writes."""

    sensitivities: Annotated[
        Path | None,
        typer.Option(help="File of measurements, read and extended. Default: OUT.sensitivities.json."),
    ] = None
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Recipe to write. Default: OUT.yaml.")] = None
    recipe_only: Annotated[bool, typer.Option("--recipe-only", help="Write the recipe without compressing.")] = False


KernelsMode = Annotated[
    str,
    typer.Option(
        "--linear-backend",
        metavar="NAME",
        help="Kernels of linear layers: auto, reference, or another name as for `runtime serve`. Does not affect the "
        "baseline.",
    ),
]


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Text, backend and baseline of an evaluation."""

    data: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="Text: pydoc (inside every Python), bundled, a .txt, .jsonl or .parquet file, or a datasets name.",
        ),
    ] = "pydoc"
    baseline: Annotated[
        Path | None, typer.Option(help="Dense model to compare with. Default: the source recorded in the checkpoint.")
    ] = None
    length: Annotated[int, typer.Option("--max-seq-length", help="Tokens per window.")] = 512
    tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens. Default: the whole text.")] = None
    backend: Annotated[str, typer.Option(help="runtime (the served model) or transformers (for cross-checking).")] = (
        "runtime"
    )
    device: Device = "auto"
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float32, ...")] = "auto"
    trust_remote_code: TrustRemoteCode = False
    activations: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="Activations that packed weights are multiplied by: 16bit, 8bit (on a CPU), stored: rounded as the "
            "checkpoint says, or auto: stored where the checkpoint says something, else as served. Does not affect the "
            "baseline.",
        ),
    ] = AUTO

    def request(
        self, model: Path, kv_cache: KVCacheScheme, kernels: str, state_dtype: str, streaming: Streaming | None
    ) -> EvaluationRequest:
        """Builds the request for the checkpoint in the folder `model`. Imports torch."""
        from compress.checkpoint.gguf.folder import folder_of
        from compress.evaluate.session import EvaluationRequest

        return EvaluationRequest(
            model,
            folder_of(self.baseline, code=self.trust_remote_code) if self.baseline else None,
            self.data,
            self.length,
            self.tokens,
            self.backend,
            self.device,
            self.dtype,
            kv_cache,
            kernels,
            self.trust_remote_code,
            state_dtype,
            streaming,
            self.activations,
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options for evaluating models that do not fit in memory."""

    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Run the text through one layer of one model at a time: needs little memory and gives the same "
            "figures.",
        ),
    ] = False
    stream_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for hidden states between layers, removed at the end. Default: MODEL.eval.partial here.",
            show_default=False,
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Resume an interrupted --stream, or start over.")
    ] = True
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show time and memory of --stream, and stop.")] = False

    def streaming(self, model: Path) -> Streaming | None:
        """Returns the streamed evaluation of the checkpoint in the folder `model`; None without --stream. Imports
        torch.
        """
        from compress.evaluate.streamed import Streaming

        folder = self.stream_dir or Path(f"{model.resolve().name}.eval{PARTIAL_SUFFIX}")
        return Streaming(in_home(folder), not self.resume) if self.stream else None


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Dtype of the recurrent states of the measured model."""

    state_dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Round recurrent states to bfloat16 or float16 after every token. The baseline uses float32.",
        ),
    ] = STATE_FLOAT32
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Compare with the same checkpoint with states in float32, and write the cost of --state-dtype into "
            "its config.json: `runtime serve --state-dtype` requires it.",
        ),
    ] = False

    def check(self) -> None:
        """Raises DataError if there is nothing to record."""
        if self.record and self.state_dtype == STATE_FLOAT32:
            raise DataError("states in float32 cost nothing to record", "Add --state-dtype bfloat16 or float16")


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """Format of the KV cache of the measured model."""

    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="KV cache format: 16bit, fp8, int8, k8v4 or int4; auto: as recorded in the checkpoint, else 16bit. "
            "Does not affect the baseline.",
        ),
    ] = AUTO
    kv_rotate: Annotated[
        bool | None, typer.Option("--kv-rotate/--no-kv-rotate", help="Default: on for int4.", show_default=False)
    ] = None
    kv_sinks: Annotated[int | None, typer.Option(min=0, help="First tokens that stay in 16 bits.")] = None
    kv_residual_length: Annotated[int | None, typer.Option(min=0, help="Last tokens that stay in 16 bits.")] = None

    def scheme(self, config: dict[str, Any]) -> KVCacheScheme:
        """Builds the scheme for the checkpoint with this `config.json`. Raises SchemeError."""
        return wished_kv_cache(
            stored_kv_cache(config), self.kv_cache, self.kv_rotate, self.kv_sinks, self.kv_residual_length
        )
