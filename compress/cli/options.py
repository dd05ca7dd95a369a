"""Options that several commands share, spelled the same everywhere. Imports nothing heavy: help must be instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.kv_cache import AUTO, KVCacheScheme, stored_kv_cache, wished_kv_cache
from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.common.cli import model_folder
from compress.common.errors import DataError, RecipeError
from compress.common.files import PARTIAL_SUFFIX, in_home
from compress.recipe import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationOptions, parse_size
from compress.search.space import Goal

if TYPE_CHECKING:
    from compress.evaluate.session import EvaluationRequest
    from compress.evaluate.streamed import Streaming


Model = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a dense Hugging Face model, or one of the bundled: demo or demo-mixture. Default: demo.",
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
    typer.Option("--resume/--restart", help="Continue unfinished progress of this output, or throw it away."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would happen to every tensor, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python files of the model folder. Read them first.")
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="Layer to leave as it is: a name (down_proj), a glob, or re:PATTERN. Repeatable."),
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
Length = Annotated[int, typer.Option("--max-seq-length", help="Tokens of a calibration sequence.")]
Seed = Annotated[int, typer.Option("--seed", help="Decides which calibration sequences are taken.")]

DEFAULT_OUT = Path("packed")


def check_rounded(bits: int | None, group_size: int | None) -> None:
    """Raises RecipeError for groups of weights that are not rounded."""
    if bits is None and group_size is not None:
        raise RecipeError(f"--group-size {group_size} needs --bits", "Add --bits 4, or leave it out")


DEFAULT_TEXT = "bundled"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Text to calibrate on."""

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
        help="Default form of keys and values, measured on long texts: auto (smallest within a mean KL of 0.01), "
        "int4, k8v4, int8 or fp8. Default: 16 bits, not measured.",
        show_default=False,
    ),
]
MtpBits = Annotated[
    int | None,
    typer.Option(
        "--mtp-bits",
        metavar="BITS",
        help="Bits of the head of multi-token prediction, 2 to 8, kept only if its drafts are accepted nearly as often "
        "(95 %) as those of the dense head. Default: it stays dense.",
        show_default=False,
    ),
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="First turn the residual stream by a Hadamard matrix, folded into the weights: better with one scale "
        "per row, and with outlier channels.",
    ),
]


@dataclass(frozen=True, slots=True)
class EndOptions:
    """Bits of the matrices outside of the blocks."""

    head_bits: Annotated[
        int | None,
        typer.Option(help="Bits of an output head that is not the embedding. Default: 16.", show_default=False),
    ] = None
    embedding_bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of the token embedding, and of the head where that is the embedding. Default: 16, which every "
            "engine loads; 8 costs next to nothing, for this runtime only.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The target of a search: one of the three."""

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
        """Build the goal. Raises RecipeError."""
        size = None if self.target_size is None else parse_size(self.target_size)
        return Goal(self.target_bpw, size, self.max_kl)


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """Files of a search."""

    sensitivities: Annotated[
        Path | None,
        typer.Option(help="File of measured figures, read and added to. Default: OUT.sensitivities.json."),
    ] = None
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Recipe to write. Default: OUT.yaml.")] = None
    recipe_only: Annotated[bool, typer.Option("--recipe-only", help="Write the recipe, and compress nothing.")] = False


KernelsMode = Annotated[
    str,
    typer.Option(
        "--linear-backend",
        metavar="MODE",
        help="How weights of the model are multiplied: auto; w4a8 (activations in 8 bits, on CPUs); reference. "
        "The baseline stays as it is.",
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
        Path | None, typer.Option(help="Dense model to compare with. Default: the source the checkpoint records.")
    ] = None
    length: Annotated[int, typer.Option("--max-seq-length", help="Tokens of a window.")] = 512
    tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens. Default: all the text.")] = None
    backend: Annotated[str, typer.Option(help="runtime (what is served) or transformers (the cross-check).")] = (
        "runtime"
    )
    device: Device = "auto"
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float32, ...")] = "auto"
    trust_remote_code: TrustRemoteCode = False

    def request(
        self, model: Path, kv_cache: KVCacheScheme, kernels: str, state_dtype: str, streaming: Streaming | None
    ) -> EvaluationRequest:
        """Build the request for the checkpoint in the folder `model`. Imports torch."""
        from compress.checkpoint.gguf.folder import folder_of
        from compress.evaluate.session import EvaluationRequest

        return EvaluationRequest(
            model,
            folder_of(model_folder(self.baseline)) if self.baseline else None,
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
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Evaluation of models that do not fit in memory."""

    stream: Annotated[
        bool,
        typer.Option(
            "--stream",
            help="Pass the text through one layer of one model at a time: little memory for any model, and the same "
            "figures.",
        ),
    ] = False
    stream_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for hidden states between layers, gone at the end. Default: MODEL.eval.partial here.",
            show_default=False,
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume/--restart", help="Continue an interrupted --stream, or begin it anew.")
    ] = True
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show time and memory of --stream, and stop.")] = False

    def streaming(self, model: Path) -> Streaming | None:
        """Build what streams the checkpoint in the folder `model`; None without --stream. Imports torch."""
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
            help="Round recurrent states to bfloat16 or float16 after every token. The baseline keeps float32.",
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
        """Raises DataError where there is nothing to record."""
        if self.record and self.state_dtype == STATE_FLOAT32:
            raise DataError("states in float32 cost nothing to record", "Add --state-dtype bfloat16 or float16")


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """Format of the KV cache of the measured model."""

    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Read keys and values as a cache gives them back: 16bit, fp8, int8, k8v4 or int4; auto: as the "
            "checkpoint records, else 16bit. The baseline stays as it is.",
        ),
    ] = AUTO
    kv_rotate: Annotated[
        bool | None, typer.Option("--kv-rotate/--no-kv-rotate", help="Default: for int4.", show_default=False)
    ] = None
    kv_sinks: Annotated[int | None, typer.Option(min=0, help="First tokens that stay in 16 bits.")] = None
    kv_residual_length: Annotated[int | None, typer.Option(min=0, help="Last tokens that stay in 16 bits.")] = None

    def scheme(self, config: dict[str, Any]) -> KVCacheScheme:
        """Build the scheme for the checkpoint with this `config.json`. Raises SchemeError."""
        return wished_kv_cache(
            stored_kv_cache(config), self.kv_cache, self.kv_rotate, self.kv_sinks, self.kv_residual_length
        )
