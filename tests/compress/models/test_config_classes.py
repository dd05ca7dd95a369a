"""A config.json means what transformers' configuration class of its family reads from it."""

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from config_changes import Change, changes, legacy_changes, missing_fields, null_fields
from tiny_configs import SIZES, VARIANTS
from transformers import AutoConfig

from compress.common.errors import CheckpointError
from compress.models.block import Block
from compress.models.mixers.attention import Attention
from compress.models.mixers.gated_delta_net import GatedDeltaNet
from compress.models.registry import FAMILIES, find_family
from compress.models.rope import Rope
from compress.models.spec import ModelSpec


def described(family: str, config: Change) -> ModelSpec | str:
    """Returns what a config.json defines, without parameters of rotary embeddings that are not read."""
    describe = find_family(family)
    assert describe is not None
    try:
        spec = describe({"model_type": family, **config})
    except CheckpointError as error:
        return str(error)
    mtp = spec.mtp and replace(spec.mtp, block=_read_block(spec.mtp.block))
    return replace(spec, blocks=tuple(map(_read_block, spec.blocks)), mtp=mtp)


def _read_block(block: Block) -> Block:
    return replace(block, mixer=_read(block.mixer))


def _read(mixer: Attention | GatedDeltaNet) -> Attention | GatedDeltaNet:
    return replace(mixer, rope=_without_unread(mixer.rope)) if isinstance(mixer, Attention) else mixer


def _without_unread(rope: Rope | None) -> Rope | None:
    return replace(rope, options={}) if rope is not None and rope.type == "default" else rope


def completed(family: str, config: Change) -> Change | None:
    """Returns the config.json that transformers makes of another; None where it refuses that."""
    try:
        return AutoConfig.for_model(family, **config).to_dict()
    except Exception:  # of any class: a value of the wrong type fails anywhere
        return None


def full_config(family: str) -> Change:
    """A config.json with all fields."""
    config = completed(family, SIZES | VARIANTS[family])
    assert config is not None
    return {name: value for name, value in config.items() if name != "model_type"}


def differences(family: str, cases: Iterable[Change]) -> tuple[int, list[Change]]:
    """Number of configs that were compared, and what is changed in those that mean something else."""
    compared, wrong, full = 0, [], full_config(family)
    for case in cases:
        found, filled = described(family, case), completed(family, json.loads(json.dumps(case)))
        if isinstance(found, ModelSpec) and filled is not None:
            compared += 1
            absent = {name: "absent" for name in full if name not in case}
            changed = {name: value for name, value in case.items() if full.get(name, full) != value}
            wrong += [absent | changed] if found != described(family, filled) else []
    return compared, wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_missing(family: str) -> None:
    compared, wrong = differences(family, missing_fields(family, full_config(family)))
    assert not wrong
    assert compared > len(VARIANTS[family])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_changed_or_of_an_older_version(family: str) -> None:
    sparse = {name: value for name, value in full_config(family).items() if name not in null_fields(family)}
    cases = (*changes(family, SIZES | VARIANTS[family]), *legacy_changes(family))
    compared, wrong = differences(family, (sparse | case for case in cases))
    assert not wrong
    assert compared > 0
