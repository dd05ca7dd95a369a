"""Attention sinks with a window: text far beyond the context is predicted as well as by recomputing each window."""

import pytest
import torch
from engines import Recorder, drain
from tiny_models import load_reference, save_tiny_model
from torch import Tensor

from calibration.sources import load_texts
from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.engine.engine import Engine
from runtime.model.loader import load_model
from runtime.model.scoring import score
from runtime.runner.runner import build_runner
from runtime.text.tokenizer import Tokenizer


def stream_logits(decoder, tokens: list[int], sinks: int, window: int) -> Tensor:
    """Logits `[T, V]` of a text that is streamed through the engine in chunks."""
    config = RuntimeConfig(attention_sinks=sinks, attention_window=window)
    runner = build_runner(decoder, config)
    recorder = runner.decoder = Recorder(runner.decoder)
    engine = Engine(runner, None, config)
    engine.add_request(tokens, SamplingParams(max_tokens=1))
    drain(engine)
    return torch.stack([recorder.logits_at[position] for position in range(len(tokens))])


def losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Loss of each token except the first; logits `[..., T, V]`, tokens `[..., T]`."""
    return -logits[..., :-1, :].log_softmax(-1).gather(-1, tokens[..., 1:, None])[..., 0]


@pytest.mark.full
def test_perplexity_far_beyond_the_context():
    """Over four times the context the loss stays where it is when every window is recomputed, while attention to all
    tokens, at positions that the model never saw, falls apart."""
    decoder = load_model(demo_model_path(), dtype="float32")
    text = "".join(document for document in load_texts("bundled").documents if isinstance(document, str))
    length, window = 4 * decoder.config.context_length, 252
    tokens = torch.tensor(Tokenizer.open(demo_model_path()).encode(text[: 8 * length])[:length])
    assert len(tokens) == length
    streamed = losses(stream_logits(decoder, tokens.tolist(), 4, window), tokens)
    assert streamed.isfinite().all()
    half = (window + 4) // 2
    windows = tokens[3 * length // 4 :].unfold(0, 2 * half, half)
    recomputed = torch.cat([losses(score(decoder, part), part)[:, half - 1 :] for part in windows.split(8)])
    behind = slice(length // 4, length // 2)
    dense = losses(score(decoder, tokens[None, : length // 2]), tokens[None, : length // 2])[0]
    assert streamed[3 * length // 4 :].mean() < recomputed.mean() + 0.03
    assert streamed[behind].mean() + 0.2 < dense[behind].mean()


def save_model_with_a_sink(folder):
    """Every token of this model gives most of its attention to token 0, whose value is nothing: an attention sink."""
    save_tiny_model(folder, "qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    model = load_reference(folder, torch.float32)
    embedding = model.model.embed_tokens.weight.data
    embedding[:, 0] = 0
    embedding[0] = 0
    embedding[0, 0] = 20
    slow = [7, 15, 23, 31]  # of both key heads: the pairs of dimensions that hardly turn with the position
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj.weight.data[slow, 0] = 2
        attention.q_proj.bias.data.view(4, 16)[:, [7, 15]] = 2
        attention.v_proj.weight.data[:, 0] = 0
        attention.o_proj.weight.data[0] = 0
        layer.mlp.down_proj.weight.data[0] = 0
    model.save_pretrained(folder)
    return folder


def test_a_model_with_a_sink_needs_it(tmp_path):
    decoder = load_model(save_model_with_a_sink(tmp_path / "model"), dtype="float64")
    tokens = [0, *torch.randint(1, 112, (239,), generator=torch.Generator().manual_seed(3)).tolist()]
    dense = score(decoder, torch.tensor([tokens]))[0].log_softmax(-1)
    distance = {}
    for sinks in (0, 1, 4):
        found = stream_logits(decoder, tokens, sinks, 48 - sinks).log_softmax(-1)
        distance[sinks] = float((dense.exp() * (dense - found)).sum(-1)[100:].mean())
    assert max(distance[1], distance[4]) < 0.2 * distance[0]
