"""Plans of streamed evaluations, from shapes alone."""

import math

import pytest
import torch

from compress.evaluate.stream_plan import ModelCost, StoredTensor, StreamPlan
from compress.models.registry import find_family
from compress.models.spec import ModelSpec
from runtime.backends.base import Target

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
TARGET = Target(torch.device("cpu"), torch.bfloat16)


def llama(num_layers: int) -> ModelSpec:
    return find_family("llama")(LLAMA_70B | {"num_hidden_layers": num_layers})


def cost(spec: ModelSpec, bits: int = 16) -> ModelCost:
    linears = {f"{linear.name}.weight" for linear in spec.linears()}
    sizes = {name: math.prod(shape) for name, shape in spec.parameters().items()}
    tensors = [
        StoredTensor(name, size, size * (bits if name in linears else 16) // 8, name in linears and bits < 16)
        for name, size in sizes.items()
    ]
    return ModelCost.of(spec, tensors, 2)


def plan(num_layers: int) -> StreamPlan:
    spec = llama(num_layers)
    return StreamPlan(spec, (cost(spec, 4), cost(spec)), 2 * 4096, 4096, 512, TARGET)


def test_a_70b_model_needs_the_memory_of_a_layer_and_both_heads() -> None:
    deep, shallow = plan(80), plan(2)
    assert deep.peak_memory == shallow.peak_memory < 10e9
    assert deep.models[1].read_bytes == pytest.approx(141.1e9, rel=1e-3)
    assert deep.models[0].read_bytes == pytest.approx(141.1e9 - 0.75 * 2 * 68.45e9, rel=1e-2)
    # 2 operations for each of 69.5e9 weights outside of the embedding, and what attention adds.
    assert deep.operations == pytest.approx(2 * 69.5e9 * 8192, rel=0.01)
    assert deep.disk_bytes == 2 * 8192 * 8192 * 2


def test_a_mixture_computes_the_chosen_experts() -> None:
    config = LLAMA_70B | {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    mixture = find_family("mixtral")(config | {"model_type": "mixtral"})
    one = StreamPlan(mixture, (cost(mixture),), 1, 1, 512, TARGET)
    dense = StreamPlan(llama(2), (cost(llama(2)),), 1, 1, 512, TARGET)
    expert = 3 * 8192 * 28672
    assert one.operations == pytest.approx(dense.operations + 2 * 2 * expert)
    assert cost(mixture).layer.prepared > cost(llama(2)).layer.prepared + 7 * 2 * expert


def test_the_line_says_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.evaluate.stream_plan.product_speed", lambda *_: 1e12)
    line = plan(80).describe()
    assert "8,192 tokens through 80 layers of 2 models" in line
    assert "GB of weights are read" in line
    assert "about 19 min" in line
    assert plan(80).to_dict()["seconds"] == pytest.approx(19 * 60, rel=0.05)
