"""Checkpoints that were written before open with the same bits and are written with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_weights import MODULE, digests_of, made_cases, opened, recorded_cases

from compress.checkpoint.formats.base import CONTAINERS
from compress.checkpoint.formats.bitsandbytes import BITSANDBYTES
from compress.checkpoint.formats.exl3 import EXL3

CASES, DIGESTS = recorded_cases()


def test_every_form_in_every_container_is_recorded() -> None:
    assert made_cases().keys() <= CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_values_and_stored_bytes_are_those_recorded(name: str, tmp_path: Path) -> None:
    config, tensors = CASES[name]
    checkpoint = opened(tmp_path, config, tensors)
    assert digests_of(checkpoint) == DIGESTS[name]
    container = CONTAINERS.find(checkpoint.format)
    if container in (BITSANDBYTES, EXL3):
        return
    weight = checkpoint.packed_weight(MODULE)
    written = container.encode(MODULE, weight, torch.bfloat16)
    assert written.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert written[key].dtype == tensor.dtype
        assert torch.equal(written[key].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), key
    assert container.quantization_config({MODULE: checkpoint.schemes[MODULE]}, []) == config
