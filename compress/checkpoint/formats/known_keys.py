"""Keys of `quantization_config` by format: those that are read, and those that say how codes were found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
READ: Mapping[str, str] = {
    "compressed-tensors": "config_groups format global_compression_ratio kv_cache_scheme quantization_status "
    "transform_config",
    "gptq": "backend bits checkpoint_format dynamic format group_size lm_head pack_dtype sym",
    "awq": "backend bits checkpoint_format format group_size pack_dtype q_group_size sym w_bit zero_point",
    "fp8": "activation_scheme fmt kv_cache_scheme weight_block_size",
    "bitsandbytes": "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type "
    "bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold "
    "load_in_4bit load_in_8bit",
    "mxfp4": "",
    "torchao": "include_input_output_embeddings quant_type untie_embedding_weights",
    "auto-round": "act_bits act_data_type act_dynamic act_group_size act_sym activation_scheme backend bits "
    "block_name_to_quantize data_type extra_config fmt group_size packing_format regex_config sym weight_block_size",
    "modelopt": "config_groups kv_cache_scheme producer quant_algo quantization quantized_layers",
    "exl3": "bits codebook head_bits out_scales tensor_storage",
    "gguf": "types",
    "compress-runtime": "format groups",
}
"""Keys that are read, and those that repeat what is seen by tensors."""
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


def check_keys(format: str, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a key of a `quantization_config` that nothing reads and that may change numbers."""
    if format not in READ:
        return
    known = HARMLESS | {*READ[format].split(), *SKIPPED}
    sparsity = config.get("sparsity_config")
    harmless = isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")
    refuse_unread("quantization_config", config, known | ({"sparsity_config"} if harmless else set()), ONLY)
    for where, given, keys in _parts(format, config, known):
        if isinstance(given, Mapping):
            refuse_unread(f"{where} of quantization_config", given, keys)


def _parts(format: str, config: Mapping[str, Any], known: frozenset[str]) -> Iterator[tuple[str, Any, frozenset[str]]]:
    """Yields descriptions of some modules only, and the keys that each may have."""
    for part in ("config_groups", "dynamic", "extra_config"):
        entries = config.get(part)
        for name, given in entries.items() if isinstance(entries, Mapping) else ():
            yield f"{part}.{name}", given, GROUP_KEYS if part == "config_groups" else known
            for numbers in ("weights", "input_activations") if isinstance(given, Mapping) else ():
                yield f"{part}.{name}.{numbers}", given.get(numbers), NUMBER_KEYS | HARMLESS
