"""Chat template: renders a small conversation in the sandbox and checks the tokens in its output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from compress.common.errors import RequestError, ToolkitError
from compress.doctor.base import CHECKS, Check
from compress.doctor.findings import Finding
from compress.doctor.view import brief, eos_ids, listed
from runtime.text.tokenizer import Tokenizer

USER, ANSWER, SYSTEM = "Name two colours, please.", "Blue and green.", "Answer briefly."
QUESTION = [{"role": "user", "content": USER}]
TURNS = [*QUESTION, {"role": "assistant", "content": ANSWER}, *QUESTION]
WITH_SYSTEM = [{"role": "system", "content": SYSTEM}, *QUESTION]
MARKUP = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|<(?:start|end)_of_turn>")
"""Text in the form of a special token."""
WHERE = "chat template"
COPY = "Copy chat_template.jinja and tokenizer_config.json of the source model into the folder"


@CHECKS.register()
class Template(Check):
    """Renders conversations, and looks up the tokens in the output of the template."""

    name: ClassVar[str] = "template"

    def start(self) -> Iterator[Finding]:
        tokenizer = self.view.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            return
        try:
            rendered = tokenizer.render_chat(QUESTION)
        except ToolkitError as error:
            yield self.error("fails", WHERE, error.problem, COPY)
            return
        if USER not in rendered:
            yield self.error("content-lost", WHERE, f"the user's text is not in {brief(rendered)}", COPY)
        yield from self._markup(tokenizer, rendered)
        yield from self._system(tokenizer)
        yield from self._turns(tokenizer)

    def facts(self) -> dict[str, str]:
        tokenizer = self.view.tokenizer
        if tokenizer is None:
            return {}
        template = tokenizer.chat_template
        return {"chat template": "none" if template is None else f"{len(template):,} characters"}

    def _markup(self, tokenizer: Tokenizer, rendered: str) -> Iterator[Finding]:
        marks = sorted(set(MARKUP.findall(rendered)))
        unknown = [mark for mark in marks if len(tokenizer.encode(mark, add_special_tokens=False)) != 1]
        if unknown:
            problem = f"its output contains {listed(unknown)}, which the tokenizer splits into ordinary tokens"
            yield self.warning("unknown-markup", WHERE, problem, COPY)

    def _system(self, tokenizer: Tokenizer) -> Iterator[Finding]:
        """Reports a template that drops system messages silently; refusing them is deliberate in some models."""
        try:
            rendered = tokenizer.render_chat(WITH_SYSTEM)
        except RequestError:
            return
        if SYSTEM not in rendered:
            problem = "it drops the text of a system message without an error"
            yield self.warning("system-lost", WHERE, problem, "Put instructions into the user's message")

    def _turns(self, tokenizer: Tokenizer) -> Iterator[Finding]:
        rendered = tokenizer.render_chat(TURNS)
        if ANSWER not in rendered:
            yield self.error("content-lost", WHERE, f"the assistant's text is not in {brief(rendered)}", COPY)
            return
        ids = tokenizer.encode(rendered.rpartition(ANSWER)[2], add_special_tokens=False)
        special, ends = set(tokenizer.special_ids.values()), self._ends(tokenizer)
        if ids and ends and ids[0] in special and ids[0] not in ends:
            mark = tokenizer.decode(ids[:1], skip_special_tokens=False)
            problem = f"it ends an answer with {mark} ({ids[0]}), but generation ends at {sorted(ends)} only"
            remedy = f"Add {ids[0]} to eos_token_id in generation_config.json"
            yield self.warning("turn-end", WHERE, problem, remedy)

    def _ends(self, tokenizer: Tokenizer) -> set[int]:
        packed = self.view.packed
        ids = eos_ids(self.view.generation_config, packed.config if packed else self.view.raw_config)
        own = tokenizer.eos_token_id
        return set(ids or ([] if own is None else [own]))
