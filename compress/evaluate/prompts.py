"""Prompts and answers of figures about what a model writes, original text; CC0 1.0. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.text.answer_form import find_reasoning
from runtime.text.reasoning import Position, ReasoningFormat
from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question with an answer, and the thought before it for models that write one."""

    question: str
    thought: str
    answer: str


EXCHANGES = (
    Exchange("What is 12 plus 30?", "12 and 30 make 42.", "12 + 30 = 42\n#### 42"),
    Exchange(
        "Tom has 3 apples and buys 4 more. How many apples does he have?",
        "He starts with 3 and adds 4, which is 7.",
        "He has 3 + 4 = 7 apples.\n#### 7",
    ),
    Exchange(
        "A box holds 6 eggs. How many eggs are in 5 boxes?",
        "5 times 6 is 30.",
        "There are 5 * 6 = 30 eggs in 5 boxes.\n#### 30",
    ),
    Exchange(
        "Anna reads 20 pages a day for a week. How many pages does she read?",
        "A week has 7 days, and 7 times 20 is 140.",
        "A week has 7 days.\nShe reads 7 * 20 = 140 pages.\n#### 140",
    ),
    Exchange(
        "A train travels 60 miles in 2 hours. How many miles does it travel in an hour?",
        "Divide 60 by 2.",
        "It travels 60 / 2 = 30 miles in an hour.\n#### 30",
    ),
    Exchange(
        "Mark pays 10 dollars for a book that costs 8 dollars. How much money does he get back?",
        "The change is 10 minus 8.",
        "He gets 10 - 8 = 2 dollars back.\n#### 2",
    ),
    Exchange("What is the capital of France?", "That is Paris.", "The capital of France is Paris."),
    Exchange("Name the four seasons.", "Four words are enough.", "Spring, summer, autumn and winter."),
    Exchange(
        "Why does ice float on water?",
        "Ice is less dense than water, because its molecules stand farther apart.",
        "Water expands when it freezes, so ice is less dense than the water around it and floats.",
    ),
    Exchange("Translate 'good morning' into Spanish.", "That is 'buenos días'.", "Buenos días."),
    Exchange(
        "Write a function in Python that returns the square of a number.",
        "A single line does it.",
        "```python\ndef square(number):\n    return number * number\n```",
    ),
    Exchange(
        "Should I water a cactus every day?",
        "No: it stores water, and its roots rot in wet soil.",
        "No. Let the soil dry out first; once every two or three weeks is enough.",
    ),
    Exchange("Answer with yes or no: is seven a prime number?", "Seven has no divisors but 1 and 7.", "Yes."),
    Exchange("Thank you, that was all.", "A short reply is polite.", "You're welcome!"),
    Exchange(
        "Who wrote the play Hamlet?",
        "Hamlet is by Shakespeare.",
        "Hamlet was written by William Shakespeare around the year 1600.",
    ),
    Exchange(
        "Give me two reasons to walk to work.",
        "Health and cost are good reasons.",
        "1. It keeps you healthy.\n2. It costs nothing.",
    ),
)

OPENINGS = (
    "The castle was built in",
    "In the morning the captain came on deck and",
    "The function returns a list of",
    "My dear friend, I received your letter and",
    "The city lies on the north bank of the river, and its",
    "def read(path):\n    ",
    "The first chapter describes how",
    "When the old man had finished his story,",
)
"""Beginnings of texts, which a model without a chat template continues too."""

OBJECTS = (
    'Reply with a JSON object that has the keys "name" and "age" for a girl called Mia who is nine. Only JSON.',
    "List three colours as a JSON array of strings. Reply with JSON only.",
    'Give the weather as JSON with the keys "city", "degrees" (a number) and "rain" (true or false). Only JSON.',
    "Reply with a JSON object that maps the numbers one to three, as words, to digits. No other text.",
    'Reply with {"status": "ok"} and nothing else.',
    'A shop sells apples for 2 and pears for 3. Reply with a JSON array of objects with "item" and "price". Only JSON.',
    'Describe a book as nested JSON: "title", "author" with "first" and "last", and "tags" as an array. Only JSON.',
    'Extract JSON with the keys "day" and "hour" from: the train leaves on Friday at 15:00. Reply with JSON only.',
)


def prompt_text(tokenizer: Tokenizer, question: str) -> str:
    """Returns the text before an answer, by the chat template if there is one."""
    if tokenizer.chat_template is None:
        return f"Question: {question}\nAnswer:"
    return tokenizer.render_chat([{"role": "user", "content": question}])


def prompt_tokens(tokenizer: Tokenizer, question: str) -> list[int]:
    """Returns the tokens of `prompt_text`."""
    return tokenizer.encode(prompt_text(tokenizer, question), add_special_tokens=tokenizer.chat_template is None)


def reasoning_of(tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Returns the marks of reasoning of a chat template; None where it has none."""
    found = find_reasoning(tokenizer.chat_template or "")
    return found if isinstance(found, ReasoningFormat) else None


def written_exchanges(tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    """Yields the tokens of each exchange up to the end of its answer, with the number of those before the answer."""
    reasoning = reasoning_of(tokenizer)
    for each in EXCHANGES:
        prompt = prompt_text(tokenizer, each.question)
        before = prompt_tokens(tokenizer, each.question)
        answer = _with_thought(each, reasoning, prompt) if reasoning else each.answer
        answer = answer if tokenizer.chat_template else f" {answer}"
        yield before + tokenizer.encode(answer, add_special_tokens=False), len(before)


def _with_thought(each: Exchange, reasoning: ReasoningFormat, prompt: str) -> str:
    position = reasoning.position(prompt)
    if position is Position.AFTER:
        return each.answer
    opening = "" if position is Position.INSIDE else f"{reasoning.opening}\n"
    return f"{opening}{each.thought}\n{reasoning.closing}\n\n{each.answer}"
