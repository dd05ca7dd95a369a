"""One frozen configuration of a running engine. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.kv_cache import AUTO


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What the engine may use.

    Attributes:
        device: `auto`, `cpu` or `cuda`.
        dtype: of activations: `auto` (the checkpoint's), `bfloat16`, `float16`, `float32` or `float64`.
        kv_cache: form of keys and values: `auto` (what the checkpoint records, else `16bit`), `16bit` (the dtype of
            activations), `fp8`, `int8`, `k8v4` or `int4`.
        kv_rotate, kv_sinks, kv_residual_length: as in `compress.checkpoint.kv_cache`; None leaves them as they are.
        linear_backend: `auto` (fastest that is exact enough), `w4a8` (8-bit activations: faster, less exact),
            `semi_structured` (2:4 weights in 16 bits by a GPU's sparse tensor cores) or `reference` (plain torch, the
            oracle).
        block_size: tokens per KV block.
        num_blocks: blocks in the pool; None derives it from `kv_memory_bytes`.
        kv_memory_bytes: memory for the pool when `num_blocks` is not given; None is 512 MiB on a CPU, and on a GPU what
            weights and steps leave.
        max_model_len: longest prompt + output; None takes the checkpoint's context.
        max_num_batched_tokens: token budget of one step.
        max_num_seqs: sequences in one step.
        prefill_chunk: prompt tokens of one sequence in one step at most; bounds the wait between two tokens of others.
        attention_window: serve endless streams: a token sees the last so many tokens, and what lies before them is
            given up; None leaves the model as it is.
        attention_sinks: first tokens that stay visible beside the window.
        prefix_caching: reuse blocks of equal prefixes.
        kv_offload_bytes: host memory for blocks of prefixes that the pool has no room for; 0 is off.
        seed: source of the seeds of requests that bring none.
        speculative_model: what guesses the next tokens: `ngram`, `ngram-tree`, `self:2bit`, `self:3bit`, `self:skip`,
            `self:skip=N` (layers), `demo` (the bundled draft model) or the folder of a checkpoint with the same
            vocabulary; empty is off.
        num_speculative_tokens: draft tokens in a row at most, per sequence and step; a tree has several such rows.
        spec_verify: how guesses are verified: `exact` (the same tokens as without, also for a seed) or `rejection` (the
            same distribution).
    """

    device: str = "auto"
    dtype: str = "auto"
    linear_backend: str = "auto"
    kv_cache: str = AUTO
    kv_rotate: bool | None = None
    kv_sinks: int | None = None
    kv_residual_length: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    prefill_chunk: int = 256
    prefix_caching: bool = True
    kv_offload_bytes: int = 0
    seed: int = 0
    speculative_model: str = ""
    num_speculative_tokens: int = 4
    spec_verify: str = "exact"
    attention_window: int | None = None
    attention_sinks: int = 0

    @property
    def max_span_tokens(self) -> int:
        """Tokens of one prompt that are computed in one step at most."""
        return min(self.prefill_chunk, self.max_num_batched_tokens)
