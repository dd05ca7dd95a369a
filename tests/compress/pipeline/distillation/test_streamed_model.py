"""Gradients by blocks are those of the whole model."""

from pathlib import Path

import pytest
import torch
from runs import compress, some_tokens
from tiny_configs import VARIANTS
from tiny_models import save_tiny_model

from compress.checkpoint.weights import Int
from compress.evaluate.scorers import load_dequantized
from compress.pipeline.distillation.finished import open_model
from compress.pipeline.distillation.parts import offset_unit, trained_parts
from compress.pipeline.distillation.targets import top_divergence, top_targets
from compress.stages.quantize import QuantizeStage


def packed_model(folder: Path, family: str) -> Path:
    model = save_tiny_model(folder / "dense", family, **VARIANTS[family])
    compress(model, folder / "packed", QuantizeStage("rtn", Int(3, 16)), calibration=None)
    return folder / "packed"


FAMILIES = {
    "llama": 18,
    "qwen3": 22,
    # Later blocks read keys and values of earlier ones, and buffers scale what blocks add.
    "gemma4_text": 30,
    # Later blocks read the tokens that earlier ones chose, and a buffer moves the choice of experts.
    "glm_moe_dsa": 46,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    packed = packed_model(tmp_path, family)
    tokens = some_tokens(64).view(4, 16) % 64
    streamed, whole = open_model(packed, torch.device("cpu"), torch.float32), load_dequantized(packed, dtype="float32")
    streamed.train_parts()
    targets = top_targets(torch.randn(4, 16, whole.config.vocab_size, generator=torch.Generator().manual_seed(0)), 8)
    inputs = streamed.capture(tokens, 2)

    def loss(number: int, logits: torch.Tensor) -> torch.Tensor:
        return top_divergence(logits, {name: each[inputs.rows(number)] for name, each in targets.items()})

    total = streamed.gradients(inputs, tokens, {number: lambda logits, n=number: loss(n, logits) for number in (0, 1)})
    exact = top_divergence(whole(input_ids=tokens).logits, targets)
    exact.backward()
    assert total == pytest.approx(float(exact.detach()), rel=1e-4)
    found = dict(whole.named_parameters())
    checked = 0
    for parts in streamed.trained.values():
        for each in parts:
            if each.owner not in found:
                continue  # an expert, of which transformers keeps a stack
            gradient = found[each.owner].grad
            (offset,) = each.offsets
            if gradient is None:  # of an indexer, which chooses tokens
                assert offset.grad is None
                continue
            assert offset.grad is not None
            if each.path:
                weight = streamed.checkpoint.packed_weight(each.owner.removesuffix(".weight"))
                values = weight.dequantize()
                assert trained_parts(weight).keys() == {"scales"}
                # A relative step of a scale moves each value by itself.
                signs = trained_parts(weight)["scales"].float().sign()
                expected = (gradient * values).unflatten(1, (signs.shape[1], -1)).sum(-1) * signs
            else:
                expected = gradient * offset_unit("", streamed.checkpoint.tensor(each.owner))
            torch.testing.assert_close(offset.grad, expected, rtol=2e-3, atol=2e-4 * float(expected.abs().max()))
            checked += 1
    assert checked >= FAMILIES[family]


def test_updates_of_matrices_start_at_zero_and_take_gradients_of_their_factors(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "dense", "llama")
    streamed, tokens = open_model(model, torch.device("cpu"), torch.float32), some_tokens(64).view(4, 16) % 64
    streamed.train_parts(rank=2, seed=1)
    name = "model.layers.0.mlp.down_proj.weight"
    (update,) = streamed.trained[name]
    left, right = update.offsets
    weight = streamed.checkpoint.tensor(name)
    assert (left.shape, right.shape) == ((weight.shape[0], 2), (2, weight.shape[1]))
    assert torch.equal(update.values(weight), weight.float())
    assert "model.embed_tokens.weight" not in streamed.trained
    streamed.gradients(streamed.capture(tokens, 4), tokens, {0: lambda logits: logits.square().mean()})
    assert left.grad is not None
    whole = load_dequantized(model, dtype="float32")
    whole(input_ids=tokens).logits.square().mean().backward()
    gradient = dict(whole.named_parameters())[name].grad * offset_unit("", weight)
    torch.testing.assert_close(left.grad, gradient @ right.detach().T, rtol=2e-3, atol=2e-6)


def test_divergence_of_all_tokens_is_the_divergence_of_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    dense, packed = (torch.randn(2, 5, 40, generator=generator) * 3 for _ in range(2))
    exact = torch.nn.functional.kl_div(packed.log_softmax(-1), dense.log_softmax(-1), reduction="sum", log_target=True)
    divergences = [float(top_divergence(packed, top_targets(dense, count))) for count in (1, 4, 39, 40, 100)]
    assert divergences[3] == pytest.approx(float(exact), rel=1e-5)
    assert divergences[4] == divergences[3]
    assert divergences == sorted(divergences)
    assert float(top_divergence(dense, top_targets(dense, 4))) == pytest.approx(0, abs=1e-4)
