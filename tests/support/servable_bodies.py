"""Request bodies that fit the description made to fit what a description cannot say."""

from typing import Any

# Values that are languages of their own: most that fit the description mean nothing.
FORMS = {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "response_format"}
# Values that need something of the model: a way to write calls, variables of its chat template, a token to allow.
OF_THE_MODEL = {"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "bad_words"}
OF_THE_MODEL |= {"output_config", "text", "reasoning"}
# Values that need a certain length of the answer or a certain last message.
OF_OTHER_FIELDS = {"min_tokens", "continue_final_message", "template", "separate_reasoning", "include"}
OTHER_NAMES = {"max_completion_tokens"}
UNSAID = FORMS | OF_THE_MODEL | OF_OTHER_FIELDS | OTHER_NAMES
TEXT_CHARACTERS = 20
MAX_PARTS = 2


def servable(body: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """The body with short texts, ids of the vocabulary, few answers, and without contradictions."""
    plain = {name: value for name, value in body.items() if name not in UNSAID}
    if isinstance(plain.get("input"), list) and plain["input"] and isinstance(plain["input"][0], dict):
        plain["input"] = [item(each) for each in plain["input"][:MAX_PARTS]]
    elif "input" in plain:
        plain["input"] = short(plain["input"], vocabulary)
    for name in {"prompt", "tokens", "stop_token_ids", "allowed_token_ids"} & set(plain):
        plain[name] = short(plain[name], vocabulary)
    if plain.get("logit_bias"):
        plain["logit_bias"] = {str(int(token) % vocabulary): bias for token, bias in plain["logit_bias"].items()}
    for name in {"query", "documents", "text_1", "text_2"} & set(plain):
        plain[name] = None if plain[name] is None else text_of(plain[name])
    if isinstance(plain.get("system"), list):
        plain["system"] = plain["system"][:MAX_PARTS]
    if plain.get("messages"):
        plain["messages"] = [turn(message) for message in plain["messages"][:MAX_PARTS]]
    if plain.get("thinking"):
        plain["thinking"] = {"type": "disabled" if plain["thinking"]["type"] == "disabled" else "adaptive"}
    if plain.get("stream"):
        plain.pop("prompt_logprobs", None)
    else:
        plain.pop("stream_options", None)
    if plain.get("echo") and plain.get("logprobs") is not None:
        plain.pop("prompt_logprobs", None)
    if plain.get("logprobs") is not True and "prompt" not in plain:
        plain.pop("top_logprobs", None)
    return plain


def brief(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a generation that ends soon."""
    several = {"n": min(int(body["n"]), 2)} if body.get("n") else {}
    return {**body, "max_output_tokens" if "input" in body else "max_tokens": 2, **several}


def of_one_kind(body: dict[str, Any]) -> dict[str, Any]:
    """Body of `/tokenize`: a prompt or messages."""
    if not body.get("messages"):
        given = {name: value for name, value in body.items() if value is not None}
        return {"prompt": "a", **given}
    return {name: value for name, value in body.items() if name not in ("prompt", "add_special_tokens")}


def short(value: Any, vocabulary: int) -> Any:
    if isinstance(value, str):
        return f"a{value[:TEXT_CHARACTERS]}"
    if isinstance(value, list):
        return [short(item, vocabulary) for item in value[:MAX_PARTS]]
    return value if value is None else int(value) % vocabulary


def text_of(value: Any) -> Any:
    """A short text, or one item with one: queries and documents are then equally many."""
    if isinstance(value, list):
        return [text_of(item) for item in value[:1]]
    return {"text": text_of(value["text"])} if isinstance(value, dict) else f"a{value[:TEXT_CHARACTERS]}"


def item(value: dict[str, Any]) -> dict[str, Any]:
    """A message with a text."""
    content = value.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return {"role": value.get("role", "user"), "content": f"a{text[:TEXT_CHARACTERS]}"}


def turn(message: dict[str, Any]) -> dict[str, Any]:
    """A message without calls."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
    parts = [{"type": "text", "text": f"a{text[:TEXT_CHARACTERS]}"} for text in texts[:MAX_PARTS]]
    role = "user" if message["role"] == "tool" else message["role"]
    return {"role": role, "content": parts if isinstance(content, list) else f"a{''.join(texts)[:TEXT_CHARACTERS]}"}
