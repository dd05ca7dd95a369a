"""A mixer with a state and a family that uses it, added from outside the package in a file each: compressed, verified,
and served with everything that only makes serving faster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from covering import covering
from engines import answer_all, small_engine
from threaded_ranks import shared_logits, whole_logits
from tiny_models import load_reference, put_checkpoint, reference_logits
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Int
from compress.common.cli import demo_model_path
from compress.models.registry import FAMILIES
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.quantize import QuantizeStage
from runtime.core.request import SamplingParams
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.model.scoring import score

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=10, ignore_eos=True)
AMPLE, SCARCE = {"num_blocks": 200, "num_state_slots": 64}, {"num_blocks": 18, "num_state_slots": 7}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Quantized by a method that smooths, and verified."""
    from toy_mixer_family import NAME, RECURRENT, ToyConfig, ToyForCausalLM

    AutoConfig.register(NAME, ToyConfig)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)
    folder = tmp_path_factory.mktemp("toy")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = [RECURRENT, "full_attention", RECURRENT]
    torch.manual_seed(0)
    model = ToyForCausalLM(ToyConfig(num_hidden_layers=len(kinds), layer_types=kinds, vocab_size=8192, **sizes))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.15)
    model.save_pretrained(folder / "source")
    for file in demo_model_path().glob("tokenizer*"):
        (folder / "source" / file.name).write_bytes(file.read_bytes())
    recipe = Recipe((QuantizeStage("awq", Int(4, 32)),), CalibrationOptions(samples=4, length=48))
    request = RunRequest(folder / "source", str(folder / "source"), recipe, folder / "packed", measure=False)
    result = run(prepare(request), quiet=True)
    assert result.structure.ok
    assert not result.structure.notes, "names and shapes were compared with the family's"
    checkpoint = PackedCheckpoint.open(folder / "packed")
    assert checkpoint.scheme("model.layers.0.self_attn.in_proj") == Int(4, 32)
    yield folder / "packed"
    FAMILIES.remove(NAME)


@pytest.fixture(scope="module")
def decoder(packed: Path) -> Decoder:
    model = load_model(packed, device="cpu", dtype="float64", kernels="reference")
    assert list(model.config.state_fields) == [0, 2]
    return model


def test_logits_are_those_of_transformers(packed: Path, decoder: Decoder) -> None:
    tokens = torch.randint(10, 8000, (2, 40), generator=torch.Generator().manual_seed(3))
    reference = put_checkpoint(load_reference(packed.parent / "source"), PackedCheckpoint.open(packed))
    torch.testing.assert_close(score(decoder, tokens), reference_logits(reference, tokens), rtol=0, atol=1e-9)


def test_logits_of_ranks_are_those_of_one(packed: Path, decoder: Decoder) -> None:
    tokens = torch.arange(100, 117)
    with torch.inference_mode():
        wanted = whole_logits(decoder, tokens)
    torch.testing.assert_close(shared_logits(packed, 3, tokens), wanted, rtol=0, atol=1e-9)


def prompts() -> list[tuple[str, list[int], SamplingParams]]:
    """Texts that repeat themselves, of which some begin alike."""
    chance = torch.Generator().manual_seed(5)
    words = torch.randint(10, 8000, (9,), generator=chance).tolist()
    texts = [words * 4, [*words * 3, 11, 12], [*words * 3, 13]]
    samplings = {"greedy": GREEDY, "seeded": SEEDED}
    return [(f"{number} {name}", text, each) for number, text in enumerate(texts) for name, each in samplings.items()]


@pytest.mark.parametrize(
    ("pool", "chunk", "caching", "speculate"),
    covering((AMPLE, SCARCE), (7, 64), (True, False), ("", "ngram")),
)
def test_nothing_that_makes_serving_faster_changes_a_token(
    decoder: Decoder, packed: Path, pool: dict[str, int], chunk: int, caching: bool, speculate: str
) -> None:
    sent = prompts()
    plain = {"prefix_caching": False, "prefill_chunk": 512, "max_model_len": 64, **AMPLE}
    alone = {key: found for each in sent for key, found in answer_all(small_engine(decoder, **plain), [each]).items()}
    options = {"prefix_caching": caching, "prefill_chunk": chunk, "speculative_model": speculate, "max_model_len": 64}
    engine = small_engine(decoder, packed, **options, **pool)
    first = answer_all(engine, sent[:1])
    assert first | answer_all(engine, sent[1:]) == alone
    stats, blocks, states = engine.scheduler.stats, engine.scheduler.pool, engine.scheduler.states
    assert (stats.num_prefix_hits > 0) == caching
    assert (stats.num_preemptions + blocks.num_evictions > 0) == (pool is SCARCE)
    assert states.pool.num_free == states.pool.num_slots
