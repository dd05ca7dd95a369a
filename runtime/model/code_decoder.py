"""Decoders without a family here, computed by transformers' own modeling code over the attention of each step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import ModelOutput

from compress.checkpoint.config import quantization_block, read_config
from compress.checkpoint.meta_model import build_on_meta, no_loading_bar
from compress.checkpoint.modeling.fused import separate_experts
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Weight
from runtime.backends.base import Attention, Linear, Rotary, RunLayers, Target
from runtime.backends.model import Model
from runtime.backends.scores import Scores
from runtime.backends.span_attention import attend_span
from runtime.backends.state_memory import StepStates
from runtime.backends.torch.linear import DenseLinear
from runtime.backends.torch.ops import TorchOps
from runtime.core.model_config import DecoderConfig
from runtime.model.code_probe import GIVEN, give, named, read_code_config, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("runtime.model.code_decoder")

PAGED = "compress_paged"
"""Name of the attention function over pages."""


@dataclass(slots=True)
class StepCalls:
    """Answers to the calls of attention of one model, in their order.

    Attributes:
        attention: of the step under way.
        num_calls: that it has answered.
        sinks: sink logits `[heads]` by call, as the last step gave them.
    """

    config: DecoderConfig
    attention: Attention | None = None
    num_calls: int = 0
    sinks: dict[int, Tensor] = field(default_factory=dict)

    def answer(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention output `[T, heads, D]` of heads `[T, heads, D]`; those of values may have another size."""
        if self.attention is None:
            raise RuntimeError("no step is under way")
        mixer, sizes = self.config.spec.attentions[self.num_calls], (query.shape[-1], value.shape[-1])
        factor = (sizes[0] ** -0.5 if scale is None else scale) * mixer.head_dim**0.5
        if abs(factor - 1) > 1e-12:
            query = query * factor
        if sinks is not None:
            self.sinks[self.num_calls] = sinks
        heads = (_widened(part, mixer.head_dim) for part in (query, key, value))
        attended = self.attention(self.num_calls, *heads)
        self.num_calls += 1
        return attended[..., : sizes[1]]


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    """Fills heads with zeros up to the size that pages have."""
    missing = head_dim - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads.contiguous()


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one step as transformers calls it: heads `[1, heads, T, D]` to `[1, T, heads, D]`."""
    rows = (part[0].transpose(0, 1) for part in (query, key, value))
    attended: Tensor = getattr(module, GIVEN).answer(*rows, scaling, s_aux)
    return attended.unsqueeze(0), None


AttentionInterface.register(PAGED, paged_attention)


@dataclass
class _Given(ModelOutput):
    """Outputs of a decoder that a language model reads."""

    last_hidden_state: Tensor | None = None
    cache: None = None
    past_key_values: None = None  # the name before transformers 5.24
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class _PassOn(nn.Module):
    """Stands in the place of the decoder of a language model, whose hidden states are there already."""

    @property
    def decoder(self) -> nn.Module:
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Given:
        return _Given(inputs_embeds)


class PreparedLinear(nn.Module):
    """A linear of this runtime in the place of one of a model."""

    def __init__(self, linear: Linear, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear, self.in_features, self.out_features = linear, in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


@dataclass(slots=True)
class CodeDecoder(Model):
    """A decoder that modeling code of transformers computes.

    Attributes:
        body: from token ids to the last hidden states.
        language_model: from those, given as `inputs_embeds`, to logits.
        calls: what answers the attention of `body`.
    """

    body: nn.Module
    language_model: nn.Module
    calls: StepCalls

    @property
    def scores(self) -> Scores:
        mixers, sinks = self.config.spec.attentions, self.calls.sinks
        logits = tuple(map(sinks.get, range(len(mixers)))) if any(mixer.sink_logits for mixer in mixers) else ()
        return Scores(self.config.mixer.softcap, self.config.chunks, logits)

    @property
    def rotary(self) -> Rotary:
        raise ValueError("the modeling code rotates queries and keys itself")

    @property
    def nbytes(self) -> int:
        modules = [module for part in (self.body, self.language_model) for module in part.modules()]
        tensors = {tensor for module in modules for tensor in (*module.parameters(False), *module.buffers(False))}
        prepared = {module for module in modules if isinstance(module, PreparedLinear)}
        return sum(tensor.nbytes for tensor in tensors) + sum(module.linear.nbytes for module in prepared)

    def for_length(self, length: int) -> CodeDecoder:
        """Returns the model itself: its modeling code knows its rotary embedding."""
        return self

    def for_streams(self) -> CodeDecoder:
        """As `for_length`; such models have no streams."""
        return self

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        run_layers: RunLayers | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Computes hidden states `[T, H]` after the final norm; see `Model.forward`."""
        self.calls.attention, self.calls.num_calls = attention, 0
        try:
            output = self.body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self.calls.attention = None
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Returns `hidden`, which the final norm was applied to."""
        return hidden

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Applies what follows the decoder, `[T, H] -> [T, V]`."""
        logits: Tensor = self.language_model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


@dataclass(frozen=True, slots=True)
class CodeSource:
    """A checkpoint whose family is not registered, see `runtime.model.code_probe.describe_code`.

    Attributes:
        prepare: makes a linear of this runtime from its absolute name, its dense weight unless it is packed, and bias.
    """

    checkpoint: PackedCheckpoint
    config: DecoderConfig
    target: Target
    prepare: Callable[[str, Tensor | None, Tensor | None], Linear]
    trust_remote_code: bool = False

    def load(self) -> CodeDecoder:
        """Loads it.

        Raises:
            CheckpointError: weights that its modeling code does not read as they are stored, or a state besides keys
                and values.
        """
        with named(self.config.model_type):
            return self._load()

    def _load(self) -> CodeDecoder:
        is_dense = not quantization_block(read_config(self.checkpoint.path))
        model = (self._whole() if is_dense else self._by_name()).eval()
        self._prepare_linears(model)
        calls = StepCalls(self.config)
        give(model.to(self.target.device), PAGED, calls)
        body = model.base_model
        # From here on the model begins with hidden states.
        setattr(model, model.base_model_prefix, _PassOn())
        logger.warning("%s is served by its own modeling code, which is slower", self.config.model_type)
        decoder = CodeDecoder(self.config, self.target.dtype, self.target.device, TorchOps(), (), body, model, calls)
        check_tokens(decoder)
        return decoder

    def _whole(self) -> PreTrainedModel:
        """Lets transformers load its own files, and refuses what it would fill with random numbers."""
        options: dict[str, Any] = {
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": True,
            "output_loading_info": True,
        }
        # Grouped products of experts are for 16 bits on a GPU.
        options |= {} if self.target.device.type == "cuda" else {"experts_implementation": "eager"}
        path, load = self.checkpoint.path, cast("Any", AutoModelForCausalLM.from_pretrained)
        try:
            with no_loading_bar():
                loaded: tuple[PreTrainedModel, dict[str, Any]] = load(path, dtype=self.target.dtype, **options)
        except Exception as error:  # transformers raises unrelated types.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise refuse(f"does not load {path}: {reason}") from error
        model, found = loaded
        if lacking := [*found["missing_keys"], *found["mismatched_keys"]]:
            raise refuse(f"finds {len(lacking)} weights not as it needs them, {lacking[0]} first", RELOAD)
        return model

    def _by_name(self) -> PreTrainedModel:
        """Loads everything but packed linears by name; other packed matrices are dequantized."""
        checkpoint, dtype = self.checkpoint, self.target.dtype
        config = read_code_config(checkpoint, self.trust_remote_code)
        model = build_on_meta(checkpoint.path, config, self.trust_remote_code, dtype)
        if self.target.device.type != "cuda":
            model.set_experts_implementation("eager")
        separate_experts(model)
        packed = {name for name, module in _linears(model) if name in checkpoint.schemes}
        names = {name for name in model.state_dict() if name.removesuffix(".weight") not in packed}
        state = {name: tensor for name in names if (tensor := self._tensor(name)) is not None}
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        lost = [module for module in checkpoint.modules if module not in packed and f"{module}.weight" not in state]
        absent = [name for name, tensor in model.named_parameters() if tensor.is_meta and name in names]
        if lost or absent:
            raise refuse(f"does not read weights as they are stored here, {(lost or absent)[0]} first", RELOAD)
        return model

    def _tensor(self, name: str) -> Tensor | None:
        """A stored tensor in the dtype of activations; None where there is none."""
        checkpoint, module = self.checkpoint, name.removesuffix(".weight")
        if module in checkpoint.schemes:
            weight = checkpoint.weight(module)
            return (weight.dequantize(self.target.dtype) if isinstance(weight, Weight) else weight).to(
                self.target.dtype
            )
        if name not in checkpoint.files:
            return None
        tensor = checkpoint.tensor(name)
        return tensor.to(self.target.dtype) if tensor.is_floating_point() else tensor

    def _prepare_linears(self, model: PreTrainedModel) -> None:
        """Puts linears of this runtime in the place of those of a model."""
        for name, module in _linears(model):
            weight = None if name in self.checkpoint.schemes else module.weight.data
            bias = None if module.bias is None else module.bias.data.to(self.target.device)
            linear = self.prepare(name, weight, bias)
            if not isinstance(linear, DenseLinear):
                model.set_submodule(name, PreparedLinear(linear, module.in_features, module.out_features))
            elif weight is None:
                module.weight = nn.Parameter(linear.weight, requires_grad=False)


RELOAD = "Check that config.json and the weights belong together, or serve it with transformers"


def _linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]


@dataclass(frozen=True, slots=True)
class _RowsOfSequences:
    """Attention inside of sequences, of each of which the rows are known in order."""

    sequences: tuple[Tensor, ...]
    softcap: float | None
    sinks: Mapping[int, Tensor]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = torch.empty_like(query)
        for rows in self.sequences:
            parts = query[rows], key[rows], value[rows]
            attended[rows] = attend_span(*parts, None, self.softcap, self.sinks.get(layer))
        return attended


ORDER = (4, 2, 0, 5, 3, 1)
"""Places of the tokens of two sequences of three, the second time."""


@torch.inference_mode()
def check_tokens(decoder: CodeDecoder) -> None:
    """Checks that a token depends on others in attention only, and that its place is its position, whatever its row.

    Raises:
        CheckpointError: another order of the tokens of a step gives other numbers, or the modeling code fails.
    """
    device = decoder.device
    tokens, order = torch.arange(1, 7, device=device), torch.tensor(ORDER, device=device)
    positions, places = torch.arange(3, device=device).repeat(2), order.argsort()
    softcap = decoder.config.mixer.softcap

    def run(order: Tensor, places: Tensor) -> Tensor:
        attention = _RowsOfSequences((places[:3], places[3:]), softcap, decoder.calls.sinks)
        return decoder.logits(decoder.forward(tokens[order], positions[order], attention))

    try:
        first, second = run(torch.arange(6, device=device), torch.arange(6, device=device)), run(order, places)
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError) as error:
        raise refuse(f"fails here: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    # Modeling code computes norms and attention in float32, whatever the dtype.
    precision = max(torch.finfo(dtype).eps for dtype in (decoder.dtype, torch.float32))
    limit = precision**0.5 * first.abs().max()
    if not bool(((second[places] - first).abs() <= limit).all()):
        raise refuse("mixes tokens outside of attention, or counts positions by rows")
