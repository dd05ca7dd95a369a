"""A server that is told to keep keys and values in a form that was measured to be too coarse says so at its start."""

import logging

import pytest
from tiny_models import save_tiny_model

from compress.checkpoint.config import COMPRESSION_KEY, read_config, write_config
from compress.checkpoint.kv_cache import KVCacheRecord, KVCacheScheme, MeasuredKVCache
from compress.common.errors import CheckpointError
from runtime.core.config import RuntimeConfig
from runtime.model.loader import load_model
from runtime.runner.runner import build_runner

MEASURED = MeasuredKVCache(KVCacheScheme.named("int4"), 144, 0.25, 2.0, 21.5, 0.8)
RECORD = KVCacheRecord(0.01, 126, 64, "pydoc", "abc", "some windows", 20.0, 512, (MEASURED,))


def recorded(folder, block):
    """A tiny model whose config.json holds these figures."""
    config = read_config(save_tiny_model(folder))
    config[COMPRESSION_KEY] = {"format_version": 1, "kv_cache_measured": block}
    write_config(folder, config)
    return folder


@pytest.mark.parametrize(("format", "warned"), [("int4", True), ("int8", False), ("auto", False)])
def test_the_measured_figures_are_in_the_warning(tmp_path, caplog, format, warned) -> None:
    decoder = load_model(recorded(tmp_path, RECORD.to_dict()), device="cpu")
    with caplog.at_level(logging.WARNING):
        runner = build_runner(decoder, RuntimeConfig(num_blocks=16, kv_cache=format))
    assert runner.memory.kv_cache.format == {"auto": "16bit"}.get(format, format)
    said = "a mean KL of 0.25 nats (perplexity 20.00 -> 21.50, 126 tokens of pydoc), more than the 0.01"
    assert (said in caplog.text) == warned


def test_a_record_that_cannot_be_read_is_an_error_before_weights_are(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="kv_cache_measured"):
        load_model(recorded(tmp_path, {"candidates": 3}), device="cpu")
