"""Options that several commands share, spelled the same everywhere. Imports nothing heavy: help must be instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.kv_cache import AUTO, KVCacheScheme, stored_kv_cache, wished_kv_cache
from compress.checkpoint.scheme import Scheme, Sparsity
from compress.common.errors import RecipeError
from compress.methods.base import make_options, quantization
from compress.recipe import (
    DEFAULT_LENGTH,
    DEFAULT_OUTLIER_FACTOR,
    DEFAULT_SAMPLES,
    DEFAULT_SPREAD,
    CalibrationOptions,
    PruneStage,
    QuantizeStage,
    Recipe,
    Stage,
    activation_bits_from,
    default_method,
    default_scheme,
    group_size_from,
)
from compress.search.space import Goal, parse_size

if TYPE_CHECKING:
    from compress.evaluate.session import EvaluationRequest


Model = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="Folder of a dense Hugging Face model. Default: the bundled demo model."),
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
Samples = Annotated[int, typer.Option("--samples", help="Calibration sequences.")]
Length = Annotated[int, typer.Option("--length", help="Tokens of a calibration sequence.")]
Seed = Annotated[int, typer.Option("--seed", help="Decides which calibration sequences are taken.")]

DEFAULT_OUT = Path("packed")


def check_rounded(bits: int | None, group_size: int | None) -> None:
    """Raises RecipeError for groups of weights that are not rounded."""
    if bits is None and group_size is not None:
        raise RecipeError(f"--group-size {group_size} means nothing without --bits", "Add --bits 4, or leave it out")


DEFAULT_TEXT = "bundled"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Text to calibrate on."""

    calibration: CalibrationText = DEFAULT_TEXT
    samples: Samples = DEFAULT_SAMPLES
    length: Length = DEFAULT_LENGTH
    seed: Seed = 0

    def recipe(self, stages: tuple[Stage, ...], name: str) -> Recipe:
        """Stages that calibrate on this text. Raises RecipeError, also where none does and a text is named."""
        recipe = Recipe(stages, self.options, self.seed, name=name)
        if self.calibration != DEFAULT_TEXT and not recipe.needs_calibration:
            problem = f"nothing in this run looks at the calibration text {self.calibration}"
            raise RecipeError(problem, "Leave --calibration out, or choose another --method")
        return recipe

    @property
    def options(self) -> CalibrationOptions:
        return CalibrationOptions(self.calibration, self.samples, self.length)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a recipe is carried out."""

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
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="First turn the residual stream by a Hadamard matrix, folded into the weights: better with one scale "
        "per row, and with outlier channels.",
    ),
]


@dataclass(frozen=True, slots=True)
class RoundingOptions:
    """What the linear layers are rounded to, and how. None is what the method is for."""

    method: Annotated[
        str | None,
        typer.Option(
            help="awq, gptq, gptaq (gptq that also makes up for the layers before), signround (gptq, then learned "
            "rounding: slow, best at 2 and 3 bits), smoothquant (W8A8), or without calibration rtn or hqq. "
            "Default: awq; with --fp8: rtn.",
            show_default=False,
        ),
    ] = None
    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight, 2 to 8. Default: 4; smoothquant: 8.", show_default=False)
    ] = None
    fp8: Annotated[
        bool,
        typer.Option(
            "--fp8",
            help="8-bit floats (e4m3) for weights and inputs in place of integers, for GPUs that multiply them "
            "(NVIDIA since Ada and Hopper). By rtn or smoothquant.",
        ),
    ] = False
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input columns that share a scale: 128, 64, 32, or -1 for one scale per output row. "
            "Default: 128; smoothquant: -1.",
            show_default=False,
        ),
    ] = None
    activation_bits: Annotated[
        int | None,
        typer.Option(
            help="8: inputs of the layers are rounded to 8 bits, token by token (W8A8). 16: they are not. "
            "Default: 16; smoothquant and --fp8: 8.",
            show_default=False,
        ),
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            help="SmoothQuant's exponent for all layers; default: searched for each. Of gptaq: the share of the drift "
            "of its inputs that a layer makes up for; default: 1.",
            show_default=False,
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(help="Steps in which signround learns the rounding of a block. Default: 200.", show_default=False),
    ] = None
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Fixed or stored zero points. Symmetric loads everywhere.")
    ] = True
    outlier_columns: Annotated[
        float | None,
        typer.Option(
            help="Share of the input columns (0.01), or how many, that stay in 16 bits beside the codes: those that "
            "cost most, or with 8-bit activations the largest. For this runtime only. Default: none.",
            show_default=False,
        ),
    ] = None

    def stage(self, ignore: tuple[str, ...]) -> QuantizeStage:
        """What the options say, for all layers but those that match `ignore`. Raises RecipeError, SchemeError."""
        return QuantizeStage(
            self._method,
            self.scheme,
            ignore=ignore,
            options=make_options(quantization(self._method), self._options),
            outlier_columns=self.outlier_columns,
        )

    @property
    def scheme(self) -> Scheme:
        """The numbers that weights become. Raises SchemeError."""
        default = default_scheme(self._method, self.fp8)
        return Scheme(
            default.bits if self.bits is None else self.bits,
            default.group_size if self.group_size is None else group_size_from(self.group_size),
            self.symmetric,
            default.activation_bits if self.activation_bits is None else activation_bits_from(self.activation_bits),
            fp8=self.fp8,
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {name: value for name, value in (("alpha", self.alpha), ("steps", self.steps)) if value is not None}

    @property
    def _method(self) -> str:
        return self.method or default_method(self.fp8)


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
class PruningOptions:
    """Which weights go."""

    method: Annotated[str, typer.Option(help="sparsegpt, wanda, ria, or magnitude (needs no calibration).")] = (
        "sparsegpt"
    )
    pattern: Annotated[
        str,
        typer.Option(
            metavar="N:M|none", help="2:4, 4:8 or another N:4 or N:8, zeros not stored; none prunes anywhere."
        ),
    ] = "2:4"
    sparsity: Annotated[float, typer.Option(help="Share of the weights that go, with --pattern none.")] = 0.5
    layerwise: Annotated[
        str, typer.Option(help="uniform prunes all blocks alike; owl prunes those with outliers less, others more.")
    ] = "uniform"
    spread: Annotated[
        float, typer.Option(help="Most that a block's sparsity differs from the mean, with --layerwise owl.")
    ] = DEFAULT_SPREAD
    outlier_factor: Annotated[
        float, typer.Option(help="Scores above this many times their mean are outliers, with --layerwise owl.")
    ] = DEFAULT_OUTLIER_FACTOR

    def stage(self, ignore: tuple[str, ...]) -> PruneStage:
        """What the options say, for all layers but those that match `ignore`. Raises RecipeError, SchemeError."""
        pattern = None if self.pattern == "none" else Sparsity.parse(self.pattern)
        return PruneStage(
            self.method, pattern, self.sparsity, self.layerwise, self.outlier_factor, self.spread, ignore=ignore
        )

    @property
    def name(self) -> str:
        """A short one, for recipes and reports."""
        name = f"{self.method}-{self.pattern}"
        return name if self.layerwise == "uniform" else f"{name}-{self.layerwise}"


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What is searched for; one of the three is given."""

    target_bpw: Annotated[
        float | None, typer.Option("--target-bpw", help="Best quality within so many bits per weight, scales included.")
    ] = None
    target_size: Annotated[
        str | None, typer.Option("--target-size", metavar="SIZE", help="Best quality within a size: 5GB, 800MB.")
    ] = None
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Least size whose measured KL to the dense model is at most this.")
    ] = None

    def goal(self) -> Goal:
        """What the options say. Raises RecipeError."""
        size = None if self.target_size is None else parse_size(self.target_size)
        return Goal(self.target_bpw, size, self.max_kl)


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """Where a search keeps what it finds."""

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
    """What is predicted, by what, and which model is asked too."""

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
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512
    tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens. Default: all the text.")] = None
    backend: Annotated[str, typer.Option(help="runtime (what is served) or transformers (the cross-check).")] = (
        "runtime"
    )
    device: Device = "auto"
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float32, ...")] = "auto"

    def request(self, model: Path, kv_cache: KVCacheScheme, kernels: str) -> EvaluationRequest:
        """What to measure of the checkpoint in the folder `model`. Imports torch."""
        from compress.evaluate.session import EvaluationRequest

        return EvaluationRequest(
            model,
            self.baseline.expanduser() if self.baseline else None,
            self.data,
            self.length,
            self.tokens,
            self.backend,
            self.device,
            self.dtype,
            kv_cache,
            kernels,
        )


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """How keys and values of the measured model are read."""

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
        """What is asked for, of the checkpoint with this `config.json`. Raises SchemeError."""
        return wished_kv_cache(
            stored_kv_cache(config), self.kv_cache, self.kv_rotate, self.kv_sinks, self.kv_residual_length
        )
