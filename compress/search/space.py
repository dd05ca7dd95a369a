"""Search space: candidates, layer groups, goal and request of a search. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from compress.checkpoint.scheme import FLOAT_BITS, as_width, targets
from compress.checkpoint.weights import NM, Int, NMSparsity, Scheme
from compress.common.cli import check_options, option, size_in_bytes
from compress.common.errors import RecipeError, nearest
from compress.methods import base
from compress.models.architecture import Architecture
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.base import Stage, TensorStage
from compress.stages.factorize import FactorizeStage
from compress.stages.finish import LOSS_HELP, FinishStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage, method_for
from compress.targets import IGNORE_HELP

DEFAULT_RANK_WORD = "rank"
"""Word for the default factorization method; other methods are given by name."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Stored form of a layer: pruned, factorized or neither, and quantized or not; dense by default. Raises
    RecipeError: both pruned and factorized, or a ratio outside 0 to 1; SchemeError: the pattern does not divide the
    groups.

    Attributes:
        scheme: integer scheme of the weights, of both factors, or of the remaining weights after pruning, or float
            scheme of the weights; None keeps 16-bit values.
        pattern: N:M sparsity.
        factorizing: factorization method; None leaves one matrix.
        keep: ratio of the factors' weights to the original ones.
    """

    scheme: Scheme | None = None
    pattern: NMSparsity | None = None
    factorizing: str | None = None
    keep: float = 1.0

    def __post_init__(self) -> None:
        if self.pattern and self.factorizing:
            raise RecipeError(f"{self} is both pruned and factorized", "Choose one: factors are not sparse")
        if self.pattern and self.scheme:
            NM(Int(int(self.scheme.bits), self.scheme.group_size, self.scheme.symmetric), self.pattern)
        self.stages("gptq", ("any",))

    @property
    def is_dense(self) -> bool:
        return not (self.scheme or self.pattern or self.factorizing)

    @property
    def is_plain(self) -> bool:
        """Whether weights alone are rounded, to integers: the only form of embeddings and heads."""
        is_int = isinstance(self.scheme, Int) and not self.scheme.activations
        return is_int and not self.pattern and not self.factorizing

    @property
    def bits_per_weight(self) -> float:
        """Approximate bits per weight, without scales."""
        bits = self.scheme.bits if self.scheme else FLOAT_BITS
        if self.pattern:
            return (bits + self.pattern.index_bits) * self.pattern.n / self.pattern.m
        return bits * self.keep

    def stages(self, method: str, targets: Sequence[str]) -> tuple[TensorStage, ...]:
        """Returns the recipe stages that store these layers as this candidate."""
        named = tuple(targets)
        stages: list[TensorStage] = []
        if self.factorizing:
            stages.append(FactorizeStage(self.factorizing, self.keep, "uniform", targets=named))
        if self.pattern:
            stages.append(PruneStage(pattern=self.pattern, targets=named))
        if self.scheme:
            stages.append(QuantizeStage(method_for(self.scheme, method), self.scheme, targets=named))
        return tuple(stages)

    def __str__(self) -> str:
        words = {method: word for word, method in rank_words().items()}
        structure = str(self.pattern) if self.pattern else ""
        if self.factorizing:
            structure += f"{words[self.factorizing]}{self.keep}"
        if self.scheme is None:
            return structure or "dense"
        if self.scheme.numbers != "int":
            width = "" if self.scheme == self.scheme.target() else f"w{self.scheme.bits}"
            return f"{width}{self.scheme.word}"
        group = f"g{self.scheme.group_size}" if self.scheme.group_size else ""
        inputs = f"a{self.scheme.activation_bits}" if self.scheme.activation_bits else ""
        return f"{structure}w{self.scheme.bits}{inputs}{group}{'' if self.scheme.symmetric else 'asym'}"


DEFAULT_CANDIDATES = "w2g128,w2g64,w3g128,w3g64,w4g128,w4g32,w5g128,w6g128,w8"
DENSE = "dense"
_PATTERN, _WIDTH = r"(?P<pattern>\d+:\d)?", r"(?:w(?P<bits>\d)(?:a(?P<inputs>\d))?(?:g(?P<group>\d+))?(?P<asym>asym)?)?"
_FORM = r"(?:w(?P<bits>\d(?:\.5)?))?(?P<form>[\w-]+)"
_KEEP = r"(?P<keep>\d*\.\d+|\d+)"


def rank_words() -> dict[str, str]:
    """Returns the registered factorization methods by their words in candidates; `rank` is the default one."""
    default = FactorizeStage().method
    return {DEFAULT_RANK_WORD if name == default else name: name for name in base.FACTORIZATION}


def float_words() -> dict[str, Scheme]:
    """Returns weight forms other than integers, with 16-bit activations, by their words."""
    forms = {word: form.target() for word, form in targets().items() if form is not Int}
    return {word: form for word, form in forms.items() if form.activations is None}


def parse_candidates(text: str) -> tuple[Candidate, ...]:
    """Parses candidates from `w2g64,2:4w4g128,rank0.8,nvfp4`, each once. A word consists of, in this order and all
    optional: an N:M pattern, or a factorization method with its keep ratio (`rank`: the default method); the bits,
    those of rounded inputs (`w4a8`), the group size (default: whole rows), and `asym` for stored zero points. Or it is
    the word of another weight form, after its bits if it has several widths (`w3exl3`, `w2.5exl3`); `dense` keeps the
    layer unchanged. Raises RecipeError: an unknown word, or fewer than two candidates; SchemeError: an impossible
    width, group or pattern."""
    candidates = dict.fromkeys(_candidate(word.strip()) for word in text.split(","))
    if len(candidates) < 2:
        raise RecipeError(f"a list of {len(candidates)} leaves no choice", f"Use --candidates {DEFAULT_CANDIDATES}")
    return tuple(candidates)


def _candidate(word: str) -> Candidate:
    if word == DENSE:
        return Candidate()
    if (other := re.fullmatch(_FORM, word)) and (form := float_words().get(other["form"])):
        return Candidate(form.parse({**form.fields(), "bits": as_width(other["bits"])}) if other["bits"] else form)
    words = rank_words()
    named = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    found = re.fullmatch(f"{_PATTERN}(?:(?P<method>{named}){_KEEP})?{_WIDTH}", word)
    if not word or found is None:
        raise RecipeError(
            f"{word!r} is not a candidate", "Write w4g128, w4a8g128, 2:4w4g128, rank0.8, asvd0.8w8, nvfp4 or w2.5exl3"
        )
    return Candidate(
        _integers(found) if found["bits"] else None,
        NMSparsity.parse(found["pattern"]) if found["pattern"] else None,
        words.get(found["method"]),
        float(found["keep"] or 1),
    )


def _integers(found: re.Match[str]) -> Int:
    numbers = {"bits": "bits", "group_size": "group", "activation_bits": "inputs"}
    fields = {name: int(found[word]) if found[word] else None for name, word in numbers.items()}
    return Int.parse({**fields, "symmetric": found["asym"] is None})


EMBEDDING = -1
"""Index of the token embedding, before the first block."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Linears that share a candidate: a single one, or several that engines fuse, such as siblings or all experts.
    `block`: index of its block; `EMBEDDING` for the token embedding, the number of blocks for the head."""

    block: int
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return self.modules[0]

    @property
    def weights(self) -> int:
        return sum(map(math.prod, self.shapes))


def layer_groups(
    blocks: Sequence[str], linears: Mapping[str, tuple[int, int]], architecture: Architecture
) -> list[LayerGroup]:
    """Groups linears, in the order of the model."""
    groups = []
    for index, block in enumerate(blocks):
        inside = [name for name in linears if name.startswith(f"{block}.")]
        # Experts are grouped last: sibling groups of gate and up are merged into theirs.
        fused = architecture.siblings + architecture.experts
        leader = {f"{block}.{name}": f"{block}.{names[0]}" for names in fused for name in names}
        members: dict[str, list[str]] = {}
        for name in inside:
            members.setdefault(leader.get(name, name), []).append(name)
        groups += [
            LayerGroup(index, tuple(modules), tuple(linears[name] for name in modules)) for modules in members.values()
        ]
    return groups


@dataclass(frozen=True, slots=True)
class Goal:
    """Target of a search, one of three: best quality within a size, or least size within a loss of quality. Raises
    RecipeError: none or several are given, or the value is not positive."""

    bits_per_weight: float | None = option(
        "--target-bpw",
        default=None,
        name="target_bpw",
        help="Best quality within this many bits per weight, scales included.",
    )
    size: int | None = option(
        "--target-size",
        default=None,
        name="target_size",
        written=str | int | None,
        typed=str | None,
        read=size_in_bytes,
        metavar="SIZE",
        help="Best quality within a size: 5GB, 800MB.",
    )
    kl: float | None = option(
        "--max-kl",
        default=None,
        name="max_kl",
        help="Least size whose measured KL to the dense model is at most this.",
    )

    def __post_init__(self) -> None:
        given = [each for each in (self.bits_per_weight, self.size, self.kl) if each is not None]
        if len(given) != 1:
            raise RecipeError(
                f"a search needs exactly one target, but {len(given)} are given",
                "Use --target-bpw, --target-size or --max-kl",
            )
        if not 0 < given[0] < float("inf"):
            raise RecipeError(f"a target of {given[0]} is invalid", "Use e.g. --target-bpw 3.5")

    @property
    def name(self) -> str:
        """Short name for recipes and reports."""
        if self.kl is not None:
            return f"search-kl{self.kl:g}"
        return f"search-{self.size / 1e6:g}MB" if self.size is not None else f"search-{self.bits_per_weight:g}bpw"

    def __str__(self) -> str:
        if self.kl is not None:
            return f"KL at most {self.kl:g}"
        if self.size is not None:
            return f"at most {self.size / 1e6:,.2f} MB"
        return f"at most {self.bits_per_weight:g} bits per weight"


def reads_inputs(method: str) -> bool:
    """Returns whether a quantization method reads the inputs of layers."""
    found = base.QUANTIZATION.find(method)
    return found.needs(found.Options()).inputs


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """All inputs that determine the result of a search, except the model.

    Attributes:
        measured: number of calibration sequences for measurements, which rounding does not use.
        tries: maximum number of checkpoints to approach a KL target.
        ends: whether to include the token embedding and the output head. They are only rounded, and only this runtime
            loads a rounded embedding.
        finish: last stage of the recipe, if any.
    """

    goal: Goal
    candidates: tuple[Candidate, ...] = option(
        "--candidates",
        default=parse_candidates(DEFAULT_CANDIDATES),
        written=list[str | int],
        start=DEFAULT_CANDIDATES,
        typed=str,
        read=lambda words: parse_candidates(words if isinstance(words, str) else ",".join(map(str, words))),
        metavar="FORM,...",
        help="Forms that layers may take: w4g64 (width, columns that share a scale), w4a8g64 (inputs of 8 bits), "
        "rank0.8 or asvd0.8 (share of the weights in two factors), 2:4 (pruned), rank0.8w8, 2:4w4g128, dense.",
    )
    method: str = option(default="gptq", help="gptq, or rtn (no calibration, lower quality).")
    measured: int = option(
        default=8,
        limits={"at least": 1},
        help="Number of calibration sequences for measurements; rounding does not use them.",
    )
    tries: int = option(
        default=5, limits={"at least": 1}, help="Maximum number of checkpoints written to approach --max-kl."
    )
    ignore: tuple[str, ...] = option(
        "--ignore", default=(), written=list[str], typed=list[str] | None, read=tuple, help=IGNORE_HELP
    )
    engine: str | None = option(
        default=None,
        metavar="ENGINE",
        help="Use only forms that this engine is measured to load: vLLM or transformers.",
    )
    ends: bool = option(
        "--include-embeddings",
        default=False,
        name="include_embeddings",
        help="Also choose the bits of token embedding and head; the result then loads in this runtime only.",
    )
    finish: FinishStage | None = option(
        default=None,
        written=str | None,
        read=FinishStage,
        metavar="LOSS",
        help=f"End the recipe with a finish stage: {LOSS_HELP} --max-kl then holds after it. Default: off.",
    )
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    seed: int = 0
    name: str = "search"

    def __post_init__(self) -> None:
        check_options(self)
        able = tuple(name for name, method in base.QUANTIZATION.items() if method.rounds_factors)
        if self.method not in able:
            found = base.QUANTIZATION.find(self.method)
            reason = "changes" if found.smooths or found.tunes else "does not round the factors of"
            problem = f"{self.method} {reason} layers together, so single layers have no sensitivity"
            raise RecipeError(problem, nearest(self.method, able, "Use"))
        for candidate in self.candidates:
            self._check(candidate)

    def _check(self, candidate: Candidate) -> None:
        """Raises RecipeError for a candidate that needs calibration inputs if the quantization method reads none."""
        stages = candidate.stages(self.method, ())
        if not reads_inputs(self.method) and any(stage.needs_calibration for stage in stages):
            problem = f"{candidate} needs the inputs of layers, and {self.method} reads none"
            raise RecipeError(problem, "Search with gptq, or factorize with plain svd, e.g. svd0.8w8")

    def probe(self) -> Recipe:
        """Returns a recipe with the same layers and texts, for preparing a search."""
        text = CalibrationOptions(
            self.calibration.source, self.calibration.samples + self.measured, self.calibration.length
        )
        return Recipe((QuantizeStage("gptq", Int(8, None), ignore=self.ignore),), text, self.seed, self.name)

    def method_of(self, group: LayerGroup) -> str:
        """Returns the method of a group. Rows of an embedding are looked up individually, so errors cannot be
        compensated."""
        rounds_embeddings = base.EMBEDDING in base.QUANTIZATION.find(self.method).matrices
        return self.method if group.block != EMBEDDING or rounds_embeddings else base.fallback("quantize").name

    def recipe(self, chosen: Mapping[LayerGroup, Candidate]) -> Recipe:
        """Returns the recipe of a choice, with stages in order of candidate size, and the finish stage. Raises
        RecipeError: all groups stay dense."""
        targets: dict[tuple[str, Candidate], list[str]] = {}
        for group, candidate in chosen.items():
            targets.setdefault((self.method_of(group), candidate), []).extend(group.modules)
        order = sorted(targets, key=lambda each: (_order(each[1]), each[0]))
        stages: list[Stage] = [stage for each in order for stage in each[1].stages(each[0], targets[each])]
        if not stages:
            raise RecipeError(
                f"{self.goal} leaves every layer dense", "Use a smaller target, or remove dense from --candidates"
            )
        last = () if self.finish is None else (self.finish,)
        return Recipe((*stages, *last), self.calibration, self.seed, self.name)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for the report."""
        values = asdict(self)
        del values["candidates"]
        return values | {"menu": list(map(str, self.candidates))}


def _order(candidate: Candidate) -> tuple[float, int, str]:
    """Returns the sort key: fewer bits first, then fewer scales."""
    group = candidate.scheme.group_size if candidate.scheme else None
    return candidate.bits_per_weight, -(group or 1 << 30), str(candidate)
