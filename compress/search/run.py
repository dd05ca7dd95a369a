"""Search run: measures, chooses, writes the recipe and runs it; for a KL target, repeats until it is met."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.checkpoint.verify import verify_structure
from compress.common.errors import CheckpointError, RecipeError, ToolkitError
from compress.common.evaluation import MEASURED_KEY
from compress.common.files import REPORT_FILE, atomic_file, check_file, check_target, read_json, sync
from compress.pipeline.prepare import prepare
from compress.pipeline.quality import measure_asked
from compress.pipeline.resume import RunDisplay
from compress.pipeline.run import RunResult, run
from compress.recipe import CalibrationOptions, Recipe
from compress.search.allocate import Choice, Chooser, Sensitivities, Try, best, next_kl_target
from compress.search.measure import identity, measure
from compress.search.survey import Survey


def record(survey: Survey, known: Sensitivities, choice: Choice, tries: Sequence[Try]) -> dict[str, Any]:
    """Returns the `search` section of a report as JSON values."""
    return {
        "request": survey.request.to_dict(),
        "target": str(survey.request.goal),
        "measured_tokens": survey.measured.numel(),
        "predicted": choice.predicted,
        "units": [
            {
                "modules": list(group.modules),
                "chosen": str(candidate),
                "sensitivity": {str(each): known.of(group, each) for each in survey.candidates[group]},
            }
            for group, candidate in choice.candidates.items()
        ],
        "tries": [asdict(each) for each in tries],
    }


def put_in_place(result: RunResult, out: Path, found: dict[str, Any]) -> RunResult:
    """Adds what a search found to the report of a finished checkpoint, and moves the checkpoint to `out`."""
    report = result.report | found
    report["structure"] = report["structure"] | {"path": str(out)}
    with atomic_file(result.out / REPORT_FILE) as stream:
        stream.write((json.dumps(report, indent=2) + "\n").encode())
    if result.out != out:
        result.out.rename(out)
        sync(out.parent)
    return replace(result, out=out, report=report)


def made_before(folder: Path, recipe: Recipe) -> RunResult | None:
    """Returns the checkpoint that an interrupted search created with this recipe. A checkpoint of another recipe is
    removed: a folder with a report belongs to the search. Raises CheckpointError: the folder has no report, or does not
    verify."""
    if not folder.exists():
        return None
    try:
        report = read_json(folder / REPORT_FILE)
        same = json.dumps(report["recipe"]) == json.dumps(recipe.to_dict())
    except (OSError, CheckpointError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint of a search", "Remove it, or choose another --out"
        ) from error
    if not same:
        shutil.rmtree(folder)
        return None
    structure = verify_structure(folder)
    if structure.problems:
        raise CheckpointError(f"{folder} does not verify: {structure.problems[0]}", "Remove it and search again")
    return RunResult(folder, structure, report["quality"], report)


HEADER = "# Found by compress search."
SECONDS_BETWEEN_LINES = 10.0


def write_recipe(path: Path, recipe: Recipe, remarks: Sequence[str]) -> None:
    """Writes a recipe; may replace only recipes of a search. Raises CheckpointError for other files."""
    check_recipe_file(path)
    with atomic_file(path) as stream:
        stream.write(recipe_text(recipe, remarks).encode())


def check_recipe_file(path: Path) -> None:
    """Raises CheckpointError for anything but an older recipe of a search."""
    check_file(path)
    if path.exists() and not path.read_bytes().startswith(HEADER.encode()):
        raise CheckpointError(f"{path} exists and is not a recipe of a search", "Name another file with --recipe")


def recipe_text(recipe: Recipe, remarks: Sequence[str]) -> str:
    """Renders the recipe of a search as YAML, with leading comments."""
    import yaml

    document = {
        "name": recipe.name,
        "seed": recipe.seed,
        "calibration": _calibration(recipe.calibration),
        "stages": [{each.name: each.to_keys()} for each in recipe.stages],
    }
    lines = [HEADER, *(f"# {remark}" for remark in remarks)]
    return "\n".join(lines) + "\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def _calibration(options: CalibrationOptions) -> dict[str, Any]:
    source = options.source if isinstance(options.source, str) else list(map(asdict, options.source))
    return {"source": source, "num_calibration_samples": options.samples, "max_seq_length": options.length}


@dataclass(frozen=True, slots=True)
class Files:
    """Files of a search other than the checkpoint."""

    sensitivities: Path
    recipe: Path
    command: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Search with all sensitivities measured."""

    survey: Survey
    known: Sensitivities
    chooser: Chooser

    def first_choice(self) -> Choice:
        """Returns the choice for a size target; for a KL target, the choice if predictions were exact. Raises
        RecipeError: the size cannot be reached."""
        goal = self.survey.request.goal
        if goal.kl is None:
            return self.chooser.within_budget(self.survey.budget(goal))
        return self.chooser.within_loss(goal.kl)


def find(survey: Survey, files: Files, quiet: bool = False) -> Findings:
    """Measures the sensitivities that are not on disk. Raises ToolkitError: as `compress.search.measure.measure`; the
    file belongs to another model, text or method; or the recipe file exists and is not of a search; or one of both
    cannot be written."""
    check_recipe_file(files.recipe)
    check_target(files.recipe)
    check_target(files.sensitivities)
    check_file(files.sensitivities)
    known = Sensitivities.open(files.sensitivities, identity(survey), survey.run.restart)
    done = sum(
        known.get(group, candidate) is not None for group, offered in survey.candidates.items() for candidate in offered
    )
    with RunDisplay(survey.measurements, done, quiet, "measurement", SECONDS_BETWEEN_LINES) as display:
        if done:
            display.say(f"{done} of {survey.measurements} sensitivities are in {known.path} already")
        measure(survey, known, display)
    return Findings(survey, known, Chooser(survey.candidates, survey.cost, known.of))


def write_choice(findings: Findings, choice: Choice, files: Files, kl: float | None = None) -> Recipe:
    """Writes the recipe of a choice. Raises CheckpointError if another file exists. `kl`: measured KL of the finished
    checkpoint; None before it exists."""
    survey = findings.survey
    recipe = survey.request.recipe(choice.candidates)
    finished = " after finishing" if survey.request.finish else ""
    remarks = [
        f"  {files.command}",
        f"Target: {survey.request.goal}. {survey.bits_per_weight(choice.cost):.3f} bits per weight in these layers, "
        f"at most {(choice.cost + survey.fixed_bytes) / 1e6:,.2f} MB in all.",
        f"Sensitivities add up to KL {choice.predicted:.4f}"
        + (f"; the checkpoint has {kl:.4f}{finished}." if kl is not None else "."),
    ]
    write_recipe(files.recipe, recipe, remarks)
    return recipe


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a search: its checkpoint, the choice, and the checkpoints tried before."""

    run: RunResult
    choice: Choice
    tries: tuple[Try, ...]


def carry_out(findings: Findings, files: Files, quiet: bool = False) -> Outcome:
    """Creates the verified and evaluated checkpoint, and its recipe. Raises ToolkitError: as
    `compress.pipeline.run.run`; or no trial reaches the KL target."""
    choice = findings.first_choice()
    write_choice(findings, choice, files)
    tries: list[Try] = []
    if findings.survey.request.goal.kl is None:
        result = _make(findings, choice, findings.survey.run.out, quiet)
    else:
        choice, result = _meet(findings, findings.survey.request.goal.kl, tries, quiet)
    write_choice(findings, choice, files, result.quality.get("kl_mean"))
    found = {
        "search": record(findings.survey, findings.known, choice, tries),
        MEASURED_KEY: measure_asked(result.out, findings.survey.context, quiet),
    }
    return Outcome(put_in_place(result, findings.survey.run.out, found), choice, tuple(tries))


def _meet(findings: Findings, limit: float, tries: list[Try], quiet: bool) -> tuple[Choice, RunResult]:
    """Creates checkpoints until one is close enough to the KL target. Keeps the smallest within the limit and removes
    the others."""
    made: list[tuple[Choice, RunResult]] = []
    allowed = next_kl_target(tries, limit)
    while allowed is not None and len(tries) < findings.survey.request.tries:
        choice = findings.chooser.within_loss(allowed)
        if any(choice.candidates == other.candidates for other, _ in made):
            break
        out = findings.survey.run.out
        result = _make(findings, choice, out.with_name(f"{out.name}.try{len(tries) + 1}"), quiet)
        made.append((choice, result))
        tries.append(Try(choice.predicted, _measured(result), result.structure.total_bytes))
        if not quiet:
            _say(tries, limit)
        allowed = next_kl_target(tries, limit)
    kept = best(tries, limit)
    chosen = None if kept is None else made[tries.index(kept)]
    for each in made:
        if each is not chosen:
            shutil.rmtree(each[1].out)
    if chosen is None:
        raise _unmet(findings, tries, limit)
    return chosen


def _make(findings: Findings, choice: Choice, out: Path, quiet: bool) -> RunResult:
    """Runs the recipe of a choice, unless an interrupted search already did. Figures of a gate are measured once, at
    the end."""
    request = replace(findings.survey.run, figures=())
    recipe = findings.survey.request.recipe(choice.candidates)
    if before := made_before(out, recipe):
        return before
    return run(prepare(replace(request, recipe=recipe, out=out)), quiet)


def _measured(result: RunResult) -> float:
    if "kl_mean" not in result.quality:
        reason = result.quality.get("not_measured", "no reason was recorded")
        raise ToolkitError(f"{result.out} was not measured ({reason})", "Use --target-size or --target-bpw instead")
    return float(result.quality["kl_mean"])


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
    widest = max(findings.survey.request.candidates, key=lambda candidate: candidate.bits_per_weight)
    return RecipeError(
        f"no checkpoint of {len(tries)} tries has KL {limit:g} or less: the best has {least.measured:.4g} with "
        f"{least.bytes / 1e6:,.2f} MB",
        f"Use --max-kl {least.measured * 1.05:.2g}"
        + (", or more --tries" if exhausted else f", or a candidate better than {widest} in --candidates"),
    )
