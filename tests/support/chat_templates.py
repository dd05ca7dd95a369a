"""Chat templates written after the published formats of model families: turns, tools, calls, results, reasoning.

They are shorter than the published ones, and have the same tokens in the same places.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.common.chat_template import ChatTemplate

FOLDER = Path(__file__).parents[1] / "data" / "chat_templates"
NAMED_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Family:
    """A family's template.

    Attributes:
        name: of the format of its calls.
        end: text after the assistant's turn.
        plain: variables of the template with which answers have no reasoning.
    """

    name: str
    template: str
    end: str
    plain: dict[str, Any]

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        return ChatTemplate(self.template, NAMED_TOKENS).render(messages, **variables)

    def written(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        """The last message as the assistant wrote it, after what the template writes before its answers."""
        before = self.render(messages[:-1], tools=tools, **self.plain)
        whole = self.render(messages, tools=tools, add_generation_prompt=False, **self.plain)
        assert whole.startswith(before), (before, whole)
        assert whole.endswith(self.end)
        return whole.removesuffix(self.end)[len(before) :]


def read(name: str) -> str:
    """A template of `tests/data/chat_templates`."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


FAMILIES = {
    "qwen3": Family("Hermes", read("qwen3"), "<|im_end|>\n", {"enable_thinking": False}),
    "qwen3_coder": Family("Qwen3-Coder", read("qwen3_coder"), "<|im_end|>\n", {}),
    "llama3": Family("Llama 3.1", read("llama3"), "<|eot_id|>", {}),
    "mistral_v3": Family("Mistral", read("mistral_v3"), "</s>", {}),
    "ministral3": Family("Mistral 3", read("ministral3"), "</s>", {}),
    "deepseek_r1": Family("DeepSeek V3", read("deepseek_r1"), "<｜end▁of▁sentence｜>", {"thinking": False}),
    "deepseek_v31": Family("DeepSeek V3.1", read("deepseek_v31"), "<｜end▁of▁sentence｜>", {}),
    "glm45": Family("GLM 4.5", read("glm45"), "", {"enable_thinking": False}),
    "gpt_oss": Family("harmony", read("gpt_oss"), "", {}),
    "gemma4": Family("Gemma 4", read("gemma4"), "<|tool_response>", {}),
    "kimi_k2": Family("Kimi K2", read("kimi_k2"), "<|im_end|>", {}),
}
