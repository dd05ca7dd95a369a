"""Options of `compress eval`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.checkpoint.kv_cache import AUTO, KVCacheScheme, stored_kv_cache, wished_kv_cache
from compress.cli.options import Device

if TYPE_CHECKING:
    from compress.evaluate.session import EvaluationRequest

KernelsMode = Annotated[
    str,
    typer.Option(
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
    kv_recent: Annotated[int | None, typer.Option(min=0, help="Last tokens that stay in 16 bits.")] = None

    def scheme(self, config: dict[str, Any]) -> KVCacheScheme:
        """What is asked for, of the checkpoint with this `config.json`. Raises SchemeError."""
        return wished_kv_cache(stored_kv_cache(config), self.kv_cache, self.kv_rotate, self.kv_sinks, self.kv_recent)
