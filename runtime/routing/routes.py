"""Virtual models: rules that choose a served model for a request, and cascades from a small model to a large one, or a
classifier between both.

A cascade defers by the mean log-probability of the small model's tokens: the rule Chow-Average of N. Gupta et al.,
"Language model cascades: token-level uncertainty and beyond" (2024). No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from runtime.routing.classifier import Classifier


@dataclass(frozen=True, slots=True)
class Query:
    """Facts of a request that rules look at.

    Attributes:
        num_prompt_tokens: tokens of the texts of the prompt.
        max_tokens: limit on the answer; None if the request names none.
        has_tools: whether the request offers tools.
        has_json: whether the answer is to be JSON.
    """

    text: str = ""
    num_prompt_tokens: int = 0
    max_tokens: int | None = None
    has_tools: bool = False
    has_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Conditions under which a model answers; all that are given must hold.

    Attributes:
        prompt_at_least, prompt_below: tokens of the prompt.
        answer_at_least, answer_below: tokens to which the request limits the answer; neither holds without a limit.
        text: regular expression that is searched in the prompt.
        tools, json: whether the request offers tools, or asks for JSON.
    """

    model: str
    prompt_at_least: int | None = None
    prompt_below: int | None = None
    answer_at_least: int | None = None
    answer_below: int | None = None
    text: re.Pattern[str] | None = None
    tools: bool | None = None
    json: bool | None = None

    def matches(self, query: Query) -> bool:
        """Returns whether all conditions hold."""
        return (
            is_within(query.num_prompt_tokens, self.prompt_at_least, self.prompt_below)
            and is_within(query.max_tokens, self.answer_at_least, self.answer_below)
            and self.tools in (None, query.has_tools)
            and self.json in (None, query.has_json)
            and (self.text is None or self.text.search(query.text) is not None)
        )


def is_within(number: int | None, least: int | None, below: int | None) -> bool:
    """Returns whether a number is in a range; without a number, whether nothing is asked for."""
    if number is None:
        return least is None and below is None
    return (least is None or number >= least) and (below is None or number < below)


@dataclass(frozen=True, slots=True)
class Cascade:
    """A small model that answers first, and a large one that takes over where the small one is not confident.

    Attributes:
        threshold: least mean log-probability, in nats, of the tokens of an answer that the small model keeps.
        tokens: first tokens of the answer that decide; 0 for all of them.
    """

    small: str
    large: str
    threshold: float
    tokens: int = 16


@dataclass(frozen=True, slots=True)
class Route:
    """A virtual model.

    Attributes:
        rules: the first one that matches chooses.
        otherwise: model, cascade, or classifier, of requests that no rule matches.
    """

    rules: tuple[Rule, ...]
    otherwise: str | Cascade | Classifier

    @property
    def models(self) -> Iterator[str]:
        """Names of the models that it may choose."""
        last = self.otherwise
        yield from (rule.model for rule in self.rules)
        yield from (last,) if isinstance(last, str) else (last.small, last.large)

    @property
    def reads_length(self) -> bool:
        """Whether a rule needs the number of tokens of the prompt."""
        return any((rule.prompt_at_least, rule.prompt_below) != (None, None) for rule in self.rules)

    def choose(self, query: Query) -> str | Cascade:
        """Returns the model for a request, or the cascade."""
        choice = next((rule.model for rule in self.rules if rule.matches(query)), self.otherwise)
        return choice.choose(query.text) if isinstance(choice, Classifier) else choice


Routes = Mapping[str, Route]
"""Virtual models by name."""


@dataclass(slots=True)
class Confidence:
    """Confidence of a small model in its answers to one request, of which the lowest counts.

    Attributes:
        num_answers: answers that the request gets.
        scores: log-probabilities of the first tokens by the number of an answer.
        ended: answers without further tokens.
    """

    cascade: Cascade
    num_answers: int
    scores: dict[int, list[float]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def note(self, answer: int, logprobs: Sequence[float], has_ended: bool) -> None:
        """Notes the log-probabilities of further tokens of an answer."""
        known = self.scores.setdefault(answer, [])
        known.extend(logprobs)
        if self.cascade.tokens:
            del known[self.cascade.tokens :]
        if has_ended or (self.cascade.tokens and len(known) == self.cascade.tokens):
            self.ended.add(answer)

    @property
    def is_decided(self) -> bool:
        """Whether the tokens of all answers that decide are known."""
        return len(self.ended) == self.num_answers

    @property
    def mean(self) -> float:
        """Mean log-probability, in nats, of the answer with the lowest one; an empty answer has 0."""
        return min((fmean(known) for known in self.scores.values() if known), default=0.0)

    @property
    def is_high(self) -> bool:
        """Whether the small model keeps its answers."""
        return self.mean >= self.cascade.threshold
