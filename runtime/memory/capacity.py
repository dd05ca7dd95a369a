"""What fits where: weights, activations and the rest of the process first, keys and values in what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from compress.checkpoint.kv_cache import UNCOMPRESSED, KVCacheScheme
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import Scheme
from runtime.backends.base import Target
from runtime.backends.linear_sizes import dense_bytes, embedding_bytes, prepared_bytes, reads_rows
from runtime.backends.registry import choose_kernel
from runtime.backends.torch.linear import choose_dense
from runtime.core.attention_window import AttentionWindow, resolve_attention_window
from runtime.core.config import RuntimeConfig
from runtime.core.model_config import DecoderConfig
from runtime.memory.estimates import step_bytes
from runtime.memory.kv import NO_EXACT_TOKENS, ExactTokens, choose_kv_cache, exact_tokens, kv_token_bytes
from runtime.memory.plan import longest_wanted
from runtime.model.loader import EMBEDDING, HEAD, exclude_kernels, expected_linears, head_is_embedding

PROCESS_BYTES = 350 * 2**20
"""Python, torch and the server without any model (measured on Linux with a CPU build)."""
TYPICAL_LENGTHS = (512, 2048, 8192, 32768, 131072)
ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory of one served model.

    Attributes:
        memory_bytes: that serving may use in all.
        weight_bytes: prepared.
        activation_bytes: of the largest step, attention over long contexts left out.
        token_bytes: keys and values of one token in all layers, in the form in which they are kept.
        dtype: of activations, and of keys and values while they are used.
        context: longest prompt + output.
        num_layers: attention reads a copy of one layer's keys and values in `dtype`.
        step: tokens of one prompt that are computed together at most.
        kv_cache: form of keys and values.
        exact: keys and values that are kept in `dtype` beside the blocks.
    """

    memory_bytes: int
    weight_bytes: int
    activation_bytes: int
    token_bytes: int
    dtype: str
    context: int
    num_layers: int
    attention_window: AttentionWindow
    block_size: int
    step: int
    process_bytes: int = PROCESS_BYTES
    kv_cache: KVCacheScheme = UNCOMPRESSED
    exact: ExactTokens = NO_EXACT_TOKENS

    @property
    def room(self) -> int:
        """Bytes for keys, values and the copy that attention reads; below zero when the rest does not fit."""
        return self.memory_bytes - self.weight_bytes - self.activation_bytes - self.process_bytes

    @property
    def num_blocks(self) -> int:
        copied = self.exact.token_bytes or self.token_bytes
        shares = (self.token_bytes * self.num_layers + copied) * self.block_size
        return max(0, (self.room - self.exact.nbytes) * self.num_layers // shares)

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """What to give to `--kv-memory` to use the room."""
        return self.tokens * self.token_bytes + self.exact.nbytes

    def concurrency(self, length: int) -> int:
        """Requests of so many tokens (prompt plus output) that fit together."""
        return self.num_blocks // self.attention_window.blocks_for(length, self.step, self.block_size)

    def lengths(self) -> list[int]:
        """Typical lengths below the context, then the context."""
        return [length for length in TYPICAL_LENGTHS if length < self.context] + [self.context]

    def in_dtype(self, model: DecoderConfig, dtype: str, weight_bytes: int) -> Capacity:
        """The same in another dtype."""
        return replace(
            self,
            token_bytes=kv_token_bytes(model, self.kv_cache, ITEM_SIZES[dtype]),
            exact=exact_tokens(model, self.kv_cache, ITEM_SIZES[dtype], self.exact.num_sequences),
            dtype=dtype,
            weight_bytes=weight_bytes,
            activation_bytes=int(self.activation_bytes * ITEM_SIZES[dtype] / ITEM_SIZES[self.dtype]),
        )

    def with_kv_format(self, model: DecoderConfig, format: str) -> Capacity:
        """The same with keys and values in another format, and no exact tokens beside them unless it is the same."""
        scheme = self.kv_cache if format == self.kv_cache.format else KVCacheScheme.named(format)
        itemsize = ITEM_SIZES[self.dtype]
        return replace(
            self,
            token_bytes=kv_token_bytes(model, scheme, itemsize),
            kv_cache=scheme,
            exact=exact_tokens(model, scheme, itemsize, self.exact.num_sequences),
        )


def activation_bytes(model: DecoderConfig, config: RuntimeConfig, itemsize: int) -> int:
    """Estimate of what the largest step holds beside weights and the pool."""
    return step_bytes(model, config, itemsize, _seen_keys(model, config))


def find_model_window(model: DecoderConfig, config: RuntimeConfig) -> AttentionWindow:
    """What tokens look at. Raises ToolkitError for a window that the model cannot have."""
    return resolve_attention_window(
        model.windows, model.context_length, config.attention_window, config.attention_sinks
    )


def _seen_keys(model: DecoderConfig, config: RuntimeConfig) -> int:
    """Keys that a span of a prompt looks at, at most."""
    longest, _ = longest_wanted(model, config)
    attention_window, step = find_model_window(model, config), config.max_span_tokens
    return min(longest, attention_window.blocks_for(longest, step, config.block_size) * config.block_size)


def estimate(model: DecoderConfig, config: RuntimeConfig, dtype: str, weight_bytes: int, memory_bytes: int) -> Capacity:
    """What fits beside weights of a known size.

    Args:
        dtype: of activations, keys and values, by name.
        memory_bytes: for everything.

    Raises:
        ToolkitError: a length or a window that the model cannot have.
    """
    itemsize, attention_window = ITEM_SIZES[dtype], find_model_window(model, config)
    scheme = choose_kv_cache(model.kv_cache, config, attention_window).scheme
    return Capacity(
        memory_bytes,
        weight_bytes,
        activation_bytes(model, config, itemsize),
        kv_token_bytes(model, scheme, itemsize),
        dtype,
        longest_wanted(model, config)[0],
        model.num_layers,
        attention_window,
        config.block_size,
        config.max_span_tokens,
        kv_cache=scheme,
        exact=exact_tokens(model, scheme, itemsize, config.max_num_seqs),
    )


FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class Weights:
    """The linears of a checkpoint and where they will be multiplied.

    Attributes:
        kernels: `auto`, or the name of one kernel.
        free: memory before loading, which bounds what is dequantized at load.
    """

    checkpoint: PackedCheckpoint
    config: DecoderConfig
    target: Target
    kernels: str
    free: int

    @property
    def stored_bytes(self) -> int:
        """In the files."""
        return self.checkpoint.files.nbytes

    @property
    def schemes(self) -> dict[str, Scheme | None]:
        """How each linear of the layers is stored; None is dense."""
        return {module: self.checkpoint.scheme(module) for module in self._shapes() if module != HEAD}

    def prepared(self, schemes: Mapping[str, Scheme | None] | None = None) -> int:
        """Bytes after loading.

        Args:
            schemes: other schemes than the stored ones, by module, to know what they would take.
        """
        excluded = exclude_kernels(self.checkpoint, self.target, self.kernels, self.free)
        chosen = {module: self.checkpoint.scheme(module) for module in self._shapes()} | dict(schemes or {})
        return self._outside(excluded) + sum(
            self._fused(scheme, rows, columns, excluded) for scheme, rows, columns in self._products(chosen)
        )

    def _shapes(self) -> dict[str, tuple[int, int]]:
        return {module: shape for module, shape, _ in expected_linears(self.config, self.checkpoint)}

    def _products(self, schemes: Mapping[str, Scheme | None]) -> list[tuple[Scheme | None, int, int]]:
        """Scheme, rows and columns of each product: neighbours over the same input, of one scheme, are one."""
        linears = [(_place(module), schemes[module], shape) for module, shape in self._shapes().items()]
        products: list[tuple[Scheme | None, int, int]] = []
        for (_, scheme), group in groupby(linears, key=lambda linear: linear[:2]):
            shapes = [shape for _, _, shape in group]
            if scheme is not None and scheme.rank is not None:
                # Factors are not fused: each layer has a right one of its own.
                products += [matrix for shape in shapes for matrix in scheme.matrices(*shape)]
            elif scheme is not None:
                products += scheme.matrices(sum(rows for rows, _ in shapes), shapes[0][1])
            else:
                products.append((scheme, sum(rows for rows, _ in shapes), shapes[0][1]))
        return products

    def _fused(self, scheme: Scheme | None, rows: int, columns: int, excluded: Mapping[str, str]) -> int:
        if scheme is None:
            return dense_bytes(rows, columns, self.target, reference=self.kernels == "reference")
        kernel = choose_kernel(scheme, columns, self.target, self.kernels, excluded).kernel.name
        return prepared_bytes(kernel, scheme, rows, columns, self.target)

    def _outside(self, excluded: Mapping[str, str]) -> int:
        """The embedding, and the head where that is the embedding: one matrix, or two where products need another
        layout than looking up."""
        scheme, rows, columns = self.checkpoint.scheme(EMBEDDING), self.config.vocab_size, self.config.hidden_size
        embedding = embedding_bytes(scheme, rows, columns, self.target)
        if not head_is_embedding(self.checkpoint):
            return embedding
        head = self._fused(scheme, rows, columns, excluded)
        if scheme is None:
            shared = choose_dense(columns, self.target, reference=self.kernels == "reference").kernel.reads_rows
        else:
            kernel = choose_kernel(scheme, columns, self.target, self.kernels, excluded).kernel.name
            shared = reads_rows(kernel, columns, self.target)
        return head if shared else embedding + head


def _place(module: str) -> str:
    """The same for linears that are multiplied as one."""
    parent, _, name = module.rpartition(".")
    return f"{parent}.{FUSED.get(name, name)}"
