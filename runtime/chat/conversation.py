"""What was said so far, and how the next answer is drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from runtime.sampling_params import SamplingParams

Message = dict[str, str]


@dataclass
class Conversation:
    """Turns of user and assistant in order, after a system message if there is one.

    Attributes:
        sampling: of the next answer.
        is_over: the user has left.
    """

    sampling: SamplingParams
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    is_over: bool = False

    @property
    def messages(self) -> list[Message]:
        """As a chat template takes them."""
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else list(self.turns)

    def with_user(self, text: str) -> list[Message]:
        """The messages if the user said this next."""
        return [*self.messages, {"role": "user", "content": text}]

    def add_turn(self, question: str, answer: str) -> None:
        """Keeps a question and its answer, whole or stopped."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        """Writes the messages as JSON, in the form that chat completions take."""
        content = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        path.write_text(content + "\n", encoding="utf-8")
