"""Bytes of weights, steps, keys and values: from the headers of a checkpoint, and from the sizes of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import MAX_BITS
from compress.checkpoint.weights import Scheme
from compress.checkpoint.weights.layouts import Blocks
from compress.checkpoint.weights.packing import num_words
from compress.models.architecture import siblings
from compress.models.generic import CodeSpec
from runtime.backends.base import Target
from runtime.backends.indexer import SCORE_NUMBERS
from runtime.backends.registry import choose_dense, choose_latent_heads, choose_linear
from runtime.core.config import RuntimeConfig
from runtime.core.memory_plan import (
    MAX_COPIED_KEYS,
    MOST_PROMPT_ROWS,
    PANEL_ELEMENTS,
    SPARE_RESIDUAL_TOKENS,
    ExactTokens,
    KVBudget,
    captured_rows,
)
from runtime.core.model_config import DecoderConfig
from runtime.model.expected_tensors import expected_linears, head_is_embedding
from runtime.model.loader import exclude_kernels
from runtime.speculative.ngram import MAX_TREE_TOKENS, TREES

FLOAT32 = 4
SCALE_BYTES, ZERO_BYTES = 2, 1
LOGITS_COPIES = 4
"""Copies of the float32 logits of a step while sampling: themselves, tempered, sorted, noisy."""
GPU_LOGIT_BYTES = 64
"""Bytes of one logit on a GPU, where its noise is computed and at worst the whole vocabulary is sorted."""
CAPTURED_LOGIT_BYTES = 24
"""Bytes of one logit of a captured step: itself, tempered, truncated, and its exponential, twice. As many are enough
to adjust it: where it stands in the history, how often, two products and the bits of a mask."""
ADJUSTED_LOGIT_BYTES, HISTORY_BYTES = 4, 8
"""Bytes that stay allocated for captured steps: of a logit that requests change, and of each sequence and token id the
count and the bias."""
SPLIT_TOKENS, MOST_SPLITS = 64, 8
"""Linears over at most SPLIT_TOKENS tokens reduce at most MOST_SPLITS float32 partial sums."""
MARK_BYTES = 7
"""Bytes that say whether a token is chosen: three comparisons, and how many of equal scores come before."""
LIBRARY_BYTES = 256 * 2**20
"""Bytes that libraries take of a GPU: loaded kernels, workspaces of matrix products."""


def step_bytes(model: DecoderConfig, config: RuntimeConfig, itemsize: int, seen_keys: int = 0) -> int:
    """Bytes that the largest step holds.

    The widest of three moments, on top of the hidden states and their norm: queries, keys and values with their rotated
    copy; the feed-forward layer; logits of every sequence. Attention's scores are not kept, its mask is.

    Args:
        itemsize: bytes of one activation.
        seen_keys: that a span of a prompt looks at through a mask.
    """
    logits = config.max_num_seqs * model.spec.vocab_size * max(itemsize, FLOAT32) * LOGITS_COPIES
    mask = config.max_span_tokens * seen_keys * itemsize + index_bytes(model, config.max_span_tokens, seen_keys)
    return _rows_bytes(model, config.step_tokens, itemsize, mask, logits)


def index_bytes(model: DecoderConfig, rows: int, keys: int) -> int:
    """Bytes that the widest indexer holds while it ranks `keys` for each of `rows`: scores of single heads, a part at a
    time, their sums, and marks of the chosen ones."""
    indexers = (mixer.latent.indexer for mixer in model.spec.attentions if mixer.latent is not None)
    heads = max((each.num_heads for each in indexers if each is not None and keys > each.num_chosen), default=0)
    if not heads:
        return 0
    scores = min(rows, max(1, SCORE_NUMBERS // (keys * heads))) * keys * heads
    return scores * FLOAT32 + rows * keys * (FLOAT32 + MARK_BYTES)


def gpu_step_bytes(
    model: DecoderConfig, config: RuntimeConfig, itemsize: int, seen_keys: int, scheme: KVCacheScheme, is_packed: bool
) -> int:
    """Estimates the bytes that the largest step holds on a GPU, with what captured steps keep; on the large side.

    Args:
        seen_keys: of the longest sequence.
        is_packed: whether a step dequantizes weights.
    """
    rows, drawn = captured_rows(config.max_num_seqs, num_draft_tokens(config)), _drawn_rows(config)
    heads = max((mixer.num_heads * mixer.head_dim for mixer in model.spec.attentions), default=0)
    widest = max(2 * model.intermediate_size, _qkv_size(model), model.spec.vocab_size)
    parts = SPLIT_TOKENS * MOST_SPLITS * widest * FLOAT32
    attended = config.step_tokens * heads * FLOAT32 + index_bytes(model, config.max_span_tokens, seen_keys)
    if not scheme.is_exact:
        widest_keys = max((heads * (key + value) for heads, key, value in model.kv_shapes), default=0)
        attended += min(seen_keys, MAX_COPIED_KEYS) * widest_keys * (itemsize + FLOAT32)
    step = _rows_bytes(model, config.step_tokens, itemsize, attended, drawn * model.spec.vocab_size * itemsize)
    captured_tokens = max(rows, min(config.step_tokens, MOST_PROMPT_ROWS))
    captured = _rows_bytes(model, captured_tokens, itemsize, 0, rows * model.spec.vocab_size * CAPTURED_LOGIT_BYTES)
    kept = (rows * ADJUSTED_LOGIT_BYTES + (config.max_num_seqs + 1) * HISTORY_BYTES) * model.spec.vocab_size
    kept += min(PANEL_ELEMENTS, widest * model.spec.hidden_size) * itemsize if is_packed else 0
    return step + captured + kept + 2 * parts + drawn * model.spec.vocab_size * GPU_LOGIT_BYTES + LIBRARY_BYTES


def _drawn_rows(config: RuntimeConfig) -> int:
    """Rows of logits that one step draws from: one of each sequence and one for each draft token, all of them
    tokens of the step."""
    return min(config.max_num_seqs * (1 + num_draft_tokens(config)), config.step_tokens)


def num_draft_tokens(config: RuntimeConfig) -> int:
    """Most draft tokens of a sequence in one step."""
    if config.speculative_model == TREES:
        return MAX_TREE_TOKENS
    return config.num_speculative_tokens if config.speculative_model else 0


def _rows_bytes(model: DecoderConfig, rows: int, itemsize: int, attention: int, logits: int) -> int:
    """Bytes of a step over a number of rows, with what attention holds in addition to its heads, and with logits."""
    moments = rows * 2 * _qkv_size(model) * itemsize + attention, rows * 3 * model.intermediate_size * itemsize, logits
    return rows * 2 * model.spec.hidden_size * itemsize + max(moments)


def _qkv_size(model: DecoderConfig) -> int:
    """Numbers of the queries, keys and values of a token, in the layer with most of them; queries that look at latents
    are as wide as those."""
    attention = (
        (mixer.num_heads * (1 + mixer.output_gate) + 2 * mixer.num_kv_heads) * mixer.widest_head
        for mixer in model.spec.attentions
    )
    mixers = (mixer for block in model.spec.blocks for mixer in block.mixers)
    projected = (linear.out_features for mixer in mixers for linear in mixer.qkv)
    return max((*attention, *projected), default=0)


def exact_tokens(model: DecoderConfig, scheme: KVCacheScheme, itemsize: int, num_sequences: int) -> ExactTokens:
    """Tokens that a format of keys and values keeps exactly of each sequence; `itemsize` as in `kv_token_bytes`."""
    recent = scheme.residual_length + SPARE_RESIDUAL_TOKENS if scheme.residual_length else 0
    token_bytes = model.spec.kv_token_bytes(lambda key, value: (key + value) * itemsize)
    return ExactTokens(scheme.sinks + recent, num_sequences, token_bytes)


def kv_token_bytes(model: DecoderConfig, scheme: KVCacheScheme = UNCOMPRESSED, itemsize: int = 2) -> int:
    """Keys, values and index keys of one token in all layers, scales and offsets included, exact copies not.

    Args:
        itemsize: bytes of one element where nothing is quantized.
    """
    heads = model.spec.kv_token_bytes(lambda key, value: scheme.head_bytes(key, itemsize, value))
    return heads + sum(model.index_dims) * itemsize


def reserve_mtp_head(budget: KVBudget, model: DecoderConfig, scheme: KVCacheScheme, itemsize: int) -> KVBudget:
    """Leaves room for a head of multi-token prediction, if the family has one: its dense weights, keys and values."""
    head = model.spec.mtp
    if head is None:
        return budget
    layer = head.model(model.spec)
    weights = itemsize * sum(math.prod(linear.shape) for linear in (*layer.linears(), head.projection))
    own = kv_token_bytes(replace(model, spec=layer), scheme, itemsize)
    target = kv_token_bytes(model, scheme, itemsize)
    left = max(0, budget.nbytes - weights) * target // (target + own)
    return replace(budget, nbytes=left, reason=f"{budget.reason}, and the head of multi-token prediction")


@dataclass(frozen=True)
class Weights:
    """The linears of a checkpoint and where they will be multiplied.

    Attributes:
        kernels: `auto`, or the name of one kernel.
        free: memory before loading, which bounds what is dequantized at load.
        moe_expert_cache: experts of each mixture on the device, with all of them in host memory; None for all there.
    """

    checkpoint: PackedCheckpoint
    config: DecoderConfig
    target: Target
    kernels: str
    free: int
    moe_expert_cache: int | None = None

    @property
    def stored_bytes(self) -> int:
        """In the files."""
        return self.checkpoint.files.nbytes

    @property
    def schemes(self) -> dict[str, Scheme | None]:
        """Scheme of each linear of the layers; None is dense."""
        return {linear.name: self.checkpoint.scheme(linear.name) for linear in self.config.spec.linears()}

    def prepared(self, schemes: Mapping[str, Scheme | None] | None = None) -> int:
        """Bytes on the device after loading.

        Args:
            schemes: other schemes than the stored ones, by module, to know what they would take.
        """
        excluded = exclude_kernels(self.checkpoint, self.config, self.target, self.kernels, self.free)
        spec = self.config.spec
        shapes = {linear.name: linear.shape for linear in expected_linears(self.config, self.checkpoint)}
        chosen = {module: self.checkpoint.scheme(module) for module in shapes} | dict(schemes or {})
        heads = {module: self._heads_bytes(chosen[module], shapes[module]) for module in spec.expansions()}
        chosen |= {module: None for module, size in heads.items() if not size}
        shapes = {module: shape for module, shape in shapes.items() if not heads.get(module)}
        other = spec.other_elements * self.target.dtype.itemsize if isinstance(spec, CodeSpec) else 0
        return (
            other
            + sum(heads.values())
            + self._outside(excluded)
            + self._layer_inputs
            + self._multiplied(chosen, shapes, excluded)
            - sum(host - device for host, device in self._offloaded(chosen, excluded))
        )

    def _heads_bytes(self, scheme: Scheme | None, shape: tuple[int, int]) -> int:
        """Bytes of weights between latents and heads that stay packed; 0 where they do not."""
        if scheme is None:
            return 0
        kernel = choose_latent_heads(scheme, shape[1], self.target, self.kernels).kernel
        return 0 if kernel is None else kernel.nbytes(scheme, *shape)

    @property
    def expert_bytes(self) -> int:
        """Bytes of experts in host memory after loading."""
        excluded = exclude_kernels(self.checkpoint, self.config, self.target, self.kernels, self.free)
        return sum(host for host, _ in self._offloaded(self.schemes, excluded))

    def _offloaded(
        self, schemes: Mapping[str, Scheme | None], excluded: Mapping[str, str]
    ) -> Iterator[tuple[int, int]]:
        """Yields bytes of the experts in host memory, and of slots on the device, of each mixture with slots."""
        for index, block in enumerate(self.config.spec.blocks):
            experts = () if block.mixture is None else block.mixture.experts
            if self.moe_expert_cache is None or len(experts) <= self.moe_expert_cache:
                continue
            name, linears = self.config.spec.block_name(index), (each for expert in experts for each in expert.linears)
            size = self._multiplied(schemes, {f"{name}.{each.name}": each.shape for each in linears}, excluded)
            yield size, size * self.moe_expert_cache // len(experts)

    def _multiplied(
        self,
        schemes: Mapping[str, Scheme | None],
        shapes: Mapping[str, tuple[int, int]],
        excluded: Mapping[str, str],
    ) -> int:
        """Bytes of linears of these shapes, by module."""
        return sum(self._fused(*product, excluded) for product in self._products(schemes, shapes))

    @property
    def _layer_inputs(self) -> int:
        """Rows that are looked up for each layer."""
        inputs = self.config.spec.layer_inputs
        if inputs is None or not self.config.has_embedding:
            return 0
        return embedding_bytes(self.checkpoint.scheme(inputs.embedding), *inputs.shape, self.target)

    @cached_property
    def _leaders(self) -> dict[str, str]:
        """The first of the linears that are multiplied as one, by the name of each inside its block."""
        groups = (group for block in self.config.spec.blocks for group in siblings(block))
        return {name: group[0] for group in groups for name in group}

    def _products(
        self, schemes: Mapping[str, Scheme | None], shapes: Mapping[str, tuple[int, int]]
    ) -> list[tuple[Scheme | None, int, int]]:
        """Scheme, rows and columns of each product: neighbours over the same input, of one scheme, are one."""
        leaders = self._leaders
        linears = [(_place(module, leaders), schemes[module], shape) for module, shape in shapes.items()]
        products: list[tuple[Scheme | None, int, int]] = []
        for (_, scheme), group in groupby(linears, key=lambda linear: linear[:2]):
            parts = [shape for _, _, shape in group]
            if scheme is not None and not scheme.fuses:
                # Factors are not fused: each layer has a right one of its own.
                products += [matrix for shape in parts for matrix in scheme.matrices(*shape)]
            elif scheme is not None:
                products += scheme.matrices(sum(rows for rows, _ in parts), parts[0][1])
            else:
                products.append((scheme, sum(rows for rows, _ in parts), parts[0][1]))
        return products

    def _fused(self, scheme: Scheme | None, rows: int, columns: int, excluded: Mapping[str, str]) -> int:
        if scheme is None:
            return choose_dense(rows, columns, self.target, self.kernels).kernel.nbytes(rows, columns, self.target)
        kernel = choose_linear(scheme, columns, self.target, self.kernels, excluded).kernel
        return kernel.nbytes(scheme, rows, columns, self.target)

    def _outside(self, excluded: Mapping[str, str]) -> int:
        """The embedding, and the head where that is the embedding: one matrix, or two where products need another
        layout than looking up."""
        embedding_name = self.config.spec.names.embedding
        scheme, (rows, columns) = self.checkpoint.scheme(embedding_name), self.config.spec.embeddings[embedding_name]
        embedding = embedding_bytes(scheme, rows, columns, self.target) if self.config.has_embedding else 0
        if not self.config.has_head or not head_is_embedding(self.checkpoint, self.config):
            return embedding
        head = self._fused(scheme, rows, columns, excluded)
        if scheme is None:
            shared = choose_dense(rows, columns, self.target, self.kernels).kernel.reads_rows
        else:
            kernel = choose_linear(scheme, columns, self.target, self.kernels, excluded).kernel
            shared = kernel.reads_rows(columns, self.target)
        return head if shared and self.config.has_embedding else embedding + head


def _place(module: str, leaders: Mapping[str, str]) -> str:
    """Gives one name to linears that are multiplied as one: that of the first."""
    found = (module.removesuffix(name) + leader for name, leader in leaders.items() if module.endswith(f".{name}"))
    return next(found, module)


def embedding_bytes(scheme: Scheme | None, rows: int, columns: int, target: Target) -> int:
    """Bytes of an embedding `[rows, columns]` that is only looked up; dense without a scheme."""
    if scheme is None:
        return rows * columns * target.dtype.itemsize
    if isinstance(scheme, Blocks):
        return scheme.stored_bits(rows, columns) // 8
    words = columns if scheme.bits == MAX_BITS else 4 * num_words(columns, int(scheme.bits))
    return rows * (words + scheme.num_groups(columns) * (SCALE_BYTES + (0 if scheme.symmetric else ZERO_BYTES)))
