import subprocess
import sys
import time

import pytest
from tiny_configs import SIZES, VARIANTS

from compress.common.errors import CheckpointError, ToolkitError
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import parse_config
from runtime.memory.plan import find_model_window

CONFIG = {"model_type": "llama", **SIZES}


def test_defaults():
    config = parse_config(CONFIG)
    assert (config.mixer.head_dim, config.mixer.num_kv_heads, config.windows) == (16, 2, (None, None))
    assert (config.mixer.rope.type, config.mixer.rope.theta, config.spec.final_norm.eps) == ("default", 10000.0, 1e-6)
    assert not any(linear.bias for linear in config.spec.linears())
    assert config.mixer.qk_norm is None
    assert parse_config(CONFIG | {"is_causal": True}) == config


def test_families_differ_as_they_should():
    qwen2 = parse_config(CONFIG | {"model_type": "qwen2"}).mixer
    assert all(linear.bias for linear in qwen2.qkv)
    assert not qwen2.output.bias
    assert parse_config(CONFIG | {"model_type": "qwen3"}).mixer.qk_norm
    assert parse_config(CONFIG | {"attention_bias": True}).mixer.output.bias


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_windows(changes, windows):
    assert parse_config(CONFIG | changes).windows == windows


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(1, None, {1}), (1, [2, 3], {2, 3}), ([4, 5], None, {4, 5}), (None, None, set()), (None, 7, {7})],
)
def test_end_tokens(config_eos, generation_eos, expected):
    generation = {} if generation_eos is None else {"eos_token_id": generation_eos}
    assert parse_config(CONFIG | {"eos_token_id": config_eos}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type.*'gpt2'.*qwen2.*qwen3"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "xielu"}, "'xielu'"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' .*factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": "long"}}, "long_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}}, "short_factor.* 8"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' .*low_freq_factor, high_freq"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor .*\b1 "),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_partial_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rotary"),
        ({"is_causal": False}, "causal"),
        ({"num_key_value_heads": 3}, r"4 attention.*3 key-value"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": None}, "vocab_size=None"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["chunked_attention"] * 2},
            r"layer_types \['chunked_attention'\]",
        ),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(CONFIG | changes)


def test_needs_no_torch():
    code = "import sys, runtime.core.model_config; sys.exit('torch' in sys.modules)"
    started = time.perf_counter()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("family", "takes_window"),
    [
        *((family, True) for family in ("smollm3", "gemma3_text", "hunyuan_v1_dense", "ministral3", "gpt_oss")),
        ("llama4_text", False),
    ],
)
def test_queries_of_some_families_cannot_be_moved(family, takes_window):
    """Nor can chunks of tokens be counted from a block that is not the first."""
    config = parse_config({"model_type": family, **SIZES, **VARIANTS[family]})
    with pytest.raises(ToolkitError, match="--attention-sinks"):
        find_model_window(config, RuntimeConfig(attention_window=6, attention_sinks=2))
    if takes_window:
        assert find_model_window(config, RuntimeConfig(attention_window=6)).window == 6
    else:
        with pytest.raises(ToolkitError, match="--attention-window"):
            find_model_window(config, RuntimeConfig(attention_window=6))
