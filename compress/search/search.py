"""The search itself: measure, choose, write the recipe, run it, and where the target is a quality, try again."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from compress.checkpoint.errors import RecipeError, ToolkitError
from compress.pipeline.prepare import prepare
from compress.pipeline.progress import RunDisplay
from compress.pipeline.run import RunResult, run
from compress.recipe import Recipe
from compress.search.choose import Choice, Chooser
from compress.search.measure import identity, measure
from compress.search.recipe_text import write_recipe
from compress.search.record import made_before, put_in_place, record
from compress.search.sensitivities import Sensitivities
from compress.search.survey import Survey
from compress.search.tries import Try, best, next_allowed


@dataclass(frozen=True, slots=True)
class Files:
    """Where a search writes, beside the checkpoint.

    Attributes:
        sensitivities: every figure as soon as it is measured.
        recipe: what was found.
        command: how the user asked for it, for the recipe's remarks.
    """

    sensitivities: Path
    recipe: Path
    command: str


@dataclass(frozen=True, slots=True)
class Findings:
    """A search whose sensitivities are known."""

    survey: Survey
    known: Sensitivities
    chooser: Chooser

    def first_choice(self) -> Choice:
        """What a target of size asks for; of a target of quality, what it would ask for if predictions were exact.

        Raises:
            RecipeError: a size that cannot be reached.
        """
        goal = self.survey.request.goal
        if goal.kl is None:
            return self.chooser.within_budget(self.survey.budget(goal))
        return self.chooser.within_loss(goal.kl)


def find(survey: Survey, files: Files, quiet: bool = False) -> Findings:
    """Measures the sensitivities that are not on disk yet.

    Raises:
        ToolkitError: as `compress.search.measure.measure`; what is on disk is of another model, text or method.
    """
    known = Sensitivities.open(files.sensitivities, identity(survey), survey.run.restart)
    done = sum(known.get(unit, form) is not None for unit, menu in survey.menus.items() for form in menu)
    with RunDisplay(survey.measurements, done, quiet, "measurement") as display:
        if done:
            display.say(f"{done} of {survey.measurements} sensitivities are in {known.path} already")
        measure(survey, known, display)
    return Findings(survey, known, Chooser(survey.menus, survey.cost, known.of))


def write_choice(findings: Findings, choice: Choice, files: Files, kl: float | None = None) -> Recipe:
    """Writes the recipe that a choice means. Raises CheckpointError where somebody's own file stands there.

    Args:
        kl: what the finished checkpoint was measured with; None before there is one.
    """
    survey = findings.survey
    recipe = survey.request.recipe(choice.forms)
    remarks = [
        f"  {files.command}",
        f"Target: {survey.request.goal}. {survey.bits_per_weight(choice.cost):.3f} bits per weight in these layers, "
        f"at most {(choice.cost + survey.fixed_bytes) / 1e6:,.2f} MB in all.",
        f"Sensitivities add up to KL {choice.predicted:.4f}"
        + (f"; the checkpoint has {kl:.4f}." if kl is not None else "."),
    ]
    write_recipe(files.recipe, recipe, remarks)
    return recipe


def carry_out(findings: Findings, files: Files, quiet: bool = False) -> RunResult:
    """Makes the checkpoint, verified and measured, and the recipe of it.

    Raises:
        ToolkitError: as `compress.pipeline.run.run`; a target of quality that no try kept.
    """
    choice = findings.first_choice()
    write_choice(findings, choice, files)
    tries: list[Try] = []
    if findings.survey.request.goal.kl is None:
        result = _make(findings, choice, findings.survey.run.out, quiet)
    else:
        choice, result = _meet(findings, findings.survey.request.goal.kl, tries, quiet)
    write_choice(findings, choice, files, result.quality.get("kl_mean"))
    return put_in_place(result, findings.survey.run.out, record(findings.survey, findings.known, choice, tries))


def _meet(findings: Findings, limit: float, tries: list[Try], quiet: bool) -> tuple[Choice, RunResult]:
    """Makes checkpoints until the smallest that keeps the limit is found closely enough. The others are removed, and
    all of them when none keeps it: a changed goal begins anew."""
    made: list[tuple[Choice, RunResult]] = []
    allowed = next_allowed(tries, limit)
    while allowed is not None and len(tries) < findings.survey.request.tries:
        choice = findings.chooser.within_loss(allowed)
        if any(choice.forms == other.forms for other, _ in made):
            break
        out = findings.survey.run.out
        result = _make(findings, choice, out.with_name(f"{out.name}.try{len(tries) + 1}"), quiet)
        made.append((choice, result))
        tries.append(Try(choice.predicted, _measured(result), result.structure.total_bytes))
        if not quiet:
            _say(tries, limit)
        allowed = next_allowed(tries, limit)
    kept = best(tries, limit)
    chosen = None if kept is None else made[tries.index(kept)]
    for each in made:
        if each is not chosen:
            shutil.rmtree(each[1].out)
    if chosen is None:
        raise _unmet(findings, tries, limit)
    return chosen


def _make(findings: Findings, choice: Choice, out: Path, quiet: bool) -> RunResult:
    """Runs the recipe of a choice, unless an interrupted search has done so."""
    request = findings.survey.run
    recipe = findings.survey.request.recipe(choice.forms)
    if before := made_before(out, recipe):
        return before
    return run(prepare(replace(request, recipe=recipe, out=out)), quiet)


def _measured(result: RunResult) -> float:
    if "kl_mean" not in result.quality:
        reason = result.quality.get("not_measured", "no reason was recorded")
        raise ToolkitError(f"{result.out} was not measured ({reason})", "Use --target-size or --target-bpw instead")
    return result.quality["kl_mean"]


def _say(tries: list[Try], limit: float) -> None:
    last = tries[-1]
    verdict = "kept" if last.measured <= limit else "exceeded"
    with RunDisplay(1) as display:
        display.say(
            f"try {len(tries)}: predicted KL {last.predicted:.4f}, measured {last.measured:.4f}, "
            f"{last.bytes / 1e6:,.2f} MB: {limit:g} is {verdict}"
        )


def _unmet(findings: Findings, tries: list[Try], limit: float) -> RecipeError:
    least = min(tries, key=lambda each: each.measured)
    exhausted = len(tries) == findings.survey.request.tries
    widest = max(findings.survey.request.menu, key=lambda form: form.bits_per_weight)
    return RecipeError(
        f"no checkpoint of {len(tries)} tries has KL {limit:g} or less: the best has {least.measured:.4g} with "
        f"{least.bytes / 1e6:,.2f} MB",
        f"Use --max-kl {least.measured * 1.05:.2g}"
        + (", or more --tries" if exhausted else f", or something better than {widest} in --menu"),
    )
