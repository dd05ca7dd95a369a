"""Products with trellis codes (EXL3) in plain C on CPUs: codes stay packed, exact numbers, float32 sums."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.checkpoint.scheme import Scheme
from compress.checkpoint.weights.exl3 import CODEBOOKS, TILE, TURN, Exl3Weight, padded, pair_widths
from compress.common.errors import ToolkitError
from compress.cpu.binding import BEST, absence, library, struct_fields
from runtime.backends.backend import LinearKernel
from runtime.backends.base import Target
from runtime.backends.cpu.linear import ERRORS
from runtime.backends.cpu.weight_layout import TYPES
from runtime.backends.prepared_weight import Layout, PreparedWeight

WORD_BITS, SCALE_BYTES = 32, 4


class _Weight(ctypes.Structure):
    """`TrellisWeight` of c/trellis/trellis.h."""

    _fields_ = struct_fields(
        "int64 out_features in_features",
        "int32 pair_bits codebook",
        "pointer words in_scales out_scales bias",
    )


class CpuTrellisLinear:
    """A weight `[O, I]` of trellis codes, perhaps with a bias, in the layout of the C kernel.

    Args:
        weight: as stored, or what `prepared` returned, which is not copied.
        bias: `[O]`, any float dtype.

    Attributes:
        is_prepared: its memory is that of a `PreparedWeight`.

    Raises:
        ToolkitError: the library is not built.
        CheckpointError: a prepared weight whose tensors do not have the sizes of its shape.
    """

    def __init__(
        self, weight: Exl3Weight | PreparedWeight, bias: Tensor | None = None, *, instruction_set: int = BEST
    ) -> None:
        self.is_prepared = isinstance(weight, PreparedWeight)
        prepared = weight if isinstance(weight, PreparedWeight) else pack(weight)
        check_prepared(prepared)
        self._prepared, self._instruction_set = prepared, instruction_set
        self.out_features, self.in_features = prepared.shape
        self._bias = None if bias is None else _filled(bias.float()).contiguous()
        self._weight = _Weight(
            out_features=padded(self.out_features),
            in_features=padded(self.in_features),
            pair_bits=prepared.bits,
            codebook=int(prepared.tensors["codebook"]),
            words=prepared.tensors["words"].data_ptr(),
            in_scales=prepared.tensors["in_scales"].data_ptr(),
            out_scales=prepared.tensors["out_scales"].data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )
        self._address = ctypes.addressof(self._weight)
        self._multiply = _functions().trellis_multiply

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._prepared.tensors.values())

    def __call__(self, x: Tensor) -> Tensor:
        """`x [M, I] -> [M, O]` in bfloat16 or float32, whichever `x` is. A row of the result depends on its row of x
        alone.

        Raises:
            ToolkitError: no memory, or not the instruction set that was asked for.
        """
        if x.stride(1) != 1 or self.in_features % TURN:
            x = _filled(x).contiguous()
        y = x.new_empty(x.shape[0], padded(self.out_features))
        status = self._multiply(
            self._address,
            TYPES[x.dtype],
            x.shape[0],
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            self._instruction_set,
        )
        if status:
            raise ToolkitError(f"a compiled product failed: {ERRORS[status]}", "Use --linear-backend dequantized")
        return y[:, : self.out_features].contiguous()

    def prepared(self) -> PreparedWeight:
        """Returns its tensors, which are not copied."""
        return self._prepared


def pack(weight: Exl3Weight) -> PreparedWeight:
    """A weight in the layout of c/trellis/trellis.h: streams side by side, scales in float32 with zeros for the padding
    of both sides, a part of the turns' norm in those of inputs."""
    rows, columns, words = weight.trellis.shape
    streams = weight.trellis.contiguous().view(torch.int32)
    streams = streams.view(rows, columns * TILE // TURN, TURN // TILE, 2, words // 4)
    tensors = {
        "words": streams.permute(1, 0, 4, 3, 2).contiguous().flatten(),
        "in_scales": _filled(weight.suh.float()) / TURN,
        "out_scales": _filled(weight.svh.float()),
        "codebook": torch.tensor(CODEBOOKS.index(weight.scheme.codebook), dtype=torch.int32),
    }
    return PreparedWeight(weight.shape, tensors, weight.scheme.pair_bits, weight.shape[1])


def _filled(values: Tensor) -> Tensor:
    """`values [..., n]` with zeros up to `padded(n)`."""
    return pad(values, (0, padded(values.shape[-1]) - values.shape[-1]))


def check_prepared(weight: PreparedWeight) -> None:
    """Checks that the C kernel finds memory wherever it reads.

    Raises:
        CheckpointError: tensors that a weight of this shape and bits does not have.
    """
    (rows, columns), pair_bits = map(padded, weight.shape), weight.bits
    weight.check("words", (rows * columns * pair_bits // 2 // WORD_BITS,), (torch.int32,))
    weight.check("in_scales", (columns,), (torch.float32,))
    weight.check("out_scales", (rows,), (torch.float32,))
    weight.check("codebook", (), (torch.int32,))
    codebook = int(weight.tensors["codebook"])
    if codebook not in range(len(CODEBOOKS)) or pair_bits not in pair_widths(CODEBOOKS[codebook]):
        raise weight.refusal(f"trellis codes of {pair_bits / 2:g} bits of codebook {codebook}")


def unsupported_reason(scheme: Scheme, in_features: int, target: Target) -> str:
    """Why no weight of trellis codes is multiplied in C on a target; "" when one is."""
    if target.device.type != "cpu":
        return "runs on CPUs"
    if absence():
        return f"is not there: {absence()}"
    return "" if target.dtype in (torch.bfloat16, torch.float32) else "computes in bfloat16 and float32"


def _nbytes(scheme: Scheme, rows: int, columns: int, target: Target) -> int:
    rows, columns = padded(rows), padded(columns)
    return int(rows * columns * scheme.bits) // 8 + (rows + columns + 1) * SCALE_BYTES


TRELLIS: LinearKernel[Exl3Weight] = LinearKernel(
    "cpu_exl3",
    "trellis codes decoded in C for every product, float32 sums: exact weights",
    "exl3",
    unsupported_reason,
    lambda weight, bias, target: CpuTrellisLinear(weight, bias),
    _nbytes,
    saves_memory=True,
    layout=Layout("trellis codes", CpuTrellisLinear),
)


@cache
def _functions() -> ctypes.CDLL:
    native = library()
    if native is None:
        raise ToolkitError("there are no CPU kernels", absence())
    native.trellis_multiply.argtypes = (
        *(c_void_p, c_int, c_int64),
        *(c_void_p, c_int64, c_void_p, c_int64, c_int),
    )
    return native
