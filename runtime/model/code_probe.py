"""Sizes of models that their own modeling code computes, found by one pass without weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from compress.checkpoint.meta_model import build_on_meta, check_decoder, load_config
from compress.checkpoint.modeling.fused import separate_experts
from compress.checkpoint.reader import PackedCheckpoint
from compress.common.errors import CheckpointError
from compress.models.generic import SINKS, CodeSpec, Heads, code_spec
from compress.models.linear import Linear
from compress.models.spec import TensorNames

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PROBE = "compress_probe"
"""Name of the attention function that records what it is asked for."""
GIVEN = "compress_attention"
"""Attribute by which modules of a model know what answers their calls: not all of them pass arguments on."""
NUM_TOKENS = 5
HARMLESS = frozenset(
    {
        *(SINKS, "dropout", "sliding_window", "softcap", "is_causal", "position_ids", "cache_position", "use_cache"),
        *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
    }
)
"""Arguments of attention functions that are understood, or change nothing without a cache."""
KEYS_AND_VALUES = frozenset(
    ("full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local")
)
"""Kinds of layers without a state of another form."""


class _RefusalError(CheckpointError):
    """A refusal that begins with what modeling code does."""


def refuse(reason: str, remedy: str = "Serve it with transformers") -> CheckpointError:
    """Builds the error for modeling code that cannot be used here; raise it inside of `named`."""
    return _RefusalError(reason, remedy)


@contextmanager
def named(model_type: object) -> Iterator[None]:
    """Says in refusals which model it is."""
    try:
        yield
    except _RefusalError as error:
        problem = f"model_type {model_type!r} is not a family of this runtime, and its modeling code {error.problem}"
        raise CheckpointError(problem, error.remedy) from error


@dataclass(slots=True)
class Probe:
    """The calls of one pass. A masked pass tells windows by its masks, as the functions `eager` and `sdpa` see them."""

    calls: list[Heads] = field(default_factory=list)

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any) -> None:
        """Records a call. Raises CheckpointError for one that attention over pages cannot answer."""
        unknown = sorted(name for name, given in options.items() if given is not None and name not in HARMLESS)
        if unknown:
            raise refuse(f"passes {', '.join(unknown)} to its attention")
        if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
            raise refuse("attends to later tokens")
        tokens = {part.shape[2] for part in (query, key, value)}
        if tokens != {NUM_TOKENS} or len(query) != 1:
            raise refuse(f"attends to other tokens than those of its text ({max(tokens)} for {NUM_TOKENS})")
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads or value.shape[1] != kv_heads:
            raise refuse(f"has {heads} heads of queries, {kv_heads} of keys and {value.shape[1]} of values")
        head_dim = max(key.shape[3], value.shape[3])
        window = options.get("sliding_window") if mask is None else _window_of(mask)
        has_sinks = options.get(SINKS) is not None
        self.calls.append(Heads(heads, kv_heads, head_dim, window, options.get("softcap"), has_sinks))


def probing_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Records a call in the probe that the module was given."""
    getattr(module, GIVEN).record(module, query, key, value, attention_mask, options)
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def window_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Tensor], config: PretrainedConfig, **_: Any
) -> Tensor:
    """A mask that holds the attention window in every element, 0 for none."""
    last = getattr(config, "max_position_embeddings", None) or 4096
    windows = {_visible(mask_function, last - back, last) for back in (0, 1)}
    if len(windows) != 1:
        raise refuse("attends to other tokens than those before, or than the last ones of them")
    return torch.full((1, 1, q_length, kv_length), windows.pop())


def _visible(mask_function: Callable[..., Tensor], query: int, last: int) -> int:
    """Number of tokens up to `query` that it sees, 0 for all."""
    keys = torch.arange(last + 2)
    zero = torch.tensor(0)
    seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(len(keys)).nonzero().flatten()
    if not len(seen) or seen[-1] != query or seen[0] != query + 1 - len(seen):
        raise refuse("attends to other tokens than the last ones of those before")
    return 0 if len(seen) == query + 1 else len(seen)


def _window_of(mask: Any) -> int | None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.int64:
        raise refuse("adds a mask of its own to scores")
    return int(mask.flatten()[0]) or None


AttentionInterface.register(PROBE, probing_attention)
AttentionMaskInterface.register(PROBE, window_mask)


def describe_code(checkpoint: PackedCheckpoint, trust_remote_code: bool = False) -> CodeSpec:
    """Describes a checkpoint whose family is not registered. Reads no weights.

    Args:
        trust_remote_code: whether Python files of the folder may run.

    Raises:
        CheckpointError: transformers does not know it, or attention over pages cannot serve its modeling code.
    """
    config = read_code_config(checkpoint, trust_remote_code)
    with named(config.model_type):
        return _describe(checkpoint, config, trust_remote_code)


def _describe(checkpoint: PackedCheckpoint, config: PretrainedConfig, trust_remote_code: bool) -> CodeSpec:
    _check_config(config)
    model = build_on_meta(checkpoint.path, config, trust_remote_code)
    _check_class(model)
    names, calls = _names(model), _probe(model)
    if checkpoint.schemes:
        separate_experts(model)
    linears = [_linear(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    inside = tuple(linear for linear in linears if linear.name != names.head)
    embedding, head = (cast("Tensor", model.get_submodule(name).weight) for name in (names.embedding, names.head))
    tied = bool(getattr(config, "tie_word_embeddings", False))
    counted = embedding.numel() + (0 if tied else head.numel()) + sum(math.prod(linear.shape) for linear in inside)
    return code_spec(
        embedding.shape[1],
        len(head),
        calls,
        inside,
        names,
        tied=tied,
        context_length=getattr(config, "max_position_embeddings", None),
        other_elements=max(0, sum(parameter.numel() for parameter in model.parameters()) - counted),
    )


def read_code_config(checkpoint: PackedCheckpoint, trust_remote_code: bool) -> PretrainedConfig:
    """Reads config.json as transformers does, without how weights are stored. Raises CheckpointError."""
    check_decoder(checkpoint.path, checkpoint.config, trust_remote_code)
    config = load_config(checkpoint.path, checkpoint.config, trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _check_config(config: PretrainedConfig) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - KEYS_AND_VALUES
    if kinds:
        raise refuse(f"has layers of {', '.join(sorted(kinds))}, whose state is not keys and values")
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if each.get("rope_type") == "longrope":
            raise refuse("rotates all tokens of a step by the length of the longest sequence (longrope)")


def _check_class(model: PreTrainedModel) -> None:
    if model._is_stateful:
        raise refuse("keeps a recurrent state, which is not keys and values")
    if not model._can_set_attn_implementation():
        raise refuse("does not use transformers' attention interface")


def give(model: PreTrainedModel, attention: str, answers: object) -> None:
    """Lets a model call a registered attention function, which finds `answers` in the module that calls it."""
    model.set_attn_implementation(attention)
    for module in model.modules():
        setattr(module, GIVEN, answers)


def _names(model: PreTrainedModel) -> TensorNames:
    ends: Any = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if not all(each in names and hasattr(each, "weight") for each in ends):
        raise refuse("has no embedding or no output head that is one matrix")
    return TensorNames(blocks="", embedding=names[ends[0]], final_norm="", head=names[ends[1]])


def _linear(name: str, module: nn.Linear) -> Linear:
    return Linear(name, module.out_features, module.in_features, module.bias is not None)


def _probe(model: PreTrainedModel) -> list[Heads]:
    """Runs a model without weights. Raises CheckpointError for what it asks for, or for how it fails."""
    tokens, probe = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta"), Probe()
    give(model, PROBE, probe)
    # Experts one after the other would have to know which ones were chosen.
    model.set_experts_implementation("batched_mm")
    options = {"attention_mask": torch.ones_like(tokens), "position_ids": tokens, "use_cache": False}
    try:
        model.eval()._apply(lambda tensor: tensor.to("meta")).base_model(input_ids=tokens, **options)
    except CheckpointError:
        raise
    except Exception as error:  # Modeling code raises anything.
        raise refuse(f"cannot be followed: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if not probe.calls:
        raise refuse("does not use transformers' attention interface")
    caps = {call.softcap for call in probe.calls}
    if len(caps) > 1 or (caps != {None} and any(call.has_sinks for call in probe.calls)):
        raise refuse("caps scores in some layers only, or has sinks with caps")
    return probe.calls
