"""Memory of the prepared weights of a checkpoint, as `Decoder.nbytes` will say once it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.scheme import Scheme
from runtime.kernels.base import Target
from runtime.kernels.dense import choose_dense
from runtime.kernels.registry import choose_kernel
from runtime.kernels.sizes import dense_bytes, embedding_bytes, prepared_bytes, reads_rows
from runtime.model.config import DecoderConfig
from runtime.model.load import exclude_kernels
from runtime.model.tensors import EMBEDDING, HEAD, expected_linears, head_is_embedding

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
