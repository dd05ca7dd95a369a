"""Recurrent states in 16 bits: half of the bytes, rounded after every token, measured before they are served."""

from dataclasses import replace

import pytest
import torch
from engines import answer_all, small_engine
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model
from torch import Tensor

from compress.checkpoint.state_dtype import MeasuredStates, measured_states, with_measured_states
from compress.common.errors import CheckpointError, ToolkitError
from runtime.backends.state_memory import StateMemory, step_states
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.core.state_rows import decode_state_rows, whole_state_rows
from runtime.memory.plan import plan_memory
from runtime.model.decoder import Decoder
from runtime.model.loader import load_model
from runtime.model.scoring import score

CPU = torch.device("cpu")
COST = MeasuredStates("bfloat16", 0.001, 0.01, 5.1, 5.0, 0.99, 100, "a text", "", "")
TOKENS = torch.randint(10, 112, (2, 40), generator=torch.Generator().manual_seed(3))


def measured(decoder: Decoder, *dtypes: str) -> Decoder:
    return replace(decoder, config=replace(decoder.config, states_measured=[replace(COST, dtype=d) for d in dtypes]))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family = "falcon_h1"
    folder = save_tiny_model(tmp_path_factory.mktemp("state") / "model", family, **VARIANTS[family])
    return measured(load_model(folder, dtype="float32"), "bfloat16", "float16")


def one_by_one(decoder: Decoder, x: Tensor, kept: str) -> tuple[Tensor, StateMemory]:
    """The mixer of the first layer over `x [T, H]`, one token at a time in one slot."""
    layer, fields = decoder.layers[0].mixer.second, {0: decoder.config.state_fields[0]}
    memory = StateMemory(fields, 1, decoder.dtype, CPU, kept=kept)
    found, read = [], torch.tensor([1])
    for token in x.split(1):
        states = step_states(memory, decode_state_rows(read, torch.tensor([0])))
        found.append(states.mix(0, token, lambda rows, each: layer.compute(rows, 0, each, decoder.ops)))
        read = torch.tensor([0])
    return torch.cat(found), memory


@pytest.mark.parametrize(("kept", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_the_slot_holds_rounded_states(decoder: Decoder, kept: str, bits: int) -> None:
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    (exact, wide), (found, narrow) = (one_by_one(decoder, x, dtype) for dtype in ("float32", kept))
    assert narrow.tensors[0]["matrix"].dtype is getattr(torch, kept)
    assert narrow.tensors[0]["window"].dtype is torch.float32
    error = float((narrow.tensors[0]["matrix"][0].float() - wide.tensors[0]["matrix"][0]).abs().max())
    assert 0 < error < 30 * 2.0**-bits * float(wide.tensors[0]["matrix"][0].abs().max())
    assert 0 < float((found - exact).norm()) < 30 * 2.0**-bits * float(exact.norm())


def test_steps_of_several_tokens_round_less_often(decoder: Decoder) -> None:
    """One rounding of a step's last state: results depend on cuts by no more than rounding after every token does."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    exact, _ = one_by_one(decoder, x, "float32")
    found, _ = one_by_one(decoder, x, "bfloat16")
    layer = decoder.layers[0].mixer.second
    memory = StateMemory({0: decoder.config.state_fields[0]}, 1, decoder.dtype, CPU, kept="bfloat16")
    cut = []
    for index, rows in enumerate(x.split(16)):
        states = step_states(memory, replace(whole_state_rows([16], CPU), read_slots=torch.tensor([0 if index else 1])))
        cut.append(states.mix(0, rows, lambda rows, each: layer.compute(rows, 0, each, decoder.ops)))
    torch.testing.assert_close(cut[0], exact[:16], rtol=1e-4, atol=1e-5 * float(exact.std()))
    assert 0 < float((torch.cat(cut) - exact).norm()) < float((found - exact).norm())


def test_float16_saturates(decoder: Decoder) -> None:
    x = torch.full((8, 64), 1e7)
    _, memory = one_by_one(decoder, x, "float16")
    assert torch.isfinite(memory.tensors[0]["matrix"][0]).all()


def test_scores_are_those_of_the_engine(decoder: Decoder) -> None:
    """Scores round after every token, as decoding does; here prompts are computed one token at a time, too."""
    prompt = TOKENS[0, :12].tolist()
    engine = small_engine(decoder, state_dtype="bfloat16", max_num_batched_tokens=1, prefill_chunk=1)
    (answer,) = answer_all(engine, [("a", prompt, SamplingParams(max_tokens=8, temperature=0))]).values()
    text = torch.tensor([prompt + answer])
    found, exact = (score(decoder, text, state_dtype=dtype)[0] for dtype in ("bfloat16", "float32"))
    assert found[11:-1].argmax(-1).tolist() == answer
    assert 0 < float((found - exact).norm()) < 0.1 * float(exact.norm())


def test_a_cost_that_was_not_measured_is_refused_with_its_command(decoder: Decoder) -> None:
    config = RuntimeConfig(state_dtype="bfloat16", num_blocks=8)
    with pytest.raises(ToolkitError, match="--state-dtype bfloat16 --record"):
        plan_memory(measured(decoder).config, 0, 4, config)
    narrow = plan_memory(decoder.config, 0, 4, config).states
    wide = plan_memory(decoder.config, 0, 4, RuntimeConfig(num_blocks=8)).states
    matrices = sum(
        field.nbytes(4) for parts in decoder.config.state_fields.values() for field in parts.values() if field.is_exact
    )
    assert wide.slot_bytes - narrow.slot_bytes == matrices // 2
    assert narrow.measured.kl_mean == COST.kl_mean


def test_a_record_replaces_the_last_one_of_its_dtype() -> None:
    config = with_measured_states(with_measured_states({}, COST), replace(COST, dtype="float16"))
    config = with_measured_states(config, replace(COST, kl_mean=0.5))
    assert [(each.dtype, each.kl_mean) for each in measured_states(config)] == [("float16", 0.001), ("bfloat16", 0.5)]
    with pytest.raises(CheckpointError):
        measured_states({"compression_config": {"state_measured": [{"dtype": "bfloat16"}]}})
