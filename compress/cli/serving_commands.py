"""Commands that plan the serving of a model: fit."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.options import AsJson
from compress.common.cli import SIZE_OPTION, option, with_groups
from compress.common.errors import RecipeError
from compress.common.files import check_out_folder, in_home

if TYPE_CHECKING:
    from compress.draft_model import DraftModel
    from compress.fit import Fit, ServingTarget

FEW_USERS = 4
"""Number of users up to which a step has compute to spare for verifying drafts."""


def read_tokens(text: str) -> int:
    """Parses a number of tokens such as `32k` or `8192`. Raises typer.BadParameter for anything else."""
    found = re.fullmatch(r"(\d+)(k?)", str(text).strip().lower())
    if not found or not int(found[1]):
        raise typer.BadParameter(f"{text!r} is not a number of tokens; write for example 32k or 8192")
    return int(found[1]) * (1024 if found[2] else 1)


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Memory, users and speed to serve a model with. Raises RecipeError: an unknown device, or a rate of a GPU without
    its bandwidth."""

    memory: int = option("--memory", default=MISSING, **SIZE_OPTION, help="Memory of the device, e.g. 24GiB.")
    context: int = option(
        default=MISSING,
        parser=read_tokens,
        metavar="TOKENS",
        help="Tokens per user, prompt and output together, e.g. 32k.",
    )
    users: int = option(default=1, min=1, help="Number of concurrent requests.")
    device: str = option(default="gpu", help="Device that has this memory: cpu or gpu.")
    bandwidth: int | None = option(
        "--bandwidth",
        default=None,
        **SIZE_OPTION,
        help="Memory bandwidth in bytes per second, of a GPU by its data sheet, e.g. 900GB. Default on a CPU: "
        "measured on this machine.",
    )
    rate: float = option(
        "--tokens-per-second", default=0, min=0, help="Minimum tokens per second per user. Needs a bandwidth."
    )
    draft: Path | None = option(
        "--draft", default=None, metavar="FOLDER", help="Draft model that must fit in the same memory."
    )

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "gpu"):
            raise RecipeError(f"--device {self.device} is neither cpu nor gpu", "Use --device cpu or --device gpu")
        if self.rate and self.bandwidth is None and self.device == "gpu":
            problem = "--tokens-per-second needs the speed of the GPU"
            raise RecipeError(problem, "Add --bandwidth, e.g. --bandwidth 900GB")

    def target(self) -> ServingTarget:
        """Reads the draft model, and measures the bandwidth of a CPU where none is given."""
        from compress.fit import ServingTarget

        drafting = None if self.draft is None else _draft_model(self.draft)
        speed = _stream_speed() if self.bandwidth is None and self.device == "cpu" else self.bandwidth
        return ServingTarget(self.memory, self.context, self.users, self.device == "gpu", drafting, speed, self.rate)


@with_groups
def fit(
    *,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model whose config.json is read: a folder or ORG/NAME.")
    ],
    wanted: FitOptions,
    out: Annotated[Path | None, typer.Option("--out", help="Recipe to write for `compress run`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the bits of weights, keys and values that fit a model and its users into memory.

    Reads config.json only. Memory comes from the runtime's own plan. Loss is predicted from measurements on the demo
    model, speed from the bandwidth.
    """
    from compress.checkpoint.config import read_config
    from compress.checkpoint.gguf.folder import folder_of
    from compress.fit import choose
    from runtime.core.model_config import parse_config

    recipe = None if out is None else check_out_folder(in_home(out))
    target = wanted.target()
    found = choose(parse_config(read_config(folder_of(model, weights=False))), target)
    if recipe is not None and found.recipe()["stages"]:
        _write(recipe, found)
    figures = _figures(found, target, measured=wanted.bandwidth is None)
    if as_json:
        typer.echo(json.dumps(figures | {"recipe": found.recipe()}, indent=2))
    else:
        typer.echo("\n".join(_lines(found, target, figures, model, out)))


def _draft_model(path: Path) -> DraftModel:
    """Reads config.json and file sizes; missing weights count as 16 bits."""
    from compress.checkpoint.config import read_config
    from compress.checkpoint.gguf.folder import folder_of
    from compress.draft_model import DraftModel
    from compress.fit import weight_bytes
    from runtime.core.model_config import parse_config

    folder = folder_of(path, weights=False)
    config = parse_config(read_config(folder))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return DraftModel(str(path), config, stored or weight_bytes(config, None))


def _stream_speed() -> float:
    """Measures the memory bandwidth of this machine in bytes per second."""
    import time

    import torch

    numbers = torch.ones(2**25)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - started)
    return numbers.nbytes / min(seconds)


def _figures(found: Fit, target: ServingTarget, measured: bool) -> dict[str, object]:
    speed = target.bytes_per_second
    return {
        "weights": str(found.weights),
        "kv_cache": found.kv_cache,
        "weight_bytes": found.weight_bytes,
        "kv_bytes": found.kv_bytes,
        "draft_bytes": found.draft_bytes,
        "draft_acceptance_needed": _acceptance(found),
        "needed_bytes": found.needed_bytes,
        "memory_bytes": target.memory_bytes,
        "predicted_kl": found.kl,
        "kl_from": "demo model",
        "bandwidth": speed,
        "bandwidth_from": "not given" if speed is None else "measured here" if measured else "--bandwidth",
        "predicted_tokens_per_second": None if speed is None else target.users * found.user_rate(target),
    }


def _acceptance(found: Fit) -> float | None:
    """Returns the break-even acceptance rate of the draft model; None without one, or if none pays off."""
    from compress.draft_model import break_even
    from runtime.core.config import RuntimeConfig

    if not found.draft_bytes:
        return None
    return break_even(found.draft_bytes, found.step_bytes, RuntimeConfig().num_speculative_tokens)


def _lines(found: Fit, target: ServingTarget, figures: dict[str, object], model: Path, out: Path | None) -> list[str]:
    from compress.common.device import format_bytes

    speed, rate = figures["predicted_tokens_per_second"], "not predicted without --bandwidth"
    if speed is not None:
        basis = "with the shares of bandwidth that one H200 reached" if target.is_gpu else "modelled"
        rate = f"about {speed:,.0f} tokens/s for all users, {basis}"
    drafter = target.draft.path if target.draft else "ngram" if target.users <= FEW_USERS else ""
    drafts = f" --speculative-model {drafter}" if drafter else ""
    serve = f"runtime serve {'packed/' if found.weights.scheme else model} --max-num-seqs {target.users} "
    kv_memory = -(-found.kv_bytes // 2**20)
    serve += f"--max-model-len {target.context} --kv-cache {found.kv_cache} --kv-memory {kv_memory}MiB{drafts}"
    lines = [
        f"{target}, in {format_bytes(target.memory_bytes)}:",
        f"  weights          {found.weights}, {format_bytes(found.weight_bytes)}",
        f"  keys and values  {found.kv_cache}, {format_bytes(found.kv_bytes)}",
        f"  memory           {format_bytes(found.needed_bytes)} needed, including activations and the process",
        f"  KL               about {found.kl:.4f}, the sum of both forms measured on the demo model",
        f"  speed            {rate} ({figures['bandwidth_from']})",
    ]
    if target.draft is not None:
        lines.insert(3, f"  draft model      {target.draft.path}, {format_bytes(found.draft_bytes)}, {_gain(figures)}")
    if not found.recipe()["stages"]:
        lines.append("everything fits in 16 bits: no recipe is needed, and none is written")
    else:
        lines.append(f"compress run {out or 'RECIPE'} {model} --out packed" + ("" if out else "   (--out writes it)"))
    return [*lines, serve]


def _gain(figures: dict[str, object]) -> str:
    needed = figures["draft_acceptance_needed"]
    return "too large to pay off" if needed is None else f"pays off from an acceptance rate of {needed:.0%}, modelled"


def _write(path: Path, found: Fit) -> None:
    import yaml

    from compress.common.files import atomic_file

    with atomic_file(path) as stream:
        stream.write(yaml.safe_dump(found.recipe(), sort_keys=False).encode())
