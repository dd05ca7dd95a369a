"""Answers of engines of several processes, and the processes that they start."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_models import pack_model
from torch import Tensor

from compress.checkpoint.weights import Int
from compress.common.cli import bundled_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM
from runtime.parallel.group import Group

SYSTEM = "The history of the city begins with a small settlement on the river. "
PROMPTS = (SYSTEM + "The river was", SYSTEM + "The city was", "the cat and the dog and the cat and the dog and the")
SAMPLINGS = (
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.8, seed=7, prompt_logprobs=1),
)
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float64", "linear_backend": "reference", "max_model_len": 72}
AMPLE, SCARCE = 400, 18


def pack_demo(folder: Path) -> None:
    folder.mkdir()
    pack_model(bundled_path("demo"), folder / "packed", lambda module: Int(4, 32))
    for file in bundled_path("demo").glob("tokenizer*"):
        (folder / "packed" / file.name).write_bytes(file.read_bytes())


def answers(llm: LLM) -> list[list[int]]:
    """Tokens of all prompts at once, and of all again, which finds their prefixes."""
    prompts = [prompt for prompt, _ in itertools.product(PROMPTS, SAMPLINGS)]
    found = [llm.generate(prompts, [*SAMPLINGS] * len(PROMPTS)) for _ in range(2)]
    assert not any(completion.error for completion in itertools.chain(*found))
    return [completion.token_ids for completion in itertools.chain(*found)]


def plain(folder: Path) -> list[list[int]]:
    return answers(LLM(folder, RuntimeConfig(**EXACT, block_size=4, num_blocks=AMPLE, prefix_caching=False)))


def record_exchanges(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Numbers of rows that this rank sends to each rank by an all-to-all, from now on."""
    found, exchange = list[list[int]](), Group.exchange

    def record(group: Group, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        found.append(sent)
        return exchange(group, tensor, sent, received)

    monkeypatch.setattr(Group, "exchange", record)
    return found


def ranks() -> list[int]:
    """Process ids of ranks that this process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if (
                int(parent) == os.getpid()
                and state != "Z"
                and b"runtime.ranks" in (status.parent / "cmdline").read_bytes()
            ):
                found.append(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
