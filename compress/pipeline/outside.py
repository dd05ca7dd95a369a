"""The two matrices outside of the blocks that a recipe may change. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from compress.checkpoint.config import is_embedding
from compress.checkpoint.errors import RecipeError
from compress.checkpoint.source import TensorFiles
from compress.pipeline.skeleton import Skeleton
from compress.stages.quantize import QuantizeStage
from compress.stages.table import STAGE_NAMES, Stage

EMBEDDING_METHODS = ("rtn",)
HEAD_METHODS = ("rtn", "gptq")


@dataclass(frozen=True, slots=True)
class End:
    """The token embedding or the output head. Only a stage that names it changes it.

    Attributes:
        shape: `[V, H]`; None when it has no matrix of its own.
        methods: of quantization that are of use here.
    """

    what: str
    shape: tuple[int, int] | None
    methods: tuple[str, ...]

    def check(self, name: str, stage: Stage) -> None:
        """Raises RecipeError when a stage that targets this matrix cannot change it."""
        if self.shape is None:
            raise RecipeError(f"targets include {name}, which {self.what}", "Target the embedding: it serves both")
        if not isinstance(stage, QuantizeStage):
            problem = f"{STAGE_NAMES[type(stage)]} cannot change {name}, the {self.what}"
            raise RecipeError(problem, "Target linear layers inside the blocks, or quantize it")
        if stage.method not in self.methods:
            raise RecipeError(
                f"{stage.method} cannot change {name}, the {self.what}",
                f"Give it a quantize stage of its own, with method {' or '.join(self.methods)}",
            )
        if stage.outlier_columns is not None:
            raise RecipeError(f"{name}, the {self.what}, has no outlier columns", "Leave outlier_columns out of it")
        if stage.scheme.fp8:
            raise RecipeError(f"{name}, the {self.what}, takes no 8-bit floats", "Give it a stage of 8-bit integers")
        if stage.scheme.activation_bits:
            raise RecipeError(f"{name}, the {self.what}, takes no 8-bit activations", "Leave activation_bits out of it")


def find_ends(skeleton: Skeleton, files: TensorFiles) -> dict[str, End]:
    """Both ends of a model by name; what has no name that readers know for an embedding cannot be changed."""
    architecture = skeleton.architecture
    ends: dict[str, End] = {}
    for name, what, methods in (
        (architecture.embedding, "token embedding", EMBEDDING_METHODS),
        (architecture.head, "output head", HEAD_METHODS),
    ):
        if not name:
            continue
        if name == architecture.head and skeleton.ties_head:
            ends[name] = End("is the embedding (tied)", None, ())
        elif is_embedding(name) != (name == architecture.embedding):
            ends[name] = End(f"has a name that no reader would know for the {what}", None, ())
        else:
            rows, columns = files.shape(f"{name}.weight")
            ends[name] = End(what, (rows, columns), methods)
    return ends
