"""Choice between two models by n-grams of the prompt."""

import math

import pytest

from runtime.routing.classifier import LAST_CHARACTERS, NUM_FEATURES, Classifier, Predictor, read_features
from runtime.routing.routes import Query, Route, Rule


def predictor_of(easy: str, hard: str) -> Predictor:
    """Predicts more for texts like one than for texts like the other."""
    weights = [0.0] * NUM_FEATURES
    for text, sign in ((easy, -1), (hard, 1)):
        for number, value in read_features(text).items():
            weights[number] += sign * value
    return Predictor(0.5, tuple(weights))


@pytest.mark.parametrize("text", ["a", "The river, the town.", "\ud800 unpaired", "x" * 5000])
def test_features_have_a_norm_of_one(text: str) -> None:
    features = read_features(text)
    assert math.isclose(sum(value**2 for value in features.values()), 1)
    assert all(0 <= number < NUM_FEATURES for number in features)
    assert features == read_features("before " * 300 + text[-LAST_CHARACTERS:]) or len(text) < LAST_CHARACTERS


def test_an_empty_prompt_has_no_features_and_gets_the_bias() -> None:
    assert read_features("") == {}
    assert predictor_of("a", "b").predict("") == 0.5


def test_the_text_chooses_after_the_rules() -> None:
    predictor = predictor_of("def f(x): return x", "The old king rode home")
    route = Route((Rule(model="large", tools=True),), Classifier("small", "large", predictor, 0.5))
    assert route.choose(Query("def g(y): return y")) == "small"
    assert route.choose(Query("The king rode to the old town")) == "large"
    assert route.choose(Query("def g(y): return y", has_tools=True)) == "large"
    assert list(route.models) == ["large", "small", "large"]
