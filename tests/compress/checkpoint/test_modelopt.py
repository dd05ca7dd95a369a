"""Configurations of ModelOpt's files; tests/runtime/model/test_peer_files.py compares their numbers."""

import pytest

from compress.checkpoint.formats.modelopt import MODELOPT
from compress.checkpoint.weights import Fp8, Nvfp4
from compress.common.errors import CheckpointError

LAYERS = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
NAMES = ["a.weight", "a.weight_scale", "a.input_scale", "b.weight", "b.weight_scale", "b.weight_scale_2", "c.weight"]


@pytest.mark.parametrize("is_old", [False, True])
def test_layers_may_have_algorithms_of_their_own(is_old: bool) -> None:
    about = {"quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}
    config = {"quantization": about} if is_old else about
    assert MODELOPT.modules(NAMES) == ["a", "b"]
    assert MODELOPT.schemes(config, ["a", "b"]) == {"a": Fp8(), "b": Nvfp4()}
    found = MODELOPT.inputs(config, NAMES)
    assert found.keys() == {"a"}, "b has no scale of its inputs"
    assert (found["a"].bits, found["a"].stored) == (8, ".input_scale")


@pytest.mark.parametrize("config", [{"quant_algo": "W4A8_AWQ"}, {"quant_algo": "MIXED_PRECISION"}, {}])
def test_other_algorithms_are_refused_by_name(config: dict[str, str]) -> None:
    name = config.get("quant_algo") if config.get("quant_algo") == "W4A8_AWQ" else "None"
    with pytest.raises(CheckpointError, match=rf"\ba is stored.* {name}\b"):
        MODELOPT.schemes(config, ["a"])
