"""What a search is asked for, as data: `compress search` builds it from options, a recipe file from `search:`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from compress.checkpoint.scheme import FLOAT_BITS
from compress.checkpoint.weights import NM, Int, Scheme, Sparsity
from compress.common.cli import nearest
from compress.common.errors import RecipeError
from compress.methods import base
from compress.models.spec import Architecture
from compress.recipe import (
    CalibrationOptions,
    FactorizeStage,
    PruneStage,
    QuantizeStage,
    Recipe,
    TensorStage,
)

RANK_WORDS = {"rank": "svd-llm", "asvd": "asvd", "svd": "svd"}
"""Factorizing methods by the words that menus have for them."""


@dataclass(frozen=True, slots=True)
class Form:
    """Pruned or factorized or neither, and quantized or not; a layer of which none is true stays dense.

    Attributes:
        scheme: of the integers: of all weights, of both factors, or of what pruning leaves; None keeps 16-bit values.
        pattern: N:M sparsity.
        factorizing: method that makes two factors; None leaves one matrix.
        keep: share of the weights that factors keep.

    Raises:
        RecipeError: pruned and factorized, or a share that means nothing.
        SchemeError: groups that cut through the pattern.
    """

    scheme: Scheme | None = None
    pattern: Sparsity | None = None
    factorizing: str | None = None
    keep: float = 1.0

    def __post_init__(self) -> None:
        if self.pattern and self.factorizing:
            raise RecipeError(f"{self} is both pruned and factorized", "Choose one: factors are not sparse")
        if self.pattern and self.scheme:
            NM(Int(self.scheme.bits, self.scheme.group_size, self.scheme.symmetric), self.pattern)
        self.stages("gptq", ("any",))

    @property
    def is_dense(self) -> bool:
        return not (self.scheme or self.pattern or self.factorizing)

    @property
    def is_plain(self) -> bool:
        """Whether every weight is rounded and nothing else is done."""
        return self.scheme is not None and not self.pattern and not self.factorizing

    @property
    def bits_per_weight(self) -> float:
        """About how many, scales left out."""
        bits = self.scheme.bits if self.scheme else FLOAT_BITS
        if self.pattern:
            return (bits + self.pattern.index_bits) * self.pattern.kept / self.pattern.of
        return bits * self.keep

    def stages(self, method: str, targets: Sequence[str]) -> tuple[TensorStage, ...]:
        """What a recipe does to give these layers this form.

        Args:
            method: how integers are rounded.
        """
        named = tuple(targets)
        stages: list[TensorStage] = []
        if self.factorizing:
            stages.append(FactorizeStage(self.factorizing, self.keep, "uniform", named))
        if self.pattern:
            stages.append(PruneStage(pattern=self.pattern, targets=named))
        if self.scheme:
            stages.append(QuantizeStage(method, self.scheme, named))
        return tuple(stages)

    def __str__(self) -> str:
        words = {method: word for word, method in RANK_WORDS.items()}
        structure = str(self.pattern) if self.pattern else ""
        if self.factorizing:
            structure += f"{words[self.factorizing]}{self.keep}"
        if self.scheme is None:
            return structure or "dense"
        group = f"g{self.scheme.group_size}" if self.scheme.group_size else ""
        return f"{structure}w{self.scheme.bits}{group}{'' if self.scheme.symmetric else 'asym'}"


DEFAULT_MENU = "w2g128,w2g64,w3g128,w3g64,w4g128,w4g32,w5g128,w6g128,w8"
DENSE = "dense"
_WORD = re.compile(
    rf"(?P<pattern>\d+:\d)?(?:(?P<method>{'|'.join(RANK_WORDS)})(?P<keep>\d*\.\d+|\d+))?"
    r"(?:w(?P<bits>\d)(?:g(?P<group>\d+))?(?P<asym>asym)?)?"
)


def parse_menu(text: str) -> tuple[Form, ...]:
    """Forms from `w2g64,2:4w4g128,rank0.8`, each once. A word says, in this order and each only if wanted: an N:M
    pattern, or a share of the weights that factors keep (`rank` by SVD-LLM, `asvd`, `svd`); then the width, the columns
    that share a scale (none: all of a row), and `asym` for stored zero points. `dense` leaves layers as they are.

    Raises:
        RecipeError: a word that means nothing, or fewer than two forms.
        SchemeError: a width, group or pattern that no scheme has.
    """
    forms = dict.fromkeys(_form(word.strip()) for word in text.split(","))
    if len(forms) < 2:
        raise RecipeError(f"a menu of {len(forms)} leaves nothing to choose", f"Use --candidates {DEFAULT_MENU}")
    return tuple(forms)


def _form(word: str) -> Form:
    if word == DENSE:
        return Form()
    found = _WORD.fullmatch(word)
    if not word or found is None:
        raise RecipeError(
            f"{word!r} is nothing a layer can become", "Write w4g128, w8, 2:4w4g128, rank0.8 or asvd0.8w8"
        )
    bits, group = found["bits"], found["group"]
    return Form(
        Int(int(bits), int(group) if group else None, found["asym"] is None) if bits else None,
        Sparsity.parse(found["pattern"]) if found["pattern"] else None,
        RANK_WORDS.get(found["method"]),
        float(found["keep"] or 1),
    )


EMBEDDING = -1
"""Index that stands for a block before the first."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One linear, or siblings that engines fuse and that therefore share a form.

    Attributes:
        block: index of the block it stands in; of the token embedding `EMBEDDING`, of the head the number of blocks.
        modules: full names.
        shapes: `(O, I)` of each.
    """

    block: int
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return self.modules[0]

    @property
    def weights(self) -> int:
        return sum(map(math.prod, self.shapes))


def units_of(blocks: Sequence[str], linears: Mapping[str, tuple[int, int]], architecture: Architecture) -> list[Unit]:
    """Units in the order of the model.

    Args:
        blocks: names of the blocks.
        linears: shapes of the linears to decide about, by full name.
    """
    units = []
    for index, block in enumerate(blocks):
        inside = [name for name in linears if name.startswith(f"{block}.")]
        leader = {
            f"{block}.{name}": f"{block}.{siblings[0]}" for siblings in architecture.siblings for name in siblings
        }
        groups: dict[str, list[str]] = {}
        for name in inside:
            groups.setdefault(leader.get(name, name), []).append(name)
        units += [Unit(index, tuple(modules), tuple(linears[name] for name in modules)) for modules in groups.values()]
    return units


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class Goal:
    """The best quality within a size, or the least size within a loss of quality: one of the three.

    Attributes:
        bits_per_weight: of the layers searched, scales included.
        size: bytes of the weight files.
        kl: mean divergence from the dense model as the finished checkpoint is measured, in nats.

    Raises:
        RecipeError: none or several are given, or one is not a positive number.
    """

    bits_per_weight: float | None = None
    size: int | None = None
    kl: float | None = None

    def __post_init__(self) -> None:
        given = [each for each in (self.bits_per_weight, self.size, self.kl) if each is not None]
        if len(given) != 1:
            raise RecipeError(
                f"a search has one target, and {len(given)} are given", "Use --target-bpw, --target-size or --max-kl"
            )
        if not 0 < given[0] < float("inf"):
            raise RecipeError(f"a target of {given[0]} means nothing", "Use e.g. --target-bpw 3.5")

    @property
    def name(self) -> str:
        """A short one, for recipes and reports."""
        if self.kl is not None:
            return f"search-kl{self.kl:g}"
        return f"search-{self.size / 1e6:g}MB" if self.size is not None else f"search-{self.bits_per_weight:g}bpw"

    def __str__(self) -> str:
        if self.kl is not None:
            return f"KL at most {self.kl:g}"
        if self.size is not None:
            return f"at most {self.size / 1e6:,.2f} MB"
        return f"at most {self.bits_per_weight:g} bits per weight"


def parse_size(text: str) -> int:
    """Bytes from `5GB`, `800 MB`, `1.5GiB` or a plain number. Raises RecipeError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found.group(2).upper() not in _UNITS:
        raise RecipeError(f"{text!r} is no size", "Write a number and a unit: 5GB, 800MB, 1.5GiB")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


METHODS = ("gptq", "rtn")
DEFAULT_MEASURED = 8
DEFAULT_TRIES = 5


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Everything that decides what a search finds besides the model.

    Attributes:
        goal: what it aims at.
        menu: what a layer may become.
        method: how weights are rounded, both where sensitivities are measured and in the end.
        measured: sequences of the calibration text that sensitivities are measured on; rounding does not see them.
        tries: checkpoints that may be made before a target of KL is met as closely as it can be.
        ignore: patterns of modules that stay dense.
        ends: whether the token embedding and the output head take part. They are rounded and nothing else; only this
            runtime reads a rounded embedding.
    """

    goal: Goal
    menu: tuple[Form, ...] = field(default_factory=lambda: parse_menu(DEFAULT_MENU))
    method: str = "gptq"
    measured: int = DEFAULT_MEASURED
    tries: int = DEFAULT_TRIES
    ignore: tuple[str, ...] = ()
    ends: bool = False
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    seed: int = 0
    name: str = "search"

    def __post_init__(self) -> None:
        if self.method in base.names("quantize") and base.quantization(self.method).smooths:
            problem = f"{self.method} smooths several layers at once, so none has a sensitivity of its own"
            raise RecipeError(problem, "Search with gptq or rtn")
        if self.method not in METHODS:
            raise RecipeError(f"method {self.method!r} cannot be searched with", nearest(self.method, METHODS, "Use"))
        for name, value in (("measured", self.measured), ("tries", self.tries)):
            if value < 1:
                raise RecipeError(f"{name}={value} leaves nothing to go by", f"Use {name} 4 or more")
        for form in self.menu:
            self._check(form)

    def _check(self, form: Form) -> None:
        """Raises RecipeError for a form that looks at inputs where rounding does not: its run would have no text."""
        if self.method == "rtn" and any(stage.needs_calibration for stage in form.stages(self.method, ())):
            problem = f"{form} is found by inputs, and with rtn nothing looks at them"
            raise RecipeError(problem, "Search with gptq, or make factors by plain svd, e.g. svd0.8w8")

    def probe(self) -> Recipe:
        """A recipe that takes the same layers and texts: what a search is prepared with."""
        text = CalibrationOptions(
            self.calibration.source, self.calibration.samples + self.measured, self.calibration.length
        )
        return Recipe((QuantizeStage("gptq", Int(8, None), ignore=self.ignore),), text, self.seed, self.name)

    def method_of(self, unit: Unit) -> str:
        """How a unit is rounded. Rows of an embedding are looked up, not multiplied: nothing can make up for errors."""
        return "rtn" if unit.block == EMBEDDING else self.method

    def recipe(self, chosen: Mapping[Unit, Form]) -> Recipe:
        """The recipe that gives every unit its form: the stages of each form together, small ones first.

        Raises:
            RecipeError: all units stay dense.
        """
        targets: dict[tuple[str, Form], list[str]] = {}
        for unit, form in chosen.items():
            targets.setdefault((self.method_of(unit), form), []).extend(unit.modules)
        order = sorted(targets, key=lambda each: (_order(each[1]), each[0]))
        stages = [stage for each in order for stage in each[1].stages(each[0], targets[each])]
        if not stages:
            raise RecipeError(
                f"{self.goal} leaves every layer dense", "Ask for less, or leave dense out of --candidates"
            )
        return Recipe(tuple(stages), self.calibration, self.seed, self.name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the report."""
        return asdict(self) | {"menu": list(map(str, self.menu))}


def _order(form: Form) -> tuple[float, int, str]:
    """Few bits first, and of the same bits those with fewer scales."""
    group = form.scheme.group_size if form.scheme else None
    return form.bits_per_weight, -(group or 1 << 30), str(form)
