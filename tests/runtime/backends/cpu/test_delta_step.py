"""The compiled step of the gated delta rule gives what plain torch gives, with every instruction set."""

import pytest
import torch
from tiny_models import VARIANTS, save_tiny_model

from compress.cpu.binding import best_instruction_set, library
from runtime.backends.cpu.delta_step import CpuDeltaStep
from runtime.backends.state_memory import StateMemory, StepStates
from runtime.core.state_rows import decode_state_rows
from runtime.model.loader import load_model
from runtime.model.mixers.gated_delta_net import DeltaInputs, delta_rule

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled library")
SETS = range(best_instruction_set() + 1)
READS, WRITES = torch.tensor([4, 1, 0]), torch.tensor([2, 1, 3])


@pytest.mark.parametrize("value_dim", [16, 80, 128])
@pytest.mark.parametrize("instruction_set", SETS)
def test_one_token_of_several_sequences(value_dim: int, instruction_set: int) -> None:
    generator = torch.Generator().manual_seed(value_dim)
    query, key, value = (torch.randn(3, 2, size, generator=generator) for size in (24, 24, value_dim))
    beta, decay = (torch.rand(3, 2, generator=generator) for _ in range(2))
    states = torch.randn(6, 2, 24, value_dim, generator=generator)
    key, before = key / key.norm(dim=-1, keepdim=True), states.clone()
    step = CpuDeltaStep(instruction_set)
    found = step(query, key, value, beta, -decay, states, decode_state_rows(READS, WRITES))
    wide = (part.double().unsqueeze(2) for part in (query, key, value, beta, -decay))
    expected, after = delta_rule(DeltaInputs(*wide), before[READS].double())
    torch.testing.assert_close(found.double(), expected.squeeze(2), rtol=0, atol=2e-5)
    torch.testing.assert_close(states[WRITES].double(), after, rtol=0, atol=2e-6)
    assert torch.equal(states[[0, 4, 5]], before[[0, 4, 5]])


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_a_layer_with_the_kernel(family: str, tmp_path) -> None:
    decoder = load_model(save_tiny_model(tmp_path / "model", family, **VARIANTS[family]), dtype="float32")
    layer = decoder.layers[0].recurrent
    assert isinstance(layer.step, CpuDeltaStep)
    plain = load_model(tmp_path / "model", dtype="float32", kernels="reference").layers[0].recurrent
    assert plain.step is None
    x, found = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), []
    for each in (layer, plain):
        memory = StateMemory({0: layer.spec.state_fields}, 6, torch.float32, torch.device("cpu"))
        for number, tensor in enumerate(memory.tensors[0].values()):
            tensor.normal_(generator=torch.Generator().manual_seed(number))
        out = each(x, 0, StepStates(decode_state_rows(READS, WRITES), memory.tensors), decoder.ops)
        found.append((out, memory.tensors[0]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-4)
