"""Values and shapes of every tensor, and its digest in the compression report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from compress.checkpoint.verify import dense_problems, recorded_digests, weight_problems
from compress.checkpoint.weights.base import Weight, digest
from compress.doctor.base import AGAIN, CHECKS, Check
from compress.doctor.findings import Finding
from compress.doctor.view import StoredTensor, View


@CHECKS.register()
class Tensors(Check):
    """Finds NaN, infinity, shapes that contradict config.json, all-zero matrices, and digests that differ."""

    name: ClassVar[str] = "tensors"

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._digests: dict[str, str] = {}

    def start(self) -> Iterator[Finding]:
        self._digests = recorded_digests(self.view.path) or {}
        packed = self.view.packed
        for module in sorted(self._digests.keys() - set(packed.modules if packed else self._digests)):
            if packed and module not in packed.files and f"{module}.weight" not in packed.files:
                yield self.error("missing-tensors", module, "it is in the compression report, but is not stored", AGAIN)

    def tensor(self, stored: StoredTensor) -> Iterator[Finding]:
        packed = self.view.packed
        if packed is None:
            return
        content, implied = stored.content, self.view.implied
        if isinstance(content, Weight):
            problems = weight_problems(packed, stored.name, content, implied)
        else:
            problems = dense_problems(packed, stored.name, implied)
        for problem in problems:
            yield self.error(_kind(problem), stored.name, problem, AGAIN)
        yield from self._digest(stored)
        if not isinstance(content, Weight) and content.dim() > 1 and content.numel() and not _any(content):
            problem = f"all {content.numel():,} values are 0"
            yield self.warning("zeros", stored.name, problem, "Compare with the source: --against DENSE")

    def _digest(self, stored: StoredTensor) -> Iterator[Finding]:
        expected = self._digests.get(stored.name)
        if expected and digest(stored.content) != expected:
            problem = "its codes, scales or zero points are not those that the compression report recorded"
            yield self.error("digest", stored.name, problem, AGAIN)


def _kind(problem: str) -> str:
    if "but config.json says" in problem:
        return "shape"
    return "non-finite" if any(word in problem for word in ("NaN", "not finite", "infinity")) else "contradiction"


def _any(tensor: Tensor) -> bool:
    return any(bool(rows.bool().any()) for rows in tensor.reshape(-1).split(2**22))
