"""Stages, and pairs of them, that mean nothing: refused before anything runs, with the name or number that is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import prepared

from compress.checkpoint.weights import Activations, Fp8, Int, NMSparsity
from compress.common.errors import RecipeError, SchemeError
from compress.methods.signround import SignRoundOptions
from compress.methods.smoothquant import SmoothQuantOptions
from compress.stages.base import Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage
from compress.stages.rotate import RotateStage

W8A8, W8A16 = Fp8(Activations.FP8), Fp8()


@pytest.mark.parametrize("method", ["awq", "gptq", "gptaq", "signround", "hqq"])
def test_methods_that_choose_integers_make_no_floats(method: str) -> None:
    with pytest.raises(RecipeError, match=f"^{method} .*rtn .*smoothquant"):
        QuantizeStage(method, W8A8)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: PruneStage("wandaa"), "'wanda'"),
        (lambda: PruneStage(sparsity=1.0), r"sparsity=1\.0 "),
        (lambda: PruneStage(pattern=NMSparsity(2, 4), sparsity=0.7), "2:4"),
        (lambda: FactorizeStage("svdllm"), "'svd-llm'"),
        (lambda: FactorizeStage(keep=1.0), r"keep=1\.0 "),
        (lambda: FactorizeStage(allocation="layer"), "'layer'"),
        (lambda: QuantizeStage("smoothquant", Int(8, None)), "activation_bits: 8"),
        (lambda: QuantizeStage("awq", options=SmoothQuantOptions(0.5)), "awq"),
        (lambda: SmoothQuantOptions(1.5), r"alpha=1\.5"),
        (lambda: QuantizeStage.build({"bits": 4, "activation_bits": 6}), "activation_bits=6"),
        (lambda: QuantizeStage("gptq", options=SignRoundOptions(100)), "gptq"),
        (lambda: SignRoundOptions(steps=0), "steps=0"),
        (lambda: SignRoundOptions(lr=0.0), r"lr=0\.0"),
        (lambda: SignRoundOptions(lr=0.7), r"lr=0\.7"),
        (lambda: SignRoundOptions(batch=0), "batch=0"),
        (lambda: QuantizeStage.build({"bits": 4, "fp8": True}), "fp8.*bits=4"),
        (lambda: QuantizeStage("rtn", W8A8, outlier_columns=4), "fp8.*outlier"),
    ],
)
def test_what_is_wrong_in_one_stage_is_named(make: Callable[[], Stage], fact: str) -> None:
    with pytest.raises((RecipeError, SchemeError), match=fact):
        make()


@pytest.mark.parametrize(
    ("stages", "error", "fact"),
    [
        ((PruneStage("wanda", NMSparsity()), QuantizeStage("signround")), RecipeError, "signround"),
        (
            (
                QuantizeStage("signround"),
                QuantizeStage("signround", targets=("down_proj",), options=SignRoundOptions(7)),
            ),
            RecipeError,
            "signround",
        ),
        ((PruneStage("magnitude", NMSparsity(2, 4)), FactorizeStage("svd")), RecipeError, "pruned.*factorized"),
        ((FactorizeStage("svd"), QuantizeStage("awq", Int(4, 8))), RecipeError, "awq"),
        ((FactorizeStage("svd"), QuantizeStage("rtn", Int(4, 64))), SchemeError, " 64 .*--group-size -1"),
        ((QuantizeStage("rtn", W8A16, targets=("embed_tokens",)),), RecipeError, "8-bit"),
    ],
)
def test_what_does_not_go_together_is_named(
    tiny_model, tmp_path: Path, stages: tuple[Stage, ...], error: type, fact: str
) -> None:
    with pytest.raises(error, match=fact):
        prepared(tiny_model(), tmp_path / "packed", *stages)
    assert not list(tmp_path.iterdir())


def test_families_whose_residual_stream_is_not_known_are_not_rotated(tiny_model, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'phi3'"):
        prepared(tiny_model("phi3"), tmp_path / "out", RotateStage())
