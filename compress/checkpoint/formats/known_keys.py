"""Keys of `quantization_config`: those that a container reads, and those that say how codes were found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compress.checkpoint.formats.base import Container
from compress.models.known_keys import refuse_unread

_HARMLESS = """
act_group_aware actorder amp autoround_version awq_gemm_checkpoint batch_size block_name_to_quantize
cache_block_outputs calibration damp_auto_increment damp_percent dataset desc_act dequantize disable_exllama do_fuse
enable_alg_ext enable_deterministic_algorithms enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
exllama_config exllama_version fuse_max_seq_len gradient_accumulate_steps
group_aware is_marlin_format iters low_cpu_mem_usage low_gpu_mem_usage lr max_input_length meta method
minmax_lr model_dtype model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
modules_in_block_to_quantize modules_to_convert modules_to_fuse mse nsamples observer observer_kwargs pad_token_id
provider quant_lm_head quant_method run_compressed scale_dtype scale_fmt seqlen static_attention_granularity
static_groups static_kv_dtype static_kv_granularity
to_quant_block_names tokenizer true_sequential use_cuda_fp16 use_exllama use_optimized_inference version
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Options of calibration and of engines, and what names the tools."""
SKIPPED = "ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules"
"""Lists of dense modules: which ones are packed is seen by their tensors."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "act_bits": (16,),
    "act_data_type": ("float",),
    "data_type": ("int",),
    "expert_dtype": ("fp8",),
}
"""Values of keys that nothing reads."""
GROUP_KEYS = frozenset({"format", "input_activations", "targets", "weights"})
NUMBER_KEYS = frozenset(
    {"block_structure", "dynamic", "group_size", "num_bits", "strategy", "symmetric", "type", "zp_dtype"}
)


def check_keys(container: Container, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a key of a `quantization_config` that nothing reads and that may change numbers."""
    known = HARMLESS | {*container.keys.split(), *SKIPPED}
    sparsity = config.get("sparsity_config")
    harmless = isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")
    refuse_unread("quantization_config", config, known | ({"sparsity_config"} if harmless else set()), ONLY)
    for where, given, keys in _parts(config, known):
        if isinstance(given, Mapping):
            refuse_unread(f"{where} of quantization_config", given, keys)


def _parts(config: Mapping[str, Any], known: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Yields descriptions of some modules only, and the keys that each may have."""
    for part in ("config_groups", "dynamic", "extra_config"):
        entries = config.get(part)
        for name, given in entries.items() if isinstance(entries, Mapping) else ():
            yield f"{part}.{name}", given, GROUP_KEYS if part == "config_groups" else known
            for numbers in ("weights", "input_activations") if isinstance(given, Mapping) else ():
                yield f"{part}.{name}.{numbers}", given.get(numbers), NUMBER_KEYS | HARMLESS
