"""Options that several commands share, under the same names everywhere. Free of torch."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from compress.checkpoint.demo import DEMO_NAME, demo_model_path
from compress.checkpoint.errors import CheckpointError, ToolkitError

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


class DraftMode(StrEnum):
    """How guesses are verified."""

    MATCH = "match"
    REJECT = "reject"


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
        "--kernels",
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
        "--host-kv-memory",
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
        "--kv-recent",
        min=0,
        metavar="TOKENS",
        help="Last tokens that every token sees in 16 bits: most of the quality back for a few MiB per sequence, but "
        "prefixes cannot be cached then.",
    ),
]
SequencesOption = Annotated[int, typer.Option("--max-sequences", min=1, help="Computed together at most.")]
SpeculateOption = Annotated[
    str,
    typer.Option(
        "--speculate",
        metavar="DRAFTER",
        help="Guess several tokens at once and verify them together: ngram (repeats the text), ngram-tree (several "
        "earlier continuations at once), self:2bit, self:3bit (the model rounded further), self:skip or self:skip=N "
        "(without N layers), demo (the bundled draft model), or the folder of a smaller checkpoint with the same "
        "tokenizer. Switches itself off where it does not pay.",
        show_default=False,
    ),
]
DraftTokensOption = Annotated[int, typer.Option("--draft-tokens", min=1, max=16, help="Guesses in a row at most.")]
DraftModeOption = Annotated[
    DraftMode,
    typer.Option(
        "--draft-mode",
        help="match: the same tokens as without guesses, but for rounding; reject: the same distribution.",
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
