"""What a search was, in the report of the checkpoint it made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compress.checkpoint.config import REPORT_FILE
from compress.checkpoint.disk import atomic_file, sync
from compress.checkpoint.errors import CheckpointError
from compress.checkpoint.verify import verify_structure
from compress.pipeline.run import RunResult
from compress.recipe import Recipe
from compress.search.choose import Choice
from compress.search.sensitivities import Sensitivities
from compress.search.survey import Survey
from compress.search.tries import Try


def record(survey: Survey, known: Sensitivities, choice: Choice, tries: Sequence[Try]) -> dict[str, Any]:
    """The `search` section of a report, JSON-able."""
    return {
        "request": survey.request.to_dict(),
        "target": str(survey.request.goal),
        "measured_tokens": survey.measured.numel(),
        "predicted": choice.predicted,
        "units": [
            {
                "modules": list(unit.modules),
                "chosen": str(form),
                "sensitivity": {str(each): known.of(unit, each) for each in survey.menus[unit]},
            }
            for unit, form in choice.forms.items()
        ],
        "tries": [asdict(each) for each in tries],
    }


def put_in_place(result: RunResult, out: Path, search: dict[str, Any]) -> RunResult:
    """Adds the search to the report of a finished checkpoint, and moves the checkpoint to `out`."""
    report = result.report | {"search": search}
    report["structure"] = report["structure"] | {"path": str(out)}
    with atomic_file(result.out / REPORT_FILE) as stream:
        stream.write((json.dumps(report, indent=2) + "\n").encode())
    if result.out != out:
        result.out.rename(out)
        sync(out.parent)
    return replace(result, out=out, report=report)


def made_before(folder: Path, recipe: Recipe) -> RunResult | None:
    """The checkpoint that an interrupted search made of this recipe. One of another recipe is removed: the folder is
    the search's own, for it holds a report.

    Raises:
        CheckpointError: there is such a folder, but no report in it, or it does not verify.
    """
    if not folder.exists():
        return None
    try:
        report = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
        same = report["recipe"] == json.loads(json.dumps(recipe.to_dict()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is no checkpoint of a search", "Remove it, or choose another --out") from error
    if not same:
        shutil.rmtree(folder)
        return None
    structure = verify_structure(folder)
    if structure.problems:
        raise CheckpointError(f"{folder} does not verify: {structure.problems[0]}", "Remove it and search again")
    return RunResult(folder, structure, report["quality"], report)
