"""Mixes of llama.cpp's quantizer (without an importance matrix): the type of each matrix by its place in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from compress.common.errors import SchemeError

FLOATS = ("f32", "f16", "bf16")
SMALLER_BLOCKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types with blocks of 32 in place of those with blocks of 256, for rows that do not fill whole blocks."""
LARGE_LAYERS = 80
"""Layers of models of 70B, whose few values get 5 bits."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a matrix in a model.

    Attributes:
        name: of the matrix in files, without layer and suffix: `attn_v`, `ffn_down_exps`, `output`, `token_embd`.
        columns: its row length.
        layer, layers: number of its layer, and of all layers.
        groups: query heads per key-value head.
        experts: number of experts; 0 in dense models.
        is_tied: whether the embedding is also the output head.
    """

    name: str
    columns: int
    layer: int
    layers: int
    groups: int = 1
    experts: int = 0
    is_tied: bool = False


Rule = tuple[str, Callable[[Place], bool]]
"""A type, and the matrices that get it."""


def _all(place: Place) -> bool:
    return True


def _grouped(place: Place) -> bool:
    return place.groups >= 4


def _first_eighth(place: Place) -> bool:
    return place.layer < place.layers // 8


def _sensitive(place: Place) -> bool:
    """Whether a layer is in the first or last eighth, or every third one between them."""
    eighth = place.layers // 8
    is_outer = place.layer < eighth or place.layer >= 7 * place.layers // 8
    return is_outer or (place.layer - eighth) % 3 == 2


@dataclass(frozen=True, slots=True)
class Mix:
    """Types of the matrices of a model.

    Attributes:
        number: value of `general.file_type`.
        base: type of the matrices without a rule.
        rules: exceptions by kind of matrix; the first that applies counts.
        outputs_of_8: type of the output projections of attention in models with 8 experts.
    """

    number: int
    base: str
    rules: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    outputs_of_8: str | None = None

    def type_of(self, place: Place) -> str:
        """Returns the type of a matrix, one whose blocks its rows are."""
        return fitting(self._wanted(place), place.columns)

    def _wanted(self, place: Place) -> str:
        if place.name == "output" or (place.name == "token_embd" and place.is_tied):
            return self.base if self.base in ("q8_0", *FLOATS) else "q6_k"
        kind = "attn_v" if place.name == "attn_qkv" else "ffn_down" if "ffn_down" in place.name else place.name
        if self.base not in FLOATS and place.experts == 8 and kind in ("attn_k", "attn_v"):
            return "q8_0"
        if place.experts == 8 and kind == "attn_output":
            return self.outputs_of_8 or self.base
        found = next((name for name, applies in self.rules.get(kind, ()) if applies(place)), self.base)
        is_large = place.layers == LARGE_LAYERS and place.groups > 1
        return "q5_k" if kind == "attn_v" and is_large and found in ("q3_k", "q4_k") else found


def fitting(name: str, columns: int) -> str:
    """Returns the type that rows of `columns` values get in place of one whose whole blocks they are not."""
    if columns % 256 and name in SMALLER_BLOCKS:
        name = SMALLER_BLOCKS[name]
    return "f16" if columns % 32 and name not in FLOATS else name


def _everywhere(name: str) -> tuple[Rule, ...]:
    return ((name, _all),)


_MORE = {"attn_v": (("q6_k", _sensitive),), "ffn_down": (("q6_k", _sensitive),)}
MIXES = {
    "f32": Mix(0, "f32"),
    "f16": Mix(1, "f16"),
    "bf16": Mix(32, "bf16"),
    "q8_0": Mix(7, "q8_0"),
    "q6_k": Mix(18, "q6_k"),
    "q5_0": Mix(8, "q5_0"),
    "q5_1": Mix(9, "q5_1"),
    "q5_k_s": Mix(16, "q5_k"),
    "q5_k_m": Mix(17, "q5_k", _MORE),
    "q4_0": Mix(2, "q4_0"),
    "q4_1": Mix(3, "q4_1"),
    "q4_k_s": Mix(
        14,
        "q4_k",
        {"attn_v": (("q5_k", lambda place: place.layer < 4),), "ffn_down": (("q5_k", _first_eighth),)},
        outputs_of_8="q5_k",
    ),
    "q4_k_m": Mix(15, "q4_k", _MORE, outputs_of_8="q5_k"),
    "iq4_nl": Mix(
        25, "iq4_nl", {"attn_v": (("q5_k", _grouped),), "ffn_down": (("q5_k", _first_eighth),)}, outputs_of_8="q5_k"
    ),
    "q3_k_s": Mix(11, "q3_k", outputs_of_8="q5_k"),
    "q3_k_m": Mix(
        12,
        "q3_k",
        {
            "attn_v": (("q5_k", lambda place: place.layer < 2), ("q4_k", _all)),
            "ffn_down": (("q5_k", lambda place: place.layer < place.layers // 16), ("q4_k", _all)),
            "attn_output": _everywhere("q4_k"),
        },
        outputs_of_8="q5_k",
    ),
    "q3_k_l": Mix(13, "q3_k", {name: _everywhere("q5_k") for name in ("attn_v", "ffn_down", "attn_output")}),
    "q2_k": Mix(
        10,
        "q2_k",
        {
            "attn_v": (("q4_k", _grouped), ("q3_k", _all)),
            "ffn_down": _everywhere("q3_k"),
            "attn_output": _everywhere("q3_k"),
        },
        outputs_of_8="q5_k",
    ),
}
"""Mixes by the names of llama.cpp, in lower case."""
ALIASES = {name: f"{name}_m" for name in ("q3_k", "q4_k", "q5_k")}
TYPES = tuple(dict.fromkeys(mix.base for mix in MIXES.values()))
"""Types of a single matrix that are written."""


def find_mix(name: str) -> Mix:
    """Returns a mix by its name, `q4_k` for `q4_k_m`. Raises SchemeError for one that does not exist."""
    found = MIXES.get(ALIASES.get(name, name))
    if found is None:
        raise SchemeError.unknown("GGUF type", name, (*MIXES, *ALIASES), "Use --gguf-type")
    return found


def number_of(base: str) -> int:
    """Returns the `general.file_type` of a file whose matrices have one type."""
    return MIXES[f"{base}_s" if f"{base}_s" in MIXES else base].number
