"""Rules, cascades and the file that declares them."""

import json
import re
from pathlib import Path

import pytest

from compress.common.errors import ToolkitError
from runtime.routing.classifier import NUM_FEATURES
from runtime.routing.route_file import read_routes
from runtime.routing.routes import Cascade, Confidence, Query, Route, Rule

MODELS = ("small", "large")
FILE = """
auto:
  rules:
    - {model: large, tools: true}
    - {model: large, prompt_at_least: 100, answer_below: 50}
    - {model: small, text: "(?i)translate"}
    - {model: large, json: true}
  cascade: {small: small, large: large, threshold: -0.5}
cheap:
  otherwise: small
"""


@pytest.fixture
def auto(tmp_path: Path) -> Route:
    (tmp_path / "routes.yaml").write_text(FILE)
    return read_routes(tmp_path / "routes.yaml", MODELS)["auto"]


@pytest.mark.parametrize(
    ("query", "choice"),
    [
        (Query(has_tools=True, text="translate"), "large"),
        (Query(num_prompt_tokens=100, max_tokens=49), "large"),
        (Query("Translate this", 100, 50), "small"),
        (Query("Translate this", 100), "small"),
        (Query("Translate this", has_json=True), "small"),
        (Query("Who", has_json=True), "large"),
        (Query("Who", 99, 49), Cascade("small", "large", -0.5)),
    ],
)
def test_the_first_rule_that_matches_chooses(auto: Route, query: Query, choice: str | Cascade) -> None:
    assert auto.choose(query) == choice
    assert auto.reads_length
    assert set(auto.models) == set(MODELS)


def test_a_limit_of_answers_needs_one() -> None:
    for rule in (Rule(model="a", answer_at_least=1), Rule(model="a", answer_below=10**9)):
        assert not rule.matches(Query())
    assert Rule(model="a", answer_at_least=5, answer_below=6).matches(Query(max_tokens=5))


def test_rules_of_what_is_absent() -> None:
    rule = Rule(model="a", tools=False, text=re.compile("^x"))
    assert rule.matches(Query("xy"))
    assert not rule.matches(Query("xy", has_tools=True))
    assert not rule.matches(Query("yx"))


def test_the_first_tokens_of_each_answer_decide() -> None:
    found = Confidence(Cascade("small", "large", -1.0, tokens=2), num_answers=2)
    found.note(0, [-0.5], False)
    found.note(1, [-2.0], True)
    assert not found.is_decided
    found.note(0, [-0.5, -9.0], False)
    assert found.is_decided
    assert (found.mean, found.is_high) == (-2.0, False)


def test_all_tokens_decide_and_the_threshold_itself_is_enough() -> None:
    found = Confidence(Cascade("small", "large", -1.0, tokens=0), num_answers=1)
    for _ in range(50):
        found.note(0, [-1.0], False)
    assert not found.is_decided
    found.note(0, [], True)
    assert found.is_decided
    assert found.is_high
    empty = Confidence(Cascade("small", "large", -1.0), num_answers=1)
    empty.note(0, [], True)
    assert empty.is_decided
    assert empty.is_high


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no virtual model"),
        ("[]", "not a mapping"),
        ("auto: {otherwise: medium}", "'medium', which is not served.*large"),
        ("small: {otherwise: small}", "named as a served model"),
        ("auto: {rules: []}", "either otherwise or cascade"),
        ("auto: {otherwise: small, cascade: {}}", "either otherwise or cascade"),
        ("auto: {cascade: {small: small, large: large}}", "threshold is missing"),
        ("auto: {cascade: {small: small, large: large, threshold: 0.5}}", "mean log-probability"),
        ("auto: {cascade: {small: small, large: large, threshold: nan}}", "mean log-probability"),
        ("auto: {rules: {}, otherwise: small}", "not a list"),
        ("auto: {rules: [{model: small, prompt: 3}], otherwise: small}", "unknown field 'prompt'"),
        ("auto: {cascade: {}, classifier: {}}", "either otherwise or cascade, or classifier"),
        (
            "auto: {classifier: {small: small, large: large, most_kl: 1, predictor: none.json}}",
            "none.json does not exist",
        ),
        ("auto: {classifier: {small: small, large: large, most_kl: low}}", "predictor is missing"),
        ("auto: {rules: [{prompt_below: 3}], otherwise: small}", "model is missing"),
        ("auto: {rules: [{model: small, prompt_below: few}], otherwise: small}", "'few'.*whole number"),
        ("auto: {rules: [{model: small, tools: maybe}], otherwise: small}", "true or false"),
        ("auto: {rules: [{model: small, text: '('}], otherwise: small}", "not a regular expression"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text(text)
    with pytest.raises(ToolkitError, match=problem) as error:
        read_routes(file, MODELS)
    assert str(file) in str(error.value)


def test_a_file_of_a_classifier_is_checked(tmp_path: Path) -> None:
    file, weights = tmp_path / "routes.yaml", tmp_path / "router.json"
    text = f"auto: {{classifier: {{small: small, large: large, predictor: {weights}, most_kl: MOST}}}}"
    file.write_text(text.replace("MOST", "0.5"))
    for wrong in ("[]", '{"bias": 0, "weights": [1]}', '{"bias": "x", "weights": 3}'):
        weights.write_text(wrong)
        with pytest.raises(ToolkitError, match="4096 weights"):
            read_routes(file, MODELS)
    weights.write_text(json.dumps({"bias": 0.25, "weights": [0.0] * NUM_FEATURES}))
    route = read_routes(file, MODELS)["auto"]
    assert route.choose(Query("any")) == "small"
    assert set(route.models) == set(MODELS)
    file.write_text(text.replace("MOST", "low"))
    with pytest.raises(ToolkitError, match=r"'low'.*KL divergence"):
        read_routes(file, MODELS)
