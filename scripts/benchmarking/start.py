"""First token from the start of a process: that of `runtime generate`, and the first answer of `runtime serve`, with
and without prepared weights, compared with only `import torch`.

Starts take turns. Seconds of the clock suffer from other work on the machine; processor seconds do so less. Bytecode is
cached, as that of an installed package. The first start of each kind is not counted: it reads files into the cache.

    python scripts/bench_serve.py start                      # the demo model
    python scripts/bench_serve.py start --shape 1.1b --rounds 7
    python scripts/bench_serve.py start --model packed/
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, cast

import httpx
from rich.console import Console

from benchmarking.machine import environment, process_ids, process_seconds
from benchmarking.tables import Row, describe, print_with_markdown
from compress.common.cli import demo_model_path

PROMPT = "Once upon a time"
RUNTIME = (sys.executable, "-m", "runtime.cli")


@dataclass(frozen=True)
class Start:
    """One start, until the first token, with all of its processes.

    Attributes:
        peak_bytes: the most resident memory until then, mapped files among it.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure(command: Sequence[str], environ: dict[str, str], wait: Callable[[IO[str]], None]) -> Start:
    """Starts a command and reads its cost as soon as `wait` has seen what it waits for on its standard output."""
    began = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environ, text=True, bufsize=1, **pipes) as process:
        try:
            wait(cast(IO[str], process.stdout))
            seconds = time.perf_counter() - began
            pids = [process.pid, *process_ids(process.pid)]
            peaks = [re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
            cpu_seconds = sum(map(process_seconds, pids))
        finally:
            process.kill()
    return Start(seconds, cpu_seconds, sum(int(peak[1]) << 10 for peak in peaks if peak))


def first_text(output: IO[str]) -> None:
    """Waits for the first character."""
    if not output.read(1):
        raise RuntimeError("the command ended without output")


def first_answer(output: IO[str]) -> None:
    """Waits for the URL of a server, and for its answer to a request of one token."""
    for line in output:
        if found := re.match(r"serving +(.*) at (http\S+)", line):
            body = {"model": found[1], "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            httpx.post(f"{found[2]}/v1/completions", json=body, timeout=600).raise_for_status()
            return
    raise RuntimeError("the server ended before it listened")


def starts(model: Path) -> dict[str, tuple[list[str], Callable[[IO[str]], None]]]:
    """Commands by name, and how to see their first token."""
    generate = [*RUNTIME, "generate", str(model), "--prompt", PROMPT, "--max-tokens", "1", "--temperature", "0"]
    return {
        "runtime generate": (generate, first_text),
        "runtime serve, first answer": ([*RUNTIME, "serve", str(model), "--port", "0"], first_answer),
    }


def make_models(options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Returns a checkpoint, and the same with prepared weights."""
    from benchmarking.models import SHAPES, write_packed_model
    from compress.checkpoint.weights import Int

    plain, prepared = folder / "plain", folder / "prepared"
    if options.shape:
        write_packed_model(plain, SHAPES[options.shape], Int(4, 128))
    else:
        plain.symlink_to((options.model or demo_model_path()).resolve())
    prepared.mkdir()
    for file in plain.iterdir():
        if file.is_file():
            (prepared / file.name).symlink_to(file.resolve())
    subprocess.run([*RUNTIME, "prepare", str(prepared)], check=True, stdout=subprocess.DEVNULL)
    return plain, prepared


def row(name: str, found: Sequence[Start]) -> Row:
    seconds = sorted(start.seconds for start in found)
    return {
        "start": name,
        "s, median": f"{median(seconds):.2f}",
        "least": f"{seconds[0]:.2f}",
        "most": f"{seconds[-1]:.2f}",
        "processor s, median": f"{median(start.cpu_seconds for start in found):.2f}",
        "peak memory": f"{max(start.peak_bytes for start in found) / 1e6:.0f} MB",
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--model", type=Path, help="checkpoint folder; default: the demo model")
    chosen.add_argument("--shape", help="a model of random 4-bit weights: 125m, 1.1b, 8b, ...")
    parser.add_argument("--rounds", type=int, default=5, help="counted starts of each kind (5)")


def run(options: argparse.Namespace) -> int:
    console, folder = Console(), Path(tempfile.mkdtemp(prefix="start-"))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "XDG_CACHE_HOME": str(folder / "cache")}
    try:
        plain, prepared = make_models(options, folder)
        kinds = {
            "import torch alone": ([sys.executable, "-c", "import torch; print(1, flush=True); input()"], first_text)
        }
        for where, model in (("", plain), (", prepared", prepared)):
            kinds |= {f"{name}{where}": start for name, start in starts(model).items()}
        found: dict[str, list[Start]] = {name: [] for name in kinds}
        for _ in range(1 + options.rounds):
            for name, (command, wait) in kinds.items():
                found[name].append(measure(command, environ, wait))
        size = sum(file.stat().st_size for file in plain.glob("*.safetensors"))
        title = f"first token, weight files of {size / 1e6:.0f} MB, {options.rounds} rounds"
        print_with_markdown(title, [row(name, each[1:]) for name, each in found.items()], console)
        console.print(describe(environment()), markup=False)
    finally:
        shutil.rmtree(folder)
    return 0
