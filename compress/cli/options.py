"""Options that several commands share. Imports no heavy modules, which keeps --help fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.kv_cache import AUTO, KVCacheScheme, stored_kv_cache, wished_kv_cache
from compress.checkpoint.state_dtype import STATE_FLOAT32
from compress.common.cli import option
from compress.common.errors import DataError, RecipeError
from compress.common.files import PARTIAL_SUFFIX, in_home
from compress.common.model_folder import PACKED
from compress.evaluate.gate import describe_gate
from compress.targets import IGNORE_HELP

if TYPE_CHECKING:
    from compress.evaluate.server import Server
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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Ignore = Annotated[list[str] | None, typer.Option("--ignore", help=IGNORE_HELP)]
Gate = Annotated[str, typer.Option("--gate", metavar="NAME=LIMIT,...", help=describe_gate(), show_default=False)]
Seed = Annotated[int, typer.Option("--seed", help="Seed for choosing calibration sequences.")]

DEFAULT_OUT = PACKED
CODE_HELP = "Execute Python files of the model folder. Read them first."


def check_rounded(bits: int | None, group_size: int | None) -> None:
    """Raises RecipeError for a group size without bits."""
    if bits is None and group_size is not None:
        raise RecipeError(f"--group-size {group_size} needs --bits", "Add --bits 4, or leave it out")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a run."""

    devices: str = option(
        "--devices",
        "--device",
        default="auto",
        help="auto, cpu, cuda, or several that share the work, such as cuda:0,cuda:1; the result has the same bytes.",
    )
    dtype: str = option(
        "--dtype", default="auto", help="Dtype of the calibration passes: auto, bfloat16, float16 or float32."
    )
    resume: bool = option(
        "--resume/--restart", default=True, help="Resume unfinished progress of this output, or discard it."
    )
    dry_run: bool = option("--dry-run", default=False, help="Print the plan for every tensor, and stop.")
    as_json: bool = option("--json", default=False, help="Print one JSON object instead of tables.")
    trust_remote_code: bool = option("--trust-remote-code", default=False, help=CODE_HELP)


@dataclass(frozen=True, slots=True)
class EndOptions:
    """Bits of the matrices outside the blocks."""

    head_bits: int | None = option(
        default=None, help="Bits of an output head that is not tied to the embedding. Default: 16."
    )
    embedding_bits: int | None = option(
        default=None,
        help="Bits of the token embedding, and of a head tied to it. Default: 16, which every engine loads; 8 "
        "loses almost no quality, but loads in this runtime only.",
    )


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """Files that a search reads and writes."""

    sensitivities: Path | None = option(
        default=None, help="File of measurements, read and extended. Default: OUT.sensitivities.json."
    )
    recipe: Path | None = option("--recipe", default=None, help="Recipe to write. Default: OUT.yaml.")
    recipe_only: bool = option("--recipe-only", default=False, help="Write the recipe without compressing.")


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
    """Text and backend of an evaluation."""

    data: str = option(
        default="pydoc",
        metavar="NAME|PATH",
        help="Text: pydoc (inside every Python), bundled, a .txt, .jsonl or .parquet file, or a datasets name.",
    )
    length: int = option("--max-seq-length", default=512, help="Tokens per window.")
    tokens: int | None = option(default=None, help="Stop after this many tokens. Default: the whole text.")
    backend: str = option(default="runtime", help="runtime (the served model) or transformers (for cross-checking).")
    device: str = option("--device", default="auto", help="auto, cpu or cuda.")
    dtype: str = option(default="auto", help="auto (the checkpoint's), bfloat16, float32, ...")
    trust_remote_code: bool = option("--trust-remote-code", default=False, help=CODE_HELP)
    activations: str = option(
        default=AUTO,
        metavar="FORM",
        help="Activations that packed weights are multiplied by: 16bit, 8bit (on a CPU), stored: rounded as the "
        "checkpoint says, or auto: stored where the checkpoint says something, else as served. Does not affect the "
        "baseline.",
    )

    def request(self, model: Path | Server, baseline: Path | Server | None, **options: Any) -> EvaluationRequest:
        """Builds the request; `options`: its other fields. Imports torch."""
        from compress.evaluate.session import EvaluationRequest

        return EvaluationRequest(
            model,
            baseline,
            self.data,
            self.length,
            self.tokens,
            self.backend,
            self.device,
            self.dtype,
            trust_remote_code=self.trust_remote_code,
            **{"activations": self.activations} | options,
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options for evaluating models that do not fit in memory."""

    stream: bool = option(
        "--stream",
        default=False,
        help="Run the text through one layer of one model at a time: needs little memory and gives the same figures.",
    )
    stream_dir: Path | None = option(
        default=None,
        help="Folder for hidden states between layers, removed at the end. Default: MODEL.eval.partial here.",
    )
    resume: bool = option("--resume/--restart", default=True, help="Resume an interrupted --stream, or start over.")
    dry_run: bool = option("--dry-run", default=False, help="Show time and memory of --stream, and stop.")

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

    state_dtype: str = option(
        default=STATE_FLOAT32,
        metavar="DTYPE",
        help="Round recurrent states to bfloat16 or float16 after every token. The baseline uses float32.",
    )
    record: bool = option(
        "--record",
        default=False,
        help="Compare with the same checkpoint with states in float32, and write the cost of --state-dtype into "
        "its config.json: `runtime serve --state-dtype` requires it.",
    )

    def check(self) -> None:
        """Raises DataError if there is nothing to record."""
        if self.record and self.state_dtype == STATE_FLOAT32:
            raise DataError("states in float32 cost nothing to record", "Add --state-dtype bfloat16 or float16")


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """Format of the KV cache of the measured model."""

    kv_cache: str = option(
        default=AUTO,
        metavar="FORMAT",
        help="KV cache format: 16bit, fp8, int8, k8v4 or int4; auto: as recorded in the checkpoint, else 16bit. "
        "Does not affect the baseline.",
    )
    kv_rotate: bool | None = option("--kv-rotate/--no-kv-rotate", default=None, help="Default: on for int4.")
    kv_sinks: int | None = option(default=None, min=0, help="First tokens that stay in 16 bits.")
    kv_residual_length: int | None = option(default=None, min=0, help="Last tokens that stay in 16 bits.")

    def scheme(self, config: dict[str, Any]) -> KVCacheScheme:
        """Builds the scheme for the checkpoint with this `config.json`. Raises SchemeError."""
        return wished_kv_cache(
            stored_kv_cache(config), self.kv_cache, self.kv_rotate, self.kv_sinks, self.kv_residual_length
        )
