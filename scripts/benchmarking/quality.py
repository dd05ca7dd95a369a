"""Settings of the quality benchmark, the methods of each, the promised orders of methods, and verdicts on them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarking.models import Cost
from benchmarking.tables import Row
from compress.checkpoint.scheme import Scheme, targets
from compress.checkpoint.weights import Activations, Int, NMSparsity
from compress.common.errors import RecipeError
from compress.common.evaluation import Evaluation
from compress.methods.base import FACTORIZATION, PRUNING, QUANTIZATION
from compress.recipe import MAX_TOKENS, CalibrationOptions, Recipe
from compress.recipe_file import bundled_recipes, load_recipe, load_work
from compress.search.space import DEFAULT_CANDIDATES, DENSE, Goal, SearchRequest, parse_candidates
from compress.stages.base import Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.finish import FinishStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage, method_for

RECIPES, COVERAGE = "recipes", "coverage"
SETTINGS = ("w4g64", "w4g128", "w3g64", "w2g64", "w8a8", "2:4", "50%", "2:4+w4g64", "rank0.8", RECIPES)
NO_CALIBRATION = frozenset(("rtn", "hqq", "magnitude", "svd"))
TOKENS_PER_CHANNEL = {"own tokens": 0, "1 per channel": 1, "2 per channel": 2, "all tokens": MAX_TOKENS}
"""Tokens that the statistics of an expert take at least, the methods of the setting `coverage` of a mixture."""
SEARCH = "bpw"
CANDIDATES = {"integers": DEFAULT_CANDIDATES, "trellis": "w1.5exl3,w2exl3,w2.5exl3,w3exl3,w3.5exl3,exl3,w5exl3"}
"""Forms that a search chooses from, the methods of the settings `bpw2.25`, `bpw4.125`, ..."""
FINISH = "+finish"
"""End of a setting whose result is finished with `kl`."""
JOINT, AFTERWARDS = "sparsegpt+gptq", "sparsegpt+rtn"


@dataclass(frozen=True)
class Order:
    """`better` must not be worse than `worse` at the same setting; a strict one must be better."""

    better: str
    worse: str
    strict: bool = False

    def __str__(self) -> str:
        return f"{self.better} {'<' if self.strict else '<='} {self.worse}"


def methods_of(setting: str) -> tuple[str, ...]:
    """Methods that apply to a setting."""
    setting = setting.removesuffix(FINISH)
    if setting == RECIPES:
        return tuple(name for name in bundled_recipes() if isinstance(load_work(name), Recipe))
    if setting == COVERAGE:
        return tuple(TOKENS_PER_CHANNEL)
    if is_search(setting):
        return tuple(CANDIDATES)
    if setting == "w8a8":
        return ("rtn", "smoothquant")
    without_calibration_first = sorted(QUANTIZATION, key=lambda method: method not in NO_CALIBRATION)
    if setting.startswith("rank"):
        return tuple(FACTORIZATION)
    if _is_rounding(setting):
        return tuple(each for each in without_calibration_first if not _refusal(setting, each))
    return (AFTERWARDS, JOINT) if "+" in setting else tuple(PRUNING)


def orders_of(setting: str) -> tuple[Order, ...]:
    """Orders of methods that the papers promise at a setting, which this toolkit must keep."""
    setting = setting.removesuffix(FINISH)
    if setting == RECIPES or is_search(setting):
        return ()
    if setting == COVERAGE:
        return (Order("2 per channel", "own tokens"), Order("2 per channel", "1 per channel"))
    if setting == "w8a8":
        return (Order("smoothquant", "rtn"),)
    if _is_rounding(setting) and not isinstance(_scheme(setting), Int):
        best = method_for(_scheme(setting), "gptq")
        return () if best == "rtn" else (Order(best, "rtn", strict=True),)
    if _is_rounding(setting):
        learned = (Order("signround", "gptq", strict=True),) if setting.startswith(("w2", "w3")) else ()
        return (Order("awq", "rtn"), Order("gptq", "rtn", strict=True), *learned)
    if "+" in setting:
        return (Order(JOINT, AFTERWARDS),)
    ladder = ("svd-llm", "asvd", "svd") if setting.startswith("rank") else ("sparsegpt", "wanda", "magnitude")
    return tuple(Order(better, worse) for better, worse in pairwise(ladder))


def stages_of(setting: str, method: str) -> tuple[Stage, ...]:
    """The stages of one trial.

    Raises:
        RecipeError: a setting or method that does not exist.
    """
    if setting.endswith(FINISH):
        return (*stages_of(setting.removesuffix(FINISH), method), FinishStage())
    if setting == RECIPES:
        return load_recipe(method).stages
    if setting == COVERAGE:
        return (QuantizeStage("gptq", Int(3, 64)),)
    if "+" in setting:
        pattern, _, scheme = setting.partition("+")
        pruning, _, rounding = method.partition("+")
        return (*stages_of(pattern, pruning), *stages_of(scheme, rounding))
    if setting == "w8a8":
        return (QuantizeStage(method, Int(8, None, activations=Activations.INT8)),)
    try:
        return (_stage(setting, method),)
    except ValueError as error:
        raise RecipeError(f"setting {setting!r} means nothing: {error}", f"Settings: {', '.join(SETTINGS)}") from error


def is_search(setting: str) -> bool:
    """Whether a setting is a size in bits per weight, for which a search chooses the form of each layer."""
    return setting.startswith(SEARCH)


def searched_stages(
    model: Path, setting: str, method: str, calibration: CalibrationOptions, seed: int, known: Path, **options: Any
) -> tuple[Stage, ...]:
    """The stages that a search finds.

    Args:
        known: file of sensitivities, which searches for other sizes read and continue.
        options: of the request, such as `devices` and `dtype`.
    """
    from compress.pipeline.prepare import RunRequest
    from compress.search.run import Files, find
    from compress.search.survey import survey

    goal, candidates = Goal(_size(setting)), parse_candidates(CANDIDATES[method])
    request = SearchRequest(goal, candidates, calibration=calibration, seed=seed)
    run = RunRequest(model, str(model), request.probe(), known.with_suffix(""), measure=False, **options)
    findings = find(survey(request, run), Files(known, known.with_suffix(".yaml"), ""), quiet=True)
    stages = request.recipe(findings.first_choice().candidates).stages
    return (*stages, FinishStage()) if setting.endswith(FINISH) else stages


def _size(setting: str) -> float:
    """Bits per weight of the setting of a search."""
    return float(setting.removeprefix(SEARCH).removesuffix(FINISH))


def _is_rounding(setting: str) -> bool:
    """Whether a setting is one form for all weights, written as a candidate of a search."""
    return setting in targets() or setting.startswith("w")


def _scheme(setting: str) -> Scheme:
    if setting in targets():
        return targets()[setting].target()
    scheme = parse_candidates(f"{setting},{DENSE}")[0].scheme
    if scheme is None:
        raise ValueError("it has no width")
    return scheme


def _refusal(setting: str, method: str) -> str:
    """Why a method makes no weights of a form; empty where it does."""
    return QUANTIZATION.find(method).unsupported(_scheme(setting))


def _stage(setting: str, method: str) -> Stage:
    if _is_rounding(setting):
        return QuantizeStage(method, _scheme(setting))
    if setting.startswith("rank"):
        return FactorizeStage(method, float(setting.removeprefix("rank")), allocation="uniform")
    if setting.endswith("%"):
        return PruneStage(method, sparsity=float(setting.removesuffix("%")) / 100)
    kept, _, of = setting.partition(":")
    return PruneStage(method, NMSparsity(int(kept), int(of)))


@dataclass(frozen=True)
class Trial:
    """One compressed model on one text.

    Attributes:
        losses: `[windows]`, mean loss of each window, in nats per token.
        cost: of the compression; that of a search is not included.
    """

    model: str
    setting: str
    method: str
    seed: int
    text: str
    figures: Evaluation
    losses: Tensor
    cost: Cost

    def __str__(self) -> str:
        return (
            f"{self.model} {self.setting} {self.method} seed {self.seed} {self.text}: "
            f"KL {self.figures.kl_mean:.5f}, 99.9 % {self.figures.kl_p999:.3f}, "
            f"perplexity {self.figures.perplexity:.3f}, {self.cost.seconds:.1f} s"
        )

    def to_dict(self) -> dict[str, Any]:
        trial = {name: getattr(self, name) for name in ("model", "setting", "method", "seed", "text")}
        cost = {name: getattr(self.cost, name) for name in ("seconds", "bits_per_weight", "total_bytes")}
        return trial | cost | {"peak_bytes": self.cost.peak_host_bytes} | self.figures.to_dict()


@dataclass(frozen=True)
class Verdict:
    """Whether a promised order holds at one setting on one text.

    Attributes:
        order: what is promised, `better < worse` or `better <= worse`.
        kl_ratio: KL of the better method, mean over seeds, over that of the worse.
        seeds_better, seeds: in how many calibration seeds its KL is below the other's mean.
        loss_change: its mean loss minus the other's, in nats per token, on the same windows; negative is better.
        loss_error: standard error of `loss_change` over windows.
        holds: whether the order holds in KL and in perplexity. `tie` marks a broken order of perplexity that is within
            two standard errors.
    """

    model: str
    setting: str
    text: str
    order: str
    kl_ratio: float
    seeds_better: int
    seeds: int
    loss_change: float
    loss_error: float
    holds: bool

    @property
    def word(self) -> str:
        if self.holds:
            return "holds"
        return "tie" if self.kl_ratio <= 1 and 0 < self.loss_change <= 2 * self.loss_error else "BROKEN"

    def __str__(self) -> str:
        return (
            f"{self.word:6} {self.model} {self.setting} on {self.text}: {self.order}, "
            f"KL {100 * (self.kl_ratio - 1):+.1f} % ({self.seeds_better}/{self.seeds} seeds), "
            f"perplexity {100 * self.loss_change:+.2f} +- {100 * self.loss_error:.2f} %"
        )


def judge(trials: Sequence[Trial]) -> list[Verdict]:
    """A verdict for every model, setting, text and promised order whose methods were both tried. A search must be
    better than each setting of one form for all weights that is within its size."""
    tried: dict[tuple[str, str], dict[tuple[str, str], list[Trial]]] = {}
    for trial in trials:
        of_text = tried.setdefault((trial.model, trial.text), {})
        of_text.setdefault((trial.setting, trial.method), []).append(trial)
    return [
        _compare(order, found[setting, order.better], worse)
        for found in tried.values()
        for setting in dict.fromkeys(setting for setting, _ in found)
        for order, worse in _promised(setting, found)
        if (setting, order.better) in found
    ]


def _promised(
    setting: str, found: Mapping[tuple[str, str], Sequence[Trial]]
) -> Iterator[tuple[Order, Sequence[Trial]]]:
    """Yields the orders of a setting with the trials of the worse one."""
    for order in orders_of(setting):
        if trials := found.get((setting, order.worse)):
            yield order, trials
    if not is_search(setting):
        return
    for (other, method), trials in found.items():
        if not is_search(other) and (trials[0].cost.bits_per_weight or 0) <= _size(setting):
            yield from ((Order(each, f"{other} {method}", strict=True), trials) for each in CANDIDATES)


def _compare(order: Order, better: Sequence[Trial], worse: Sequence[Trial]) -> Verdict:
    other = statistics.mean(trial.figures.kl_mean for trial in worse)
    ratio = statistics.mean(trial.figures.kl_mean for trial in better) / other
    wins = sum(trial.figures.kl_mean < other for trial in better)
    change = _mean_losses(better) - _mean_losses(worse)
    mean, error = change.mean().item(), (change.std() / len(change) ** 0.5).item() if len(change) > 1 else 0.0
    holds = ratio < 1 and mean < 0 if order.strict else ratio <= 1 and mean <= 0
    first = better[0]
    return Verdict(first.model, first.setting, first.text, str(order), ratio, wins, len(better), mean, error, holds)


def _mean_losses(trials: Sequence[Trial]) -> Tensor:
    return torch.stack([trial.losses for trial in trials]).mean(0)


def table_rows(trials: Sequence[Trial]) -> list[Row]:
    """One row for each model, text, setting and method: means over calibration seeds."""
    rows: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.model, trial.text, trial.setting, trial.method), []).append(trial)
    return [_row(rows[key]) for key in sorted(rows, key=lambda key: key[:2])]


def _row(trials: Sequence[Trial]) -> Row:
    first = trials[0]
    figures = [trial.figures for trial in trials]
    perplexity = statistics.mean(each.perplexity for each in figures)
    return {
        "model": first.model,
        "text": first.text,
        "setting": first.setting,
        "method": first.method,
        "seeds": str(len(trials)),
        "KL mean": f"{statistics.mean(each.kl_mean for each in figures):.5f}",
        "+- text": f"{statistics.mean(each.kl_standard_error or 0.0 for each in figures):.5f}",
        "+- seeds": _spread([each.kl_mean for each in figures], 5),
        "KL 99.9 %": f"{statistics.mean(each.kl_p999 for each in figures):.3f}",
        "perplexity": f"{perplexity:.3f}",
        "dense": f"{figures[0].baseline_perplexity:.3f}",
        "change": f"{100 * (perplexity / figures[0].baseline_perplexity - 1):+.2f} %",
        "bits/weight": f"{first.cost.bits_per_weight:.3f}",
        "MB": f"{first.cost.total_bytes / 1e6:.2f}",
        "seconds": f"{statistics.mean(trial.cost.seconds for trial in trials):.1f}",
        "peak MB": f"{max(trial.cost.peak_host_bytes for trial in trials) / 1e6:,.0f}",
    }


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.stdev(values):.{digits}f}" if len(values) > 1 else "-"
