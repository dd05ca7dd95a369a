"""Dense source with rotated residual stream, computed tensor by tensor on reading.

RMSNorm without its weight commutes with an orthogonal Q, so each norm's weight g is first folded into the linears after
it: readers `W -> W diag(g) Q`, writers `W -> Q^T W`, the embedding `E -> E Q`, the head `W -> W diag(g) Q`. Value heads
are rotated by another matrix R: `v_proj -> R^T W` and `o_proj -> W R`, head by head. (QuaRot, section 3; R1 and R2 of
SpinQuant. No online rotation at serving time.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.safetensors import TensorFiles
from compress.common.errors import RecipeError
from compress.methods.shared.hadamard import Rotation
from compress.models.architecture import ResidualStream
from compress.pipeline.skeleton import Skeleton, open_skeleton
from compress.plan import Plan, PlanRow
from compress.stages.rotate import RotateStage

Read = Callable[[], Tensor]

# A matrix in float64, the rotated one, and a transposed copy.
_COPIES = 3


@dataclass(frozen=True, slots=True)
class RotatedSource:
    """Dense model with a rotated residual stream.

    Attributes:
        files: tensors by the names of the source, computed on each read where they are rotated.
        added: tensors missing in the source (a head that was tied to the embedding), and those whose form they have.
    """

    files: TensorFiles
    config: dict[str, Any]
    skeleton: Skeleton
    rotated: frozenset[str]
    added: Mapping[str, str]
    description: str

    @classmethod
    def of(
        cls,
        files: TensorFiles,
        config: dict[str, Any],
        skeleton: Skeleton,
        stage: RotateStage,
        seed: int,
        trust_remote_code: bool = False,
    ) -> RotatedSource:
        """Rotates the residual stream of a source. Raises RecipeError: the norms and linears around the residual stream
        of the family are unknown, or the source has tensors that the model does not run, such as those of multi-token
        prediction; CheckpointError: the final norm's weight is missing."""
        turned, added, description = _Builder(files, skeleton, _stream(files, skeleton), stage, seed).build()
        forms = {name: added.get(name, name) for name in turned}
        read = {
            name: replace(files[form], read=turned[name], place=None) for name, form in forms.items() if form in files
        }
        # Codes of the source are those of a model without the rotation.
        tensors = {name: replace(tensor, scheme=None) for name, tensor in {**files.tensors, **read}.items()}
        if skeleton.ties_head and f"{skeleton.architecture.head}.weight" in read:
            config = config | {"tie_word_embeddings": False}
            skeleton = open_skeleton(files.path, config, trust_remote_code)
        return cls(replace(files, tensors=tensors), config, skeleton, frozenset(read), added, description)

    def working_bytes(self) -> int:
        """Returns the memory of the rotation: float64 copies of one matrix inside the blocks, and all tensors outside
        them, which are rotated in small parts but kept until they are written."""
        inside = {name for name in self.rotated if name.startswith(f"{self.skeleton.architecture.blocks}.")}
        largest = max((math.prod(self.files.shape(name)) for name in inside), default=0)
        outside = sum(self.files.tensor_nbytes(name) for name in self.rotated - inside)
        return _COPIES * torch.float64.itemsize * largest + outside

    def marked(self, plan: Plan) -> Plan:
        """Returns the plan with notes on rotated and added tensors."""
        return replace(plan, rows=tuple(map(self._marked, plan.rows)), notes=(self.description, *plan.notes))

    def _marked(self, row: PlanRow) -> PlanRow:
        if row.tensor in self.added:
            reason = "" if row.layer_plan else "output head, no longer the token embedding"
            return replace(row, bytes_before=0, reason=reason)
        is_norm = row.tensor in self.rotated and len(row.shape) == 1 and row.tensor.endswith(".weight")
        return replace(row, reason="norm, set to ones: folded into the linears after it") if is_norm else row


def _stream(files: TensorFiles, skeleton: Skeleton) -> ResidualStream:
    """Returns what reads and writes the residual stream. Raises RecipeError where that is unknown."""
    stream = skeleton.architecture.stream
    if stream is None:
        raise RecipeError(
            f"model type {skeleton.model.config.model_type!r} cannot be rotated: the layers around its residual "
            "stream are unknown",
            "Leave the rotate stage out",
        )
    if carried := [name for name in skeleton.carried(files.names()) if len(files.shape(name)) > 1]:
        raise RecipeError(
            f"{carried[0]} belongs to no layer in config.json and may read the residual stream, which a rotation "
            "changes",
            "Leave the rotate stage out, or take a checkpoint without such tensors",
        )
    return stream


class _Builder:
    """Builder of the replacements of all tensors."""

    def __init__(
        self, files: TensorFiles, skeleton: Skeleton, stream: ResidualStream, stage: RotateStage, seed: int
    ) -> None:
        self._files, self._skeleton, self._stream = files, skeleton, stream
        self._residual = Rotation.random(skeleton.model.config.hidden_size, seed)
        self._heads = Rotation.random(skeleton.head_dim(), seed + 1) if stage.heads else None
        self._turned: dict[str, Read] = {}
        self._added: dict[str, str] = {}

    def build(self) -> tuple[dict[str, Read], dict[str, str], str]:
        """Returns functions that compute rotated tensors, the added ones, and a description."""
        for index in range(self._skeleton.num_blocks):
            self._turn_block(f"{self._skeleton.block_name(index)}.")
        words = [f"the residual stream is rotated by a randomized {self._residual.kind}"]
        if self._heads is not None:
            words.append(f"value heads by a {self._heads.kind}")
        words += ["the norms' weights are folded into the linears after them", *self._rotate_embed_and_head()]
        return self._turned, self._added, "; ".join(words)

    def _rotate_embed_and_head(self) -> list[str]:
        """Rotates embedding, final norm and head. Returns notes on them."""
        architecture = self._skeleton.architecture
        embedding, norm, head = (
            f"{name}.weight" for name in (architecture.embedding, architecture.final_norm, architecture.head)
        )
        self._turned[embedding] = lambda: self._residual.turn(self._files.tensor(embedding))
        gamma = self._files.tensor(norm)
        tied = self._skeleton.ties_head
        if tied and bool((gamma == gamma[0]).all()):
            return ["the head stays tied to the embedding, because the final norm scales all channels equally"]
        matrix = embedding if tied else head
        self._turned[head] = lambda: self._residual.turn(self._files.tensor(matrix), self._gamma(norm))
        self._turned[norm] = lambda: torch.ones_like(gamma)
        if not tied:
            return []
        if head not in self._files:
            self._added[head] = embedding
        added = self._files.tensor_nbytes(embedding)
        return [f"the head cannot stay tied to the embedding and becomes a separate matrix, {added:,} bytes more"]

    def _turn_block(self, prefix: str) -> None:
        norm_of: dict[str, str] = {}
        for norm, linears in self._stream.readers:
            name = f"{prefix}{norm}.weight"
            norm_of |= dict.fromkeys(linears, name)
            self._turned[name] = partial(_ones_like, self._files, name)
        for linear in {*norm_of, *self._stream.writers}:
            self._turn_linear(prefix, linear, norm_of.get(linear))

    def _turn_linear(self, prefix: str, linear: str, norm: str | None) -> None:
        name, bias = f"{prefix}{linear}.weight", f"{prefix}{linear}.bias"
        writes, produces, reads = (
            linear in self._stream.writers,
            linear == self._stream.values[0],
            linear == self._stream.values[1],
        )

        def outputs(tensor: Tensor) -> Tensor:
            """Rotates the output of the linear: the last dimension of `tensor`."""
            tensor = self._residual.turn(tensor) if writes else tensor
            return self._heads.turn_heads(tensor) if produces and self._heads is not None else tensor

        def turned_weight() -> Tensor:
            stored = self._files.tensor(name)
            weight = stored.double()
            if norm is not None:
                weight = self._residual.turn(weight, self._gamma(norm))
            if reads and self._heads is not None:
                weight = self._heads.turn_heads(weight)
            return outputs(weight.T).T.to(stored.dtype).contiguous()

        def turned_bias() -> Tensor:
            stored = self._files.tensor(bias)
            return outputs(stored.double()).to(stored.dtype)

        self._turned[name] = turned_weight
        if bias in self._files:
            self._turned[bias] = turned_bias

    def _gamma(self, norm: str) -> Tensor:
        return self._files.tensor(norm).double()


def _ones_like(files: TensorFiles, name: str) -> Tensor:
    return torch.ones_like(files.tensor(name))
