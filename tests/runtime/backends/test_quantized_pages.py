"""Quantized pages: what is read is what was written, rounded; what is not finite spoils its own sequence only."""

from pathlib import Path

import pytest
import torch
from engines import drain, tokens_of
from poisoned_memory import poison
from safetensors.torch import load_file, save_file
from tiny_configs import SIZES
from tiny_models import save_tiny_model

from calibration.sequences import load_tokenizer
from calibration.sources import load_texts
from compress.checkpoint.kv_cache import KVCacheScheme
from compress.checkpoint.kv_quant import read_back
from compress.common.cli import demo_model_path
from compress.common.errors import ToolkitError
from compress.evaluate.perplexity import cut_windows
from compress.evaluate.scorers import RuntimeScorer
from runtime.backends.kv_pages import TokenPages
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import parse_config
from runtime.core.request import SamplingParams
from runtime.core.step import BlockCopy
from runtime.engine.engine import Engine
from runtime.memory.estimate import kv_token_bytes
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

CPU = torch.device("cpu")
QUANTIZED = ("fp8", "int8", "k8v4", "int4")


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("head_dim", [16, 24, 10])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_written_is_gathered_rounded(format: str, head_dim: int, dtype: torch.dtype) -> None:
    config = parse_config({"model_type": "llama", **SIZES, "head_dim": head_dim})
    scheme = KVCacheScheme(format)
    pages = TokenPages(config, scheme, num_blocks=6, block_size=4, dtype=dtype, device=CPU)
    assert pages.memory.nbytes == 6 * 4 * kv_token_bytes(config, scheme)
    poison(pages.memory)
    pages.memory.clear([0, 1, 5])
    key, value = torch.randn(2, 5, 2, head_dim).to(dtype)
    pages.write(1, torch.tensor([3, 4, 20, 21, 7]), key, value)
    pages.memory.copy([BlockCopy(5, 2, 4)])
    keys, values = pages.gather(1, torch.tensor([2, 0, 1]))
    assert keys.shape == (12, 2, head_dim)
    assert keys.dtype == dtype
    places = [7, 8, 0, 1, 11]
    assert torch.equal(keys[places], read_back(key, scheme.key_format))
    assert torch.equal(values[places], read_back(value, scheme.value_format))
    untouched = [place for place in range(12) if place not in places]
    assert not keys[untouched].any()
    assert not values[untouched].any()


@pytest.mark.parametrize(
    "scheme", [KVCacheScheme("int4", rotate=True), KVCacheScheme("int8", sinks=3, residual_length=5)], ids=str
)
def test_a_sequence_that_is_not_finite_fails_alone(scheme: KVCacheScheme, tmp_path: Path) -> None:
    decoder = load_model(save_tiny_model(tmp_path / "tiny"), device="cpu", dtype="float64")
    config = RuntimeConfig(
        num_blocks=12,
        block_size=4,
        max_num_seqs=2,
        kv_cache=scheme.format,
        kv_rotate=scheme.rotate,
        kv_sinks=scheme.sinks,
        kv_residual_length=scheme.residual_length,
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    good, bad = list(range(10, 21)), [5, 99, 7, 8, 9, 10]

    def answers(*prompts: list[int]) -> list[list[int] | str]:
        """One engine, used again and again: blocks and rings have had other owners."""
        names = [engine.add_request(prompt, sampling) for prompt in prompts]
        found = drain(engine)
        return [found[name][-1].error or tokens_of(found[name]) for name in names]

    engine = Engine(build_runner(decoder, config), None, config)
    (expected,) = answers(good)
    table = next(
        value for value in (getattr(decoder.embedding, "weight", None), decoder.embedding) if value is not None
    )
    table[99] = float("nan")
    for _ in range(2):
        found = answers(good, bad)
        assert found[0] == expected
        assert "not finite" in found[1]
    assert answers(good, good) == [expected, expected]


def test_host_memory_is_refused_beside_a_recent_window(tmp_path: Path) -> None:
    decoder = load_model(save_tiny_model(tmp_path / "tiny"), device="cpu")
    config = RuntimeConfig(kv_cache="int4", kv_residual_length=8, kv_offload_bytes=2**20)
    with pytest.raises(ToolkitError, match="8 exact"):
        build_runner(decoder, config)


def with_key_outliers(folder: Path, factor: float) -> Path:
    """The demo model with one large pair of channels in every head of keys, and the queries to match: both channels of
    a rotary pair by the same factor, so no score changes."""
    source = demo_model_path()
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    (weights,) = source.glob("*.safetensors")
    tensors = load_file(weights)
    for name, weight in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = weight.view(-1, 64, weight.shape[1])
            heads[:, [5, 37]] *= factor if "k_proj" in name else 1 / factor
    save_file(tensors, folder / weights.name, metadata={"format": "pt"})
    return folder


def test_rotation_does_not_hurt_int4_and_mends_outliers(tmp_path: Path) -> None:
    path = demo_model_path()
    windows = cut_windows(load_texts("pydoc"), load_tokenizer(path), length=512, max_tokens=1024)
    tokens = torch.as_tensor(windows.tokens)

    plain, outliers = (RuntimeScorer(p, dtype="float32") for p in (path, with_key_outliers(tmp_path / "model", 8.0)))
    exact = plain.logits(tokens).log_softmax(-1)
    assert torch.allclose(exact[:1], outliers.logits(tokens[:1]).log_softmax(-1), rtol=0, atol=1e-2)

    def divergence(scorer: RuntimeScorer, **options: bool | int) -> float:
        scorer.kv_cache = KVCacheScheme("int4", **options)
        return float((exact.exp() * (exact - scorer.logits(tokens).log_softmax(-1))).sum(-1).mean())

    rotated, unrotated = divergence(plain, rotate=True), divergence(plain)
    assert rotated < 1.1 * unrotated
    assert divergence(outliers, rotate=True) < 0.7 * divergence(outliers)
    assert divergence(plain, rotate=True, residual_length=64) < 0.5 * rotated
