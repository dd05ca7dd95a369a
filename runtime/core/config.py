"""The configuration of an engine and of a server: every setting with its default and its help text. No torch.

Each group is a set of command-line options; `RuntimeConfig` combines them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.checkpoint.activations import ACTIVATIONS
from compress.checkpoint.kv_cache import AUTO
from compress.checkpoint.state_dtype import STATE_DTYPES, STATE_FLOAT32
from compress.common.cli import SIZE_OPTION, option
from runtime.core.step_sizes import default_step_sizes


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Device, dtype and kernels."""

    device: str = option(
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="Device to run on; auto: the GPU if there is one.",
    )
    dtype: str = option(
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32", "float64"),
        help="Dtype of activations and of an unquantized KV cache; auto: the checkpoint's.",
    )
    linear_backend: str = option(
        default="auto",
        metavar="NAME",
        help="Kernels for quantized weights. auto: the fastest that are exact enough; semi_structured: 2:4 sparse "
        "weights in 16 bits on a GPU's sparse tensor cores; humming: the CUDA kernels of the package humming-kernels; "
        "reference: plain PyTorch; or the name of one kernel.",
    )
    activations: str = option(
        default=AUTO,
        choices=ACTIVATIONS,
        help="Activations that packed weights are multiplied by on a CPU, in bfloat16 models. 8bit: rounded to 8 bits "
        "by groups of columns, faster; 16bit: as they are; stored: rounded as a checkpoint of another tool says; auto: "
        "8bit if a measurement, recorded in the checkpoint or made at the first start, allows it.",
    )
    attention_backend: str = option(
        default="auto",
        choices=("auto", "flashinfer"),
        help="Attention on a GPU. auto: the built-in kernels, or others if a table measured on this GPU prefers them; "
        "flashinfer: the package flashinfer-python for prompts, if the KV cache has 16 bits.",
    )
    programmatic_launch: str = option(
        default="auto",
        choices=("auto", "on", "off"),
        help="On a GPU of compute capability 9.0 or newer, start each kernel between the layers of a model before the "
        "one ahead of it has ended. auto: if a record of a passed check on such a GPU lies in the package; none does "
        "so far.",
    )
    moe_expert_cache: int | None = option(
        default=None,
        min=1,
        metavar="EXPERTS",
        help="Keep the experts of mixtures in host memory and EXPERTS of each layer on the GPU: initially the most "
        "popular ones of calibration, then the most frequent ones of recent steps. Default: all experts on the "
        "GPU.",
    )
    tensor_parallel_size: int = option(
        "--tensor-parallel-size",
        default=1,
        min=1,
        metavar="RANKS",
        help="Number of processes that share the model. Each holds a part of every matrix and of the KV cache, on a "
        "GPU of its own, or with its share of the cores of a CPU.",
    )
    pipeline_parallel_size: int = option(
        "--pipeline-parallel-size",
        default=1,
        min=1,
        metavar="STAGES",
        help="Number of stages among which the layers of the model are divided. Each has some consecutive layers with "
        "their part of the KV cache, and --tensor-parallel-size processes.",
    )
    enable_expert_parallel: bool = option(
        "--enable-expert-parallel",
        default=False,
        help="Give each of the --tensor-parallel-size processes some whole experts of every mixture, instead of a part "
        "of every expert.",
    )
    sequence_parallel_min_tokens: int = option(
        default=0,
        min=0,
        metavar="TOKENS",
        help="Divide the residual stream of steps with TOKENS or more among the --tensor-parallel-size processes by "
        "tokens; 0: of none.",
    )
    trust_remote_code: bool = option(
        "--trust-remote-code", default=False, help="Execute Python files of the model folder. Read them first."
    )

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def asks_for_ranks(self) -> bool:
        """Whether there are options that several processes must follow."""
        return self.num_ranks > 1 or self.enable_expert_parallel or self.sequence_parallel_min_tokens > 0


@dataclass(frozen=True, kw_only=True)
class KVCacheOptions:
    """Format of the KV cache; see `compress.checkpoint.kv_cache`."""

    kv_cache: str = option(
        default=AUTO,
        choices=(AUTO, "16bit", "fp8", "int8", "k8v4", "int4"),
        help="Format of the KV cache: 16bit (the dtype of activations), fp8, int8, k8v4 (int8 keys, int4 values) or "
        "int4; auto: the checkpoint's recommendation, else 16bit.",
    )
    kv_rotate: bool | None = option(
        default=None,
        help="Rotate keys by a Hadamard matrix before quantizing them, which spreads outliers. Default: for int4.",
    )
    kv_sinks: int | None = option(
        default=None,
        min=0,
        metavar="TOKENS",
        help="Keep keys and values of the first TOKENS tokens in 16 bits.",
    )
    kv_residual_length: int | None = option(
        default=None,
        min=0,
        metavar="TOKENS",
        help="Keep keys and values of the last TOKENS tokens in 16 bits. Restores most of the quality for a few MiB "
        "per sequence, but disables prefix caching.",
    )


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Context length and attention window."""

    max_model_len: int | None = option(
        default=None,
        min=2,
        help="Longest prompt plus output in tokens. Default: the model's context length.",
    )
    attention_sinks: int = option(
        default=0,
        min=0,
        help="Number of first tokens that stay visible in addition to --attention-window; 4 are enough.",
    )
    attention_window: int | None = option(
        default=None,
        min=1,
        metavar="TOKENS",
        help="Generate endless streams (StreamingLLM): each token attends to the --attention-sinks first and the last "
        "TOKENS tokens, memory stays constant, and --max-model-len may exceed the model's context length.",
    )


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Speculative decoding."""

    speculative_model: str = option(
        default="",
        metavar="DRAFTER",
        help="Draft several tokens and verify them in one step. DRAFTER is ngram (prompt lookup), ngram-tree (several "
        "earlier continuations at once), mtp (the checkpoint's multi-token prediction head), self:2bit or "
        "self:3bit (the model at fewer bits), self:skip or self:skip=N (the model without N layers), "
        "demo (the bundled draft model), or a smaller checkpoint with the same tokenizer (a folder or ORG/NAME). "
        "Turns itself off when measured throughput does not improve.",
    )
    num_speculative_tokens: int = option(
        default=4,
        min=1,
        max=16,
        help="Maximum number of draft tokens per step and sequence.",
    )
    spec_verify: str = option(
        default="exact",
        choices=("exact", "rejection"),
        help="exact: the same tokens as without speculation, up to rounding; rejection: rejection sampling, which "
        "preserves the distribution only.",
    )


@dataclass(frozen=True, kw_only=True)
class KVMemoryOptions:
    """Size of the KV cache."""

    kv_memory_bytes: int | None = option(
        "--kv-memory",
        default=None,
        **SIZE_OPTION,
        help="Memory for the KV cache, e.g. 4GiB. Default: 512MiB; on a GPU all memory that weights and activations "
        "leave free.",
    )


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """Recurrent states; does not apply to models with attention only."""

    state_memory_bytes: int | None = option(
        "--state-memory",
        default=None,
        **SIZE_OPTION,
        help="Part of --kv-memory for states of recurrent layers: one per running sequence, the rest for states saved "
        "with cached prefixes. Default: half.",
    )
    state_interval: int = option(
        default=512,
        min=1,
        metavar="TOKENS",
        help="Save the state of recurrent layers every TOKENS tokens of a prompt, in addition to its end, the ends of "
        "its messages and the ends of shared prefixes.",
    )
    state_dtype: str = option(
        default=STATE_FLOAT32,
        choices=STATE_DTYPES,
        help="Storage dtype of recurrent states; they are computed in float32. 16 bits require a cost recorded by "
        "`compress eval --state-dtype --record`.",
    )


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Size of a step."""

    max_num_seqs: int = option(default=64, min=1, help="Maximum number of sequences per step.")
    max_num_batched_tokens: int | None = option(
        default=None,
        min=1,
        metavar="TOKENS",
        help="Maximum number of tokens per step. Default: 512; on a GPU 1024 to 8192, by its memory.",
    )
    prefill_chunk: int | None = option(
        default=None,
        min=1,
        metavar="TOKENS",
        help="Maximum prompt tokens of one sequence per step. Default: 256; on a GPU 256 to 2048, by its memory.",
    )


@dataclass(frozen=True, kw_only=True)
class BatchOptions(StepOptions):
    """Size of a step, and overlap of consecutive steps."""

    overlap: bool = option(
        default=True,
        help="Submit the next step to a GPU before reading the tokens of the previous one.",
    )


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """Time of a step. Applies to servers, whose clients wait for the next token."""

    max_itl_ms: float | None = option(
        "--max-itl",
        default=None,
        min=0,
        metavar="MILLISECONDS",
        help="Time of a step while answers are generated, which is the wait for their next token: prompts get what "
        "decoding leaves of it. 0: as many prompt tokens as fit. Default: 50, or four times a step without prompts if "
        "that is more.",
    )


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """Host memory that extends the KV cache."""

    kv_offload_bytes: int = option(
        "--kv-offload",
        default=0,
        **SIZE_OPTION,
        help="Host memory for cached prefixes that are evicted from the KV cache, and for saved states of recurrent "
        "layers, e.g. 4GiB; 0 is off.",
    )


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Choice of one of several engines for a request."""

    prefix_routing: bool = option(
        "--prefix-routing/--no-prefix-routing",
        default=True,
        help="Of several engines or replicas, send a prompt to the one that has its start in its KV cache, unless "
        "another one has far fewer requests.",
    )


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions(RoutingOptions):
    """Several engines of one server."""

    data_parallel_size: int = option(
        "--data-parallel-size",
        default=1,
        min=1,
        metavar="ENGINES",
        help="Number of engines, which share the requests. Each has a process, the whole model and a KV cache of "
        "--kv-memory; GPUs of its own, or its share of the cores of a CPU.",
    )


@dataclass(frozen=True, kw_only=True)
class SeedOptions:
    """Reproducibility."""

    seed: int = option(default=0, min=0, help="Base seed of requests that have no seed.")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """LoRA adapters over the linears of a model."""

    lora_modules: list[str] | None = option(
        default=None,
        metavar="NAME=PATH",
        help="Serve the LoRA adapter of a folder that PEFT wrote; requests name it as their model. May be repeated. Or "
        "JSON with name, path and the base_model_name of one of several models. Default: the one that the base model "
        "in adapter_config.json names.",
    )
    enable_lora: bool = option(
        "--enable-lora", default=False, help="Reserve memory for adapters, though --lora-modules names none."
    )
    max_loras: int = option(
        default=4, min=1, metavar="ADAPTERS", help="Maximum number of different adapters per step, and on the device."
    )
    max_lora_rank: int = option(default=16, min=1, metavar="RANK", help="Highest rank of an adapter.")
    max_cpu_loras: int = option(
        default=32,
        min=1,
        metavar="ADAPTERS",
        help="Adapters that stay in host memory, the last used; others are read again when a request names them.",
    )

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return self.enable_lora or bool(self.lora_modules)


@dataclass(frozen=True, kw_only=True)
class SizeOptions(BatchOptions, StateOptions, KVMemoryOptions, ContextOptions, KVCacheOptions, ComputeOptions):
    """Options that decide the memory of an engine."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(SizeOptions, SpeculativeOptions, OffloadOptions, SeedOptions, LoraOptions):
    """The configuration of an engine.

    Attributes:
        block_size: tokens per page of the KV cache.
        num_blocks: blocks of the KV cache; None derives the number from `kv_memory_bytes`.
        num_state_slots: slots for recurrent states; None derives the number from `state_memory_bytes`.
        max_itl_ms: aim in milliseconds for the time of a step with decodes; 0 is none, which makes the sizes of steps
            reproducible; None is the default of `LatencyOptions`.
        prefix_caching: whether to reuse pages of equal prefixes.
        warm_up: whether to compile kernels and capture CUDA graphs on a GPU before the first request.
        step_sizes_reason: explanation of the maximum tokens per step and prompt.
        captures_later: whether to leave graphs that the first answers do not need to the idle time of the engine's
            thread (`runtime.engine.engine_thread`).
        ends_with_ranks: whether the process ends when another one that shares the model has ended.
    """

    block_size: int = 16
    num_blocks: int | None = None
    num_state_slots: int | None = None
    max_itl_ms: float | None = 0
    prefix_caching: bool = True
    warm_up: bool = False
    step_sizes_reason: str = "as asked for"
    captures_later: bool = False
    ends_with_ranks: bool = False

    @property
    def step_tokens(self) -> int:
        """Maximum tokens per step; of a CPU if none are given."""
        return self.max_num_batched_tokens or default_step_sizes().tokens

    @property
    def max_span_tokens(self) -> int:
        """Maximum tokens of one prompt per step."""
        return min(self.prefill_chunk or default_step_sizes().chunk, self.step_tokens)

    def with_step_sizes(self, gpu_bytes: int | None) -> RuntimeConfig:
        """Returns the configuration with the default sizes of steps on a device where none are given.

        Args:
            gpu_bytes: memory of the GPU; None on a CPU.
        """
        default, asked = default_step_sizes(gpu_bytes), (self.max_num_batched_tokens, self.prefill_chunk)
        tokens, chunk = asked[0] or default.tokens, asked[1] or default.chunk
        reason = "as asked for" if any(asked) else default.reason
        return replace(self, max_num_batched_tokens=tokens, prefill_chunk=chunk, step_sizes_reason=reason)


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of a server that do not depend on the model. Times are in seconds."""

    max_requests: int = option(
        default=256,
        min=1,
        help="Maximum sequences of one client, running and waiting; twice that for all clients together. Further "
        "requests get status 429.",
    )
    fair: bool = option(
        "--fair/--first-come",
        default=True,
        help="Share the engine equally between clients (API keys, else addresses), or serve requests in order of "
        "arrival.",
    )
    max_body_bytes: int = option(
        "--max-body",
        default=4 * 2**20,
        **SIZE_OPTION,
        help="Maximum size of a request body; a larger one gets status 413. Default: 4MiB.",
    )
    queue_seconds: float = option(
        "--queue-timeout",
        default=600.0,
        min=0.1,
        help="Seconds from a request's arrival to its first token; then status 503.",
    )
    request_seconds: float = option(
        "--request-timeout",
        default=3600.0,
        min=0.1,
        help="Seconds from a request's arrival to its last token; then status 504, or an error in its stream.",
    )
    client_seconds: float = option(
        "--client-timeout",
        default=30.0,
        min=0.1,
        help="Timeout in seconds for a client to send a request (then status 408) and to continue reading (then it is "
        "disconnected).",
    )
    drain_seconds: int = option(
        default=30,
        min=0,
        help="Seconds for running requests to finish when the server is stopped.",
    )


@dataclass(frozen=True)
class Limits(LimitOptions):
    """Limits of a server.

    Attributes:
        max_model_len: tokens of prompt plus output of one sequence.
    """

    max_model_len: int
