"""Keys of config.json that are read, and those that change no numbers; every other one is refused."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from compress.common.errors import CheckpointError

_READ = """
architectures attention_bias attention_chunk_size attention_in_multiplier attention_k_eq_v attention_multiplier
attention_out_bias attention_out_multiplier attn_layer_offset attn_layer_period attn_logit_softcapping attn_scale
attn_temperature_tuning auto_map block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of
block_size bos_token chunk_size chunk_size_feed_forward clip_qkv compression_config conv_L_cache conv_bias conv_kernel
decoder_sparse_step dim_model_base dtype embedding_multiplier enable_moe_block eos_token expand expert_layer_offset
expert_layer_period final_logit_softcapping first_k_dense_replace floor_scale full_attention_interval
full_attn_alpha_factor full_attn_beta_factor full_attn_idxs global_attn_every_n_layers global_head_dim head_dim
hidden_act hidden_activation hidden_size hidden_size_per_layer_input hybrid_override_pattern id2label index_head_dim
index_n_heads index_skip_topk_offset index_topk index_topk_freq index_topk_pattern indexer_types input_jitter_noise
interleave_moe_layer_step intermediate_size intermediate_size_mlp is_causal is_encoder_decoder key_multiplier
kv_lora_rank label2id layer_norm_eps layer_norm_epsilon layer_types layers_block_type linear_attn_alpha_factor
linear_attn_beta_factor linear_attn_config linear_conv_kernel_dim linear_head_dim linear_key_head_dim linear_num_heads
linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_bias lm_head_multiplier logit_scale
logits_scaling mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_dt_min
mamba_dt_rank mamba_expand mamba_head_dim mamba_hidden_act mamba_n_groups mamba_n_heads mamba_norm_before_gate
mamba_num_heads mamba_proj_bias mamba_rms_norm mamba_ssm_cache_dtype max_position_embeddings max_window_layers
mlp_alpha_factor mlp_beta_factor mlp_bias mlp_hidden_act mlp_layer_types mlp_multipliers mlp_only_layers
model_max_length model_type moe_intermediate_size moe_k moe_latent_size moe_layer_end_index moe_layer_interval
moe_layer_start_index moe_layers moe_norm_min moe_num_experts moe_num_shared_experts moe_renormalize
moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_layers_block_type n_group n_groups n_routed_experts
n_shared_experts no_rope_layer_interval no_rope_layers norm_eps norm_epsilon norm_topk_prob num_attention_heads
num_dense_layers num_expert_group num_experts num_experts_per_tok num_experts_per_token num_global_key_value_heads
num_heads num_hidden_layers num_key_value_heads num_kv_shared_layers num_local_experts num_logits_to_keep
num_mtp_layers num_nextn_predict_layers num_shared_experts original_max_position_embeddings output_attentions
output_hidden_states output_router_logits pad_token partial_rotary_factor per_layer_config position_embedding_type
pretraining_tp problem_type projectors_bias q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim qkv_bias
quantization_config query_pre_attn_scalar rescale_prenorm_residual residual_in_fp32 residual_multiplier return_dict
rms_norm_eps rope_interleave rope_local_base_freq rope_parameters rope_partial_factor rope_scaling rope_theta
rope_type rotary_dim routed_scaling_factor router_jitter_noise scale_depth scale_emb shared_expert_intermediate_size
shared_intermediate_size sliding_window sliding_window_pattern ssm_in_multiplier ssm_multipliers ssm_out_multiplier
ssm_state_size state_size swa_rope_theta swiglu_alpha swiglu_limit text_config tie_embedding tie_word_embeddings
time_step_floor time_step_limit time_step_max time_step_min time_step_rank top_k_experts topk_group topk_method
torch_dtype use_associative_scan use_attention_gate use_bias use_bidirectional_attention use_cache use_conv_bias
use_double_wide_mlp use_expert_bias use_mamba_kernels use_mambapy use_qk_norm use_sandwich_norm use_sliding_window
v_head_dim vocab_size vocab_size_per_layer_input wrapped_in
"""
READ = frozenset(_READ.split())
"""Keys that a family reads, and further fields of transformers' configuration classes."""
_HARMLESS = """
add_cross_attention architecture attention_head_dim attention_implementation attn_implementation attn_type
attn_type_list begin_suppress_tokens block_dim block_norm_eps cache_implementation capacity_factor chat_template
cla_share_factor class_num conv_dim conv_dim_out cross_attention_hidden_size dense_list diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size ep_size experts_implementation experts_per_token
exponential_decay_length_penalty finetuning_task for_llm_compressor fuse_rms_norm gradient_checkpointing im_newline_id
init_method initial_context_length is_decoder layer_switch length_penalty license mamba_dt_init_floor mamba_dt_limit
mamba_dt_max mamba_ssm_dtype mamba_state_dtype mask_init_id max_length max_model_len max_seq_len max_sequence_length
min_length mlp_expansion_factor model_name moe_capacity moe_drop_tokens moe_gate moe_use_aux_free
mtp_hybrid_override_pattern mtp_num_hidden_layers mtp_transformer_layers mtp_use_dedicated_embeddings mup_denominator
name_or_path no_repeat_ngram_size num_beam_groups num_beams num_image_tokens num_key_value_groups num_labels
num_media_embeds num_mtp_modules num_return_sequences order_of_interleaved_layers org_vocab_size output_scores pad_id
position_embedding_xdrope prefix pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate
rms_norm routed_expert_dtype router_type sep_token seq_aux seq_len seq_length suppress_tokens task_specific_params
temperature text_end_id text_start_id tf_legacy_loss theta tie_encoder_decoder tokenizer_class tokenizer_name top_k
top_p torchscript trust_remote_code typical_p use_bfloat16 use_cache_kernels use_flash_attention use_flash_attn
use_mtp use_nope_cache vllm_config vocab_padding vocab_parallel
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys of training, of generation, of other parts and of engines, and those that repeat what another key says."""
HARMLESS_NAMES = re.compile(
    r"_|unsloth|initializer_|.*(initializer_range|dropout|_pdrop|_token_ids?|_coef|loss_alpha|_version|_init_scale|_init)$"
)
"""Names of further ones: private, of training, of tokens, of releases."""
ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_type": ("full",),
    "attn_output_gate": (True,),
    "block_use_swiglu": (True,),
    "compression_ratio": (1.0,),
    "indexer_rope_interleave": (True,),
    "layernorm_full_attention_beta": (1.0,),
    "layernorm_linear_attention_beta": (1.0,),
    "layernorm_mlp_beta": (1.0,),
    "mla_use_nope": (True,),
    "mlp_type": ("default",),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "norm_type": ("rms", "rmsnorm", "layer_norm"),
    "normalization_function": ("rmsnorm",),
    "qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "rotary_pct": (1.0,),
    "scoring_func": ("softmax", "sigmoid"),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_grouped_topk": (True,),
    "use_parallel_block": (True,),
    "use_rotary_pos_emb": (True,),
    "use_routing_bias": (True,),
}
"""Values of keys that nothing reads, because the models with other ones are of other types."""
_ROPE_KEYS = """
attention_factor beta_fast beta_slow factor finetuned high_freq_factor llama_4_scaling_beta long_factor long_mscale
low_freq_factor max_position_embeddings mrope_interleaved mrope_section mscale mscale_all_dim
original_max_position_embeddings partial_rotary_factor rope_theta rope_type short_factor short_mscale truncate type
"""
ROPE_KEYS = frozenset(_ROPE_KEYS.split())
"""Keys of a rotary embedding that are read, and those for positions of images."""


def check_keys(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a key of config.json that nothing reads and that may change numbers."""
    others = {key: value for key, value in config.items() if not HARMLESS_NAMES.match(key)}
    refuse_unread("config.json", others, READ | HARMLESS, ONLY)
    for name, rope in _ropes(config):
        refuse_unread(f"{name} of config.json", rope, ROPE_KEYS)


def _ropes(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields rotary embeddings: where there are some by kind of layer, each of them."""
    for name in ("rope_scaling", "rope_parameters"):
        given = config.get(name)
        if isinstance(given, Mapping):
            kinds = {key: value for key, value in given.items() if isinstance(value, Mapping)}
            yield name, {key: value for key, value in given.items() if key not in kinds}
            yield from ((f"{name}.{kind}", rope) for kind, rope in kinds.items())


def refuse_unread(
    where: str, given: Mapping[str, Any], known: Collection[str], only: Mapping[str, tuple[Any, ...]] = {}
) -> None:
    """Refuses keys that are not known, unless they are null, false or empty. Raises CheckpointError: the first one.

    Args:
        where: what has them, for the message.
        only: values that further keys may have.
    """
    for key, value in sorted(given.items()):
        if key not in known and not _is_off(value) and value not in only.get(key, ()):
            raise CheckpointError(
                f"{where} has {key}={reprlib.repr(value)}, which nothing here reads and which may change numbers",
                f"Remove {key} from config.json if it changes none, or use an engine that reads it",
            )


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})
