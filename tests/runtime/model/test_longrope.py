"""LongRoPE: the length that is served chooses one list of factors for all requests."""

import random
from pathlib import Path

import pytest
import torch
from engines import answer_all, small_engine
from tiny_configs import VARIANTS
from tiny_models import load_reference, reference_logits, save_tiny_model

from compress.common.errors import ToolkitError
from runtime.core.request import SamplingParams
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model

SHORT = VARIANTS["phi3"]["original_max_position_embeddings"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("longrope") / "model", "phi3", **VARIANTS["phi3"])


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_model(folder, dtype="float64")


def texts(*lengths: int) -> dict[str, list[int]]:
    chance = random.Random(0)
    return {str(length): [chance.randrange(3, 112) for _ in range(length)] for length in lengths}


def test_short_factors_are_the_default_and_more_is_refused(decoder: Decoder) -> None:
    assert small_engine(decoder).runner.max_model_len == decoder.config.default_length == SHORT
    assert small_engine(decoder, max_model_len=SHORT + 1).runner.max_model_len == SHORT + 1
    with pytest.raises(ToolkitError, match="--max-model-len 256"):
        small_engine(decoder, max_model_len=257)


@pytest.mark.parametrize(
    ("served", "lengths", "speculate"),
    [(None, (5, 40), ""), (128, (60, 90), ""), (128, (60, 90), "self:2bit")],
)
def test_tokens_are_those_of_transformers_in_a_crowd(
    folder: Path, decoder: Decoder, served: int | None, lengths: tuple[int, ...], speculate: str
) -> None:
    options = {"max_model_len": served, "max_num_batched_tokens": 32, "speculative_model": speculate}
    engine, prompts = small_engine(decoder, folder, **options), texts(*lengths)
    found = answer_all(engine, [(name, prompt, GREEDY) for name, prompt in prompts.items()], gap=1)
    reference = load_reference(folder)
    for name, prompt in prompts.items():
        tokens = found[name, 0]
        logits = reference_logits(reference, torch.tensor([prompt + tokens]))[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_a_short_prompt_does_not_depend_on_its_neighbors(decoder: Decoder) -> None:
    alone, crowd = (small_engine(decoder, max_model_len=128) for _ in range(2))
    prompts = [(name, prompt, GREEDY) for name, prompt in texts(5, 90, 47).items()]
    together = answer_all(crowd, prompts)
    assert answer_all(alone, prompts[:1])["5", 0] == together["5", 0]
    assert answer_all(small_engine(decoder), prompts[:1])["5", 0] != together["5", 0]
