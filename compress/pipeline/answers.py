"""Greedy answers of a checkpoint by the engine that serves it, for figures about what a model writes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compress.checkpoint.activations import AS_STORED
from compress.checkpoint.kv_cache import AUTO
from compress.checkpoint.reader import PackedCheckpoint
from compress.common.device import require_memory, resolve_device
from compress.common.errors import ToolkitError
from compress.evaluate.side import Generate, Side

_REMEDY = "Leave figures that need answers out of --gate, or use a machine with more memory"


def load_answers(folder: Path, trust_remote_code: bool = False) -> Generate:
    """Loads the checkpoint of a folder whole. Raises ToolkitError: it does not fit in memory, or cannot be served."""
    from runtime.core.config import RuntimeConfig
    from runtime.core.request import SamplingParams
    from runtime.llm import LLM

    needed = PackedCheckpoint.open(folder).files.file_bytes
    require_memory("answers need the whole model in memory", needed, resolve_device("auto"), _REMEDY)
    llm = LLM(folder, RuntimeConfig(trust_remote_code=trust_remote_code))

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        found = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0))
        if failed := next((each.error for each in found if each.error), None):
            raise ToolkitError(f"the model did not answer: {failed}", "Run compress verify on the checkpoint")
        return [list(each.token_ids) for each in found]

    return generate


def sides(dense: Path, packed: Path, trust_remote_code: bool = False) -> tuple[Side, Side]:
    """Returns a dense model, and one made of it as it is served."""
    from runtime.activations import choose_activations

    load = partial(load_answers, trust_remote_code=trust_remote_code)
    kernels = choose_activations(packed, AUTO, trust_remote_code=trust_remote_code).kernels
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    exact = options | {"kernels": AS_STORED, "as_dense": True}
    return Side(dense, load, exact), Side(packed, load, options | {"kernels": kernels})
