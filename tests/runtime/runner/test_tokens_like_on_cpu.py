"""Greedy answers of the packed demo model on a GPU beside those of plain float32 torch on the CPU.

Sixteen bits round, so an answer may leave the other where two tokens are nearly equally likely, and only there.
"""

from pathlib import Path

import pytest
import torch

from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import QuantizeStage, Recipe
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM, Completion

PROMPTS = (
    "The list method",
    "import os\n",
    "A function is",
    "Return the",
    "The file",
    "In Python 3",
    "Strings are",
    "If",
)
TOKENS = 24
NEARLY_EQUAL = 0.15
"""Nats between two tokens that 16-bit arithmetic may exchange."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model by the width of its codes."""
    folder, source = tmp_path_factory.mktemp("packed"), demo_model_path()
    for name, scheme in (("int4", Int(4, 64)), ("int8", Int(8, None))):
        recipe = Recipe((QuantizeStage("rtn", scheme),))
        run(prepare(RunRequest(source, str(source), recipe, folder / name, measure=False)), quiet=True)
    return {"dense": source, "int4": folder / "int4", "int8": folder / "int8"}


def answers(folder: Path, kv_cache: str = "16bit", **options: str) -> list[Completion]:
    llm = LLM(folder, RuntimeConfig(kv_cache=kv_cache, **options))
    return llm.generate(PROMPTS, SamplingParams(TOKENS, temperature=0, ignore_eos=True, logprobs=5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_cache", ["16bit", "int8"])
@pytest.mark.parametrize("form", ["dense", "int8", "int4"])
def test_answers_part_only_where_tokens_are_nearly_equally_likely(packed, form: str, kv_cache: str) -> None:
    expected = answers(packed[form], kv_cache, device="cpu", dtype="float32", linear_backend="reference")
    found = answers(packed[form], kv_cache, device="cuda", dtype="bfloat16")
    for mine, theirs in zip(found, expected, strict=True):
        check(mine, theirs)


def check(mine: Completion, theirs: Completion) -> None:
    assert len(mine.token_ids) == TOKENS
    pairs = zip(mine.token_ids, theirs.token_ids, strict=True)
    parting = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if parting is None:
        return
    likely = theirs.logprobs[parting]
    alternatives = dict(likely.top)
    assert mine.token_ids[parting] in alternatives
    assert likely.logprob - alternatives[mine.token_ids[parting]] < NEARLY_EQUAL


def test_the_check_can_fail(packed) -> None:
    first, second = answers(packed["dense"], device="cpu", dtype="float32")[:2]
    check(first, first)
    with pytest.raises(AssertionError):
        check(second, first)
