"""Answers alone and in a batch, in bfloat16: equal with the kernels for which the documentation says so."""

import random
import re
from pathlib import Path

import pytest
from covering import sample

from compress.common.cli import demo_model_path
from compress.cpu.binding import library
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM

DOCS = Path(__file__).parents[3] / "docs" / "serving.md"
FORMS = ("16bit", "int8", "k8v4", "int4")
TEXT = "the king had three daughters and one of them loved a small green bird that sang near the old mill"
COMPILED = "cpu: compiled"


def prompts(count: int) -> list[str]:
    choose = random.Random(0)
    return [" ".join(choose.choices(TEXT.split(), k=choose.randrange(3, 60))) for _ in range(count)]


def engine(**options: object) -> LLM:
    return LLM(
        demo_model_path(),
        RuntimeConfig(device="cpu", dtype="bfloat16", num_blocks=512, prefix_caching=False, **options),
    )


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("form", sample(FORMS, quick=2))
def test_compiled_kernels_answer_alone_as_together(form: str) -> None:
    llm, texts = engine(kv_cache=form), prompts(10)
    assert llm.engine.runner.kernels.describe().startswith(COMPILED)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    together = [found.token_ids for found in llm.generate(texts, sampling)]
    assert together == [llm.generate([text], sampling)[0].token_ids for text in texts]


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize(
    "options", [{"kv_cache": "fp8"}, {"attention_sinks": 4, "attention_window": 64}, {"linear_backend": "reference"}]
)
def test_other_kernels_are_named_as_those_that_may_differ(options: dict[str, object]) -> None:
    assert not engine(**options).engine.runner.kernels.describe().startswith(COMPILED)


def test_documentation_names_the_forms() -> None:
    (listed,) = re.findall(r"forms (.*?)\s+of the KV cache in bfloat16", DOCS.read_text(encoding="utf-8"))
    assert tuple(re.split(r", | and ", listed)) == FORMS
