"""Readers of config.json, and the parts that pre-norm decoders are composed of."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from compress.common.errors import CheckpointError
from compress.models.block import Block
from compress.models.clamped_gate import ClampedGate
from compress.models.linear import Linear
from compress.models.mixers.attention import Attention
from compress.models.mixers.mixer import Mixer
from compress.models.mlp import MLP, Mixture
from compress.models.norm import Norm
from compress.models.rope import Rope
from compress.models.router import Router
from compress.models.spec import ModelSpec, TensorNames
from compress.models.stacks import Stack

Config = Mapping[str, Any]
"""A parsed config.json, of transformers 4 or 5."""


MAX_SIZE = 2**31 - 1
"""Largest size of a dimension: engines count rows, columns and positions in 32 bits."""
MAX_LAYERS = 10_000
"""Far above any model; a config.json with more would be described layer by layer for hours."""


def refusal(key: str, value: object, expected: str) -> CheckpointError:
    """Build the error for a value of config.json that cannot be used."""
    return CheckpointError(f"config.json has {key}={reprlib.repr(value)}, not {expected}", "Correct config.json")


def positive(config: Config, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
    """Reads a size. Raises CheckpointError unless it is an integer from 1 to `most`."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(key, value, "a positive integer")
    if value > most:
        raise refusal(key, value, f"at most {most:,}")
    return value


MAX_NUMBER = 1e30
"""Largest base, factor or eps, which float32 can hold."""


def number(config: Config, key: str, default: float | None = None) -> float:
    """Reads a number of at least 0. Raises CheckpointError for anything else, NaN and infinity among it."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise refusal(key, value, "a number of 0 or more")
    return float(value)


def integer(config: Config, key: str, default: int) -> int:
    """Reads an integer of any sign. Raises CheckpointError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_SIZE:
        raise refusal(key, value, "an integer")
    return value


def flag(config: Config, key: str, default: bool = False) -> bool:
    """Reads a switch, off where it is null. Raises CheckpointError unless it is true or false."""
    value = config.get(key, default)
    if not isinstance(value, bool | None):
        raise refusal(key, value, "true or false")
    return bool(value)


def text(config: Config, key: str, default: str) -> str:
    """Reads a name. Raises CheckpointError unless it is a string."""
    value = config.get(key, default)
    if not isinstance(value, str):
        raise refusal(key, value, "a name")
    return value


def block(config: Config, key: str) -> dict[str, Any]:
    """Reads an object, empty where it is missing or null. Raises CheckpointError for anything else."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise refusal(key, value, "an object")
    return dict(value)


def num_layers(config: Config) -> int:
    """Reads the number of transformer blocks. Raises CheckpointError."""
    return positive(config, "num_hidden_layers", most=MAX_LAYERS)


def context_length(config: Config) -> int | None:
    """Reads the longest sequence that the model was made for; None where it is not said. Raises CheckpointError."""
    names = "max_position_embeddings", "n_positions", "model_max_length"
    keys = (key for key in names if config.get(key) is not None)
    return next((positive(config, key) for key in keys), None)


ROPE_PARAMETERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
"""Numbers among the parameters of rotary embeddings."""
LENGTH = "original_max_position_embeddings"


def rope(
    config: Config,
    kind: str = "",
    *,
    theta: float = 10000.0,
    knows_partial: bool = False,
    interleaved: bool = False,
    older_names: Mapping[str, str] = {},
) -> Rope:
    """Reads the rotary embedding, from `rope_parameters` of transformers 5 or `rope_scaling` of transformers 4.

    As in transformers, `rope_scaling` wins where both are there, and so does an `original_max_position_embeddings`
    outside of them. Raises CheckpointError: no object, or a parameter of it that is not a number.

    Args:
        kind: kind of layer, whose parameters are a block of their own.
        theta: base of a config.json without one.
        knows_partial, interleaved: see `Rope`.
        older_names: types by the names that older checkpoints have for them.
    """
    options = block(config, "rope_scaling") or block(config, "rope_parameters")
    if kind in options:
        # transformers reads the length inside of a kind only, and `truncate` outside of it only.
        config = {**config, LENGTH: None}
        options = block(options, kind) | {"truncate": options.get("truncate", True)}
    name = text(options, "rope_type", text(options, "type", "default"))
    name = older_names.get(name, name)
    base = number({"rope_theta": config.get("rope_theta", theta)} | options, "rope_theta")
    if base <= 1:
        raise refusal("rope_theta", base, "above 1")
    outer = config.get("partial_rotary_factor", config.get("rope_partial_factor"))
    partial = number({"partial_rotary_factor": outer} | options, "partial_rotary_factor", 1.0)
    for key in ROPE_PARAMETERS:
        number(options, key, 0.0)
    if options.get("factor") == 0:
        raise refusal("factor", 0, "above 0")
    context = context_length(config)
    length = config.get(LENGTH) or options.pop(LENGTH, None) or context
    if length is not None:
        options[LENGTH] = positive({LENGTH: length}, LENGTH)
    if name == "longrope":
        growth = context / options[LENGTH] if context else None
        options |= {"factor": options.get("factor") or growth} | _stretches(options)
    read = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
    rest = {key: value for key, value in options.items() if key not in read}
    return Rope(name, base, rest, partial, knows_partial, interleaved)


def _stretches(options: Config) -> dict[str, Any]:
    """Reads the factors of LongRoPE. Raises CheckpointError unless they are lists of positive numbers."""
    found = {key: options.get(key) for key in ("short_factor", "long_factor")}
    for key, factors in found.items():
        if not isinstance(factors, list) or not factors or not all(map(_is_factor, factors)):
            raise refusal(key, factors, "a list of positive numbers")
    return found


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER


def ropes_by_kind(config: Config, thetas: Mapping[str, float]) -> dict[str, Rope]:
    """Reads a rotary embedding for each kind of layer; `rope_scaling` is that of full attention only. Raises
    CheckpointError: as `rope`. `thetas`: base of each kind where its parameters have none."""
    options = block(config, "rope_parameters")
    options |= {kind: block(options, kind) for kind in thetas}
    options["full_attention"] |= block(config, "rope_scaling")
    config = {**config, "rope_parameters": options, "rope_scaling": None}
    return {kind: rope({**config, "rope_theta": theta}, kind) for kind, theta in thetas.items()}


def rope_of_kind(config: Config, defaults: Config, kind: str) -> Rope:
    """Reads the rotary embedding of a kind of layer, where only type `proportional` reads a share of the channels.
    Raises CheckpointError: as `rope`. `defaults`: `rope_parameters` of a config.json without them."""
    found = rope({**config, "rope_parameters": block(config, "rope_parameters") or defaults}, kind, knows_partial=True)
    if found.type != "proportional":
        return replace(found, partial=1.0)
    read = {key: value for key, value in found.options.items() if key == "factor"}
    return replace(found, partial=1.0, options=read | {"share": found.partial})


def windows(config: Config, kinds: Any = None, first: int = 0) -> tuple[int | None, ...]:
    """Reads the attention window of every layer; None attends to all tokens. Raises CheckpointError: layers that are
    neither of full nor of sliding attention, or not one kind for each. `kinds`: those of the layers, None for
    `layer_types`; `first`: layer from which windows hold without either."""
    count = num_layers(config)
    if config.get("sliding_window") is None:
        return (None,) * count
    window = positive(config, "sliding_window")
    kinds = config.get("layer_types") if kinds is None else kinds
    if kinds is None:
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(count)]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise refusal("layer_types", kinds, "a list of names")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != count:
        raise CheckpointError(f"layer_types {sorted(unknown) or len(kinds)} is not supported", "Check config.json")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_types(config: Config, period: int) -> list[str]:
    """Reads the kind of every layer; without `layer_types` every `period`-th one sees all tokens."""
    layers, kinds = range(num_layers(config)), config.get("layer_types")
    return kinds or ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in layers]


T = TypeVar("T", bound=Mixer | None)


def by_kind(config: Config, kinds: Any, mixers: Mapping[str, T]) -> list[T]:
    """Lists the mixer of every layer by its kind. Raises CheckpointError unless there is one of these kinds for each
    layer, and attention among them."""
    count = num_layers(config)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in [*mixers] for kind in kinds):
        raise refusal("layer_types", kinds, f"a list of {count} times {' or '.join(mixers)}")
    found = [mixers[kind] for kind in kinds]
    if not any(isinstance(mixer, Attention) for mixer in found):
        raise refusal("layer_types", kinds, "one with attention")
    return found


def switched_windows(config: Config, kinds: Any = None) -> tuple[int | None, ...]:
    """Windows that hold only with `use_sliding_window`, from layer `max_window_layers` on."""
    if not flag(config, "use_sliding_window"):
        return (None,) * num_layers(config)
    return windows({"sliding_window": 4096, **config}, kinds, int(number(config, "max_window_layers", 28)))


def norm(config: Config, name: str, size: int | None = None, **options: Any) -> Norm:
    """Composes a norm with the eps of the config; `options` are further fields of `Norm`."""
    return Norm(name, size or positive(config, "hidden_size"), number(config, "rms_norm_eps", 1e-6), **options)


def attention(
    config: Config,
    *,
    window: int | None = None,
    bias: bool | tuple[bool, bool] = False,
    qk_norm: bool | Mapping[str, Any] | tuple[Norm, Norm] = False,
    fused: bool = False,
    output_gate: bool = False,
    name: str = "self_attn",
    **options: Any,
) -> Attention:
    """Composes grouped-query attention named as in Llama. Raises CheckpointError: query heads that do not divide among
    the key-value heads.

    Args:
        bias: of queries, keys and values, and of the output where it differs.
        qk_norm: norms of queries and keys; True is an RMSNorm over each head, and further fields of it do, too.
        fused: queries, keys and values are stored as one matrix.
    """
    hidden, heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    kv_heads = positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads cannot share {kv_heads} key-value heads", "Check config.json")
    head_dim = positive(config, "head_dim", hidden // heads)
    parts = {"q_proj": heads * (1 + output_gate), "k_proj": kv_heads, "v_proj": kv_heads}
    parts = {"qkv_proj": sum(parts.values())} if fused else parts
    style = qk_norm if isinstance(qk_norm, Mapping) else {}
    norms = tuple(norm(config, f"{name}.{part}_norm", head_dim, **style) for part in "qk") if qk_norm else None
    qkv_bias, output_bias = bias if isinstance(bias, tuple) else (bias, bias)
    mixer = Attention(
        heads,
        kv_heads,
        head_dim,
        tuple(Linear(f"{name}.{part}", count * head_dim, hidden, qkv_bias) for part, count in parts.items()),
        Linear(f"{name}.o_proj", hidden, heads * head_dim, output_bias, split="rows"),
        options.pop("rope") if "rope" in options else rope(config),
        qk_norm if isinstance(qk_norm, tuple) else norms,
        window=window,
        output_gate=output_gate,
        name=name,
    )
    return replace(mixer, **options)


def wide_norms(config: Config, mixer: Attention, **options: Any) -> Attention:
    """Adds a norm over all query heads and one over all key heads; `options` are further fields of `Norm`."""
    query, key = (
        norm(config, f"self_attn.{name}_norm", heads * mixer.head_dim, **options)
        for name, heads in (("q", mixer.num_heads), ("k", mixer.num_kv_heads))
    )
    return replace(mixer, qk_norm=(query, key))


GATED = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(
    config: Config,
    *,
    bias: bool = False,
    fused: bool = False,
    name: str = "mlp",
    size: int | None = None,
    parts: tuple[str, str, str] = GATED,
) -> MLP:
    """Composes a gated MLP named as in Llama.

    Args:
        fused: gate and up are stored as one matrix.
        size: number of inner channels; None takes `intermediate_size`.
        parts: names of gate, up and down.
    """
    hidden, inner = positive(config, "hidden_size"), size or positive(config, "intermediate_size")
    inputs = {"gate_up_proj": 2 * inner} if fused else dict.fromkeys(parts[:2], inner)
    return MLP(
        tuple(Linear(f"{name}.{part}", rows, hidden, bias) for part, rows in inputs.items()),
        Linear(f"{name}.{parts[2]}", hidden, inner, bias, split="rows"),
        text(config, "hidden_act", "silu"),
        name=name,
    )


def mixture(
    config: Config,
    *,
    name: str = "mlp",
    size: int | None = None,
    parts: tuple[str, str, str] = GATED,
    shared: MLP | None = None,
    shared_gate: Linear | None = None,
    scores: str = "gate",
    stacks: tuple[Stack, ...] = (),
    biased: bool = False,
    clamped: ClampedGate | None = None,
    expert: Callable[..., MLP] | None = None,
    **options: Any,
) -> Mixture:
    """Composes a mixture of gated experts `NAME.experts.N` with a router `NAME.SCORES`. Raises CheckpointError: more
    experts for a token than there are, or than its groups have, or groups of different sizes.

    Args:
        size: number of inner channels of an expert; None takes `intermediate_size`.
        parts: names of gate, up and down of an expert.
        biased: router and experts have biases.
        clamped: activation of the experts.
        expert: composes one from its `name`; None for gated ones.
    """
    count = next((positive(config, key) for key in EXPERT_COUNTS if config.get(key) is not None), None)
    if count is None:
        raise refusal("num_experts", None, "a positive integer")
    chosen = positive(config, "num_experts_per_tok", most=count)
    router = Router(Linear(f"{name}.{scores}", count, positive(config, "hidden_size"), biased), chosen, **options)
    if count % router.num_groups or router.num_chosen_groups > router.num_groups:
        raise CheckpointError(f"{count} experts cannot be chosen from {router.num_groups} groups", "Check config.json")
    if chosen > (among := count // router.num_groups * router.num_chosen_groups):
        raise CheckpointError(f"{chosen} experts cannot be chosen among the {among} of a token's groups", "Set fewer")
    expert = expert or partial(gated_mlp, config, bias=biased, size=size, parts=parts)
    experts = (replace(expert(name=f"{name}.experts.{index}"), clamped=clamped) for index in range(count))
    return Mixture(router, tuple(experts), shared, shared_gate, name, stacks)


def grouped_mixture(config: Config, **options: Any) -> Mixture:
    """Composes the mixture of DeepSeek (arXiv:2401.06066): experts in groups, and shared ones that are one MLP."""
    size = positive(config, "moe_intermediate_size")
    defaults = {
        "normalizes": flag(config, "norm_topk_prob", True),
        "scale": number(config, "routed_scaling_factor", 1.0),
        "num_groups": positive(config, "n_group", 1),
        "num_chosen_groups": positive(config, "topk_group", 1),
    }
    shared = gated_mlp(config, name="mlp.shared_experts", size=size * positive(config, "n_shared_experts", 1))
    return mixture(config, size=size, **({"shared": shared} | defaults | options))


SIGMOID_ROUTER: Mapping[str, Any] = {
    "activation": "sigmoid",
    "bias": "mlp.gate.e_score_correction_bias",
    "in_float32": True,
}
"""Fields of the router of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2)."""


def dense_first(config: Config, experts: Mixture, num_dense: int, **options: Any) -> list[MLP | Mixture]:
    """Lists the MLP or mixture of each layer: the first `first_k_dense_replace` are dense. `num_dense`: where
    config.json does not say."""
    count, mlp = int(number(config, "first_k_dense_replace", num_dense)), gated_mlp(config, **options)
    return [experts if layer >= count else mlp for layer in range(num_layers(config))]


def mlps_by_kind(config: Config, experts: Mixture, default: Sequence[MLP | Mixture]) -> list[MLP | Mixture]:
    """Lists the MLP or mixture of each layer as `mlp_layer_types` says, or `default` without it. Raises
    CheckpointError: not one kind for each layer."""
    kinds, mlp = config.get("mlp_layer_types"), gated_mlp(config)
    if not kinds:
        return list(default)
    if not isinstance(kinds, list) or len(kinds) != num_layers(config):
        raise refusal("mlp_layer_types", kinds, "a kind for each layer")
    return [experts if kind == "sparse" else mlp for kind in kinds]


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that configs have for the number of experts."""


def plain_mlp(
    config: Config,
    up: str,
    down: str,
    activation: str,
    *,
    bias: bool = False,
    name: str = "mlp",
    size: int | None = None,
) -> MLP:
    """Composes an MLP without a gate from the names of its linears and its default activation; `size` as of
    `gated_mlp`."""
    hidden, inner = positive(config, "hidden_size"), size or positive(config, "intermediate_size")
    return MLP(
        (Linear(f"{name}.{up}", inner, hidden, bias),),
        Linear(f"{name}.{down}", hidden, inner, bias, split="rows"),
        text(config, "hidden_act", activation),
        gated=False,
        name=name,
    )


NORM_FIELDS = ("input_norm", "mlp_norm", "output_norm", "mlp_output_norm")


def decoder(
    config: Config,
    mixers: Sequence[Mixer],
    mlp: MLP | Mixture | Sequence[MLP | Mixture],
    *,
    norms: tuple[str | None, str | None] = ("input_layernorm", "post_attention_layernorm"),
    after: tuple[str, ...] = (),
    final: str = "model.norm",
    style: Mapping[str, Any] = {},
    **options: Any,
) -> ModelSpec:
    """Composes a decoder named as Llama, with one block per mixer; `options` are further fields of `Block`.

    Args:
        norms: names of the norms before mixer and MLP; None for none.
        after: names of the norms of what mixer and MLP add.
        style: further fields of all norms.
    """
    mlps = mlp if isinstance(mlp, Sequence) else [mlp] * len(mixers)
    named = zip(NORM_FIELDS, (*norms, *after), strict=False)
    around: dict[str, Any] = {field: None if name is None else norm(config, name, **style) for field, name in named}
    return ModelSpec(
        positive(config, "hidden_size"),
        positive(config, "vocab_size"),
        tuple(Block(mixer=mixer, mlp=each, **around, **options) for mixer, each in zip(mixers, mlps, strict=True)),
        norm(config, final, **style),
        flag(config, "tie_word_embeddings"),
        names=TensorNames(final_norm=final),
    )
