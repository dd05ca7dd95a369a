"""Windows of a Mistral whose config.json does not name one."""

from typing import Any

import pytest
from transformers import MistralConfig

from compress.models.registry import find_family

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}


@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"sliding_window": 128}], ids=str)
def test_windows_are_those_of_transformers(fields: dict[str, Any]) -> None:
    describe = find_family("mistral")
    assert describe is not None
    spec = describe({"model_type": "mistral", **SIZES, **fields})
    assert {block.mixer.window for block in spec.blocks} == {MistralConfig(**SIZES, **fields).sliding_window}
