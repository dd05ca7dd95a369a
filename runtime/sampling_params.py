"""How a request wants its tokens drawn, and what its answer must look like. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from compress.checkpoint.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_ANSWERS = 128


class GrammarKind(StrEnum):
    """The language in which a grammar is written; `json_object` is any JSON object."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like. `text` is the schema (as JSON), the regular expression or the Lark grammar."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0` are off.

    Attributes:
        max_tokens: tokens to generate at most; 0 only computes the prompt, and the answer ends with `length`.
        seed: keys the noise together with the position; None lets the engine choose one and report it.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the sequence beside the model's own end tokens.
        ignore_eos: keep going through the model's end tokens.
        logprobs: number of alternatives reported per token, of the unmodified distribution; None reports nothing.
        n: answers to one prompt, each with noise of its own; the first is the same as with `n=1`.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: subtracted from the logit of every token that is in the output.
        frequency_penalty: subtracted as many times as the token is in the output.
        logit_bias: pairs of token id and what is added to its logit.
        prompt_logprobs: as `logprobs`, for the prompt's tokens; they come with the first delta.
        grammar: what the answer must look like.
        skip_special_tokens: leave tokens that are no text, such as those that announce tool calls, out of the text.

    Raises:
        RequestError: a value outside of its range, by name.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the distribution of the next one."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn, and from the likely ones only."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def __post_init__(self) -> None:
        checks = (
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", 0 <= self.top_k <= MAX_TOP_K, f"0 (off) to {MAX_TOP_K}"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}"),
            ("stop", all(self.stop), "non-empty strings"),
            ("stop_token_ids", all(token_id >= 0 for token_id in self.stop_token_ids), "0 or more each"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("n", 1 <= self.n <= MAX_ANSWERS, f"between 1 and {MAX_ANSWERS}"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 2, "above 0 and at most 2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("logit_bias", all(-100 <= bias <= 100 for _, bias in self.logit_bias), "between -100 and 100 each"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "between 0 and 20"),
        )
        for name, fits, rule in checks:
            if not fits:
                raise RequestError(f"{name}={getattr(self, name)!r} is not allowed", f"{name} must be {rule}")
