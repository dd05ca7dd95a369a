"""The script that learns a classifier writes a file that a route reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from compress.common.cli import draft_model_path
from runtime.routing.classifier import Classifier
from runtime.routing.route_file import read_routes

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_a_classifier_is_learned_and_read(tmp_path: Path) -> None:
    out = tmp_path / "router.json"
    script = [sys.executable, str(ROOT / "scripts/train_router.py"), str(draft_model_path()), "demo"]
    done = subprocess.run(
        [*script, "--prompts", "40", "--tokens", "4", "--output", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("%") == 3
    route = tmp_path / "route.yaml"
    route.write_text(f"auto:\n  classifier: {{small: a, large: b, predictor: {out}, most_kl: 0.5}}\n")
    classifier = read_routes(route, ["a", "b"])["auto"].otherwise
    assert isinstance(classifier, Classifier)
    assert classifier.choose("the text of a prompt") in ("a", "b")
