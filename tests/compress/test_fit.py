"""Forms are chosen by the runtime's own plan, the least loss first; recipes run, refusals say what would fit."""

from dataclasses import replace

import pytest

from compress.checkpoint.config import read_config
from compress.checkpoint.safetensors import TensorFiles
from compress.common.cli import demo_model_path
from compress.common.errors import ToolkitError
from compress.draft_model import DraftModel
from compress.fit import Fit, ServingTarget, candidates, choose, holds, weight_bytes
from compress.recipe_file import parse_recipe
from runtime.core.model_config import DecoderConfig, parse_config
from runtime.memory.losses import KEYS, WEIGHTS

EIGHT_BILLION = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model() -> DecoderConfig:
    return parse_config(EIGHT_BILLION)


def test_weights_are_as_large_as_their_files() -> None:
    demo = parse_config(read_config(demo_model_path()))
    assert weight_bytes(demo, None) == TensorFiles.open(demo_model_path()).nbytes


@pytest.mark.parametrize("is_gpu", [False, True])
def test_the_best_that_fits_is_chosen(model: DecoderConfig, is_gpu: bool) -> None:
    target = ServingTarget(24 * 2**30, 8192, 4, is_gpu)
    found = choose(model, target)
    for each in candidates(model, target):
        if each.kl < found.kl:
            assert each.needed_bytes > target.memory_bytes
    assert holds(model, target, found.kv_cache, found.weight_bytes, target.memory_bytes)
    assert not holds(model, target, found.kv_cache, found.weight_bytes, found.needed_bytes - 2**20)


def test_less_memory_costs_more_loss(model: DecoderConfig) -> None:
    losses = [choose(model, ServingTarget(size * 2**30, 8192, 1, True)).kl for size in (40, 24, 12, 8)]
    assert losses == sorted(losses)
    assert losses[0] == 0
    assert losses[-1] > 0


def test_nothing_fits_and_the_numbers_say_what_would(model: DecoderConfig) -> None:
    target = ServingTarget(8 * 2**30, 32768, 8, True)
    with pytest.raises(ToolkitError) as caught:
        choose(model, target)
    assert "8 users with 32,768 tokens" in caught.value.problem
    size = int(caught.value.remedy.partition("--memory ")[2].partition("MiB")[0])
    assert choose(model, replace(target, memory_bytes=size * 2**20))
    users = int(caught.value.remedy.partition("--users ")[2].partition(",")[0].rstrip("."))
    assert choose(model, replace(target, users=users))


def test_a_context_that_the_model_does_not_have_is_refused(model: DecoderConfig) -> None:
    with pytest.raises(ToolkitError, match="131072"):
        choose(model, ServingTarget(2**40, 2**20, 1))


@pytest.mark.parametrize("kv_cache", KEYS)
@pytest.mark.parametrize("form", WEIGHTS, ids=str)
def test_recipes_are_recipes(form, kv_cache: str) -> None:
    import yaml

    recipe = Fit(form, kv_cache, 1, 1, 1).recipe()
    if recipe["stages"]:
        read = parse_recipe(yaml.safe_dump(recipe), "fit.yaml")
        assert [stage.scheme for stage in read.stages if hasattr(stage, "scheme")] == [form.scheme] * bool(form.scheme)


def test_speed_costs_loss(model: DecoderConfig) -> None:
    target = ServingTarget(80 * 2**30, 8192, 4, True, bytes_per_second=900e9)
    found = [choose(model, replace(target, least_rate=rate)) for rate in (0, 32, 40, 47)]
    assert [each.kl for each in found] == sorted({each.kl for each in found})
    for each, rate in zip(found, (0, 32, 40, 47), strict=True):
        assert each.user_rate(target) >= rate
    with pytest.raises(ToolkitError) as caught:
        choose(model, replace(target, least_rate=1000))
    assert "1000 tokens per second" in caught.value.problem
    fastest = float(caught.value.remedy.partition("--tokens-per-second ")[2].partition(",")[0])
    assert choose(model, replace(target, least_rate=fastest)).user_rate(target) < fastest + 0.1


def test_a_draft_model_takes_memory(model: DecoderConfig) -> None:
    small = parse_config(EIGHT_BILLION | {"num_hidden_layers": 4, "max_position_embeddings": 4096})
    target = ServingTarget(24 * 2**30, 8192, 4, True)
    alone = {(str(each.weights), each.kv_cache): each for each in candidates(model, target)}
    for each in candidates(model, replace(target, draft=DraftModel("small", small, 2**30))):
        before = alone[str(each.weights), each.kv_cache]
        assert each.needed_bytes - before.needed_bytes == each.draft_bytes
        # The draft model has an eighth of the layers and half of the context.
        assert each.draft_bytes == 2**30 + before.kv_bytes // 16
    other = DraftModel("other", replace(small, spec=replace(small.spec, vocab_size=5)), 1)
    with pytest.raises(ToolkitError, match="vocabulary of 5 tokens"):
        choose(model, replace(target, draft=other))


def test_no_form_is_as_fast_on_a_gpu_as_its_bytes_say(model: DecoderConfig) -> None:
    gpu = ServingTarget(80 * 2**30, 8192, 4, True, bytes_per_second=900e9)
    for each in candidates(model, gpu):
        assert each.user_rate(gpu) < 0.72 * each.user_rate(replace(gpu, is_gpu=False))


def test_speed_on_a_processor_is_bytes_over_bandwidth() -> None:
    assert Fit(WEIGHTS[0], "16bit", 300, 100, 0).user_rate(ServingTarget(0, 0, 4, bytes_per_second=8000.0)) == 20.0
