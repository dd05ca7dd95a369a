"""Decoders that tests of the runtime share. None of them changes one."""

import pytest
from tiny_models import save_tiny_model

from runtime.model.decoder import Decoder
from runtime.model.loader import load_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A random Llama of two layers in float64."""
    return load_model(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"), dtype="float64")
