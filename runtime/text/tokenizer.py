"""The tokenizer of a checkpoint folder, read without torch and transformers so that start-up takes no seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from compress.checkpoint.errors import CheckpointError, LongPromptError, RequestError
from runtime.text.chat import ChatTemplate
from runtime.text.detokenizer import Detokenizer
from runtime.text.token_bytes import TokenByteTable

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back, and the chat template.

    Beginning-of-sequence policy: `encode` adds the special tokens that the tokenizer's own post-processor adds;
    `encode_chat` adds none, because templates write theirs themselves.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        self.chat_template = chat_template
        self._chat: ChatTemplate | None = None
        self._bytes = TokenByteTable(backend)

    @classmethod
    def open(cls, path: str | Path) -> Tokenizer:
        """Reads the tokenizer files of a checkpoint folder.

        Raises:
            CheckpointError: there are none, or they cannot be read.
        """
        folder = Path(path)
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _named_tokens(_read_json(folder / "special_tokens_map.json") | config)
        return cls(_open_backend(folder), special_tokens, _read_template(folder, config))

    @property
    def vocab_size(self) -> int:
        """Token ids lie below this; the model's own table may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def special_ids(self) -> dict[str, int]:
        """Ids of the tokens that are no text, by their spelling; `decode` leaves them out."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text. One that surely has more than `max_tokens` is refused by its beginning, unread: that
        costs what the limit costs, however long the text is. Others are returned, also with more.

        Raises:
            RequestError: the text has half a surrogate pair, so it is no Unicode text.
            LongPromptError: its beginning alone has more than `max_tokens`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"the text has half a surrogate pair at character {error.start}"
            raise RequestError(problem, "Send valid Unicode") from error
        if max_tokens is not None:
            self._check_length(text, max_tokens)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no character become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to the text, half a character for some; special tokens are spelled out."""
        return self._bytes[token_id]

    def count_differences(self, other: Tokenizer) -> int:
        """Token ids that stand for something else, or nothing, in another tokenizer."""
        mine, others = (set(t._backend.get_vocab(with_added_tokens=True).items()) for t in (self, other))
        return len({token_id for _, token_id in mine ^ others})

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Decodes what follows a prompt, token by token."""
        return Detokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt_token_ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Text that the chat template makes of messages.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template", "Use completions with a plain prompt")
        if self._chat is None:
            self._chat = ChatTemplate(self.chat_template, self.special_tokens)
        return self._chat.render(messages, **variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation, up to where the answer begins. See `render_chat`."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Tokens of growing beginnings, each several times as long as all before it together."""
        num_characters = 8 * max_tokens
        while num_characters < len(text):
            num_tokens = len(self._backend.encode(text[:num_characters], add_special_tokens=False).ids)
            if num_tokens > 1.25 * max_tokens:  # what follows may change the last few of them
                problem = f"the first {num_characters} of {len(text)} characters alone have {num_tokens} tokens"
                raise LongPromptError(f"{problem}, but the context is {max_tokens} tokens", "Shorten the prompt")
            num_characters *= 4

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _open_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_with_transformers(folder)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} cannot be read: {error}", "copy it from the source model again") from error


def _convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """For folders with a sentencepiece model only. Slow to import, hence only here."""
    if not (folder / "config.json").is_file():
        problem = f"there is no config.json in {folder}, so it is no model"
        raise CheckpointError(problem, "Name a folder with config.json, safetensors files and tokenizer.json")
    remedy = "Copy tokenizer.json and tokenizer_config.json of the source model into the folder"
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
        raise CheckpointError(f"{folder} has no tokenizer.json", remedy)
    from transformers import AutoTokenizer

    try:
        backend = getattr(AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"the tokenizer files of {folder} cannot be converted: {error}", remedy) from error
    if backend is None:
        raise CheckpointError(f"the tokenizer of {folder} has no fast form", remedy)
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "copy it from the source model again") from error
    return content if isinstance(content, dict) else {}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; a token is a string or an object with its content."""
    tokens = {name: config.get(name) for name in NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template file beside the tokenizer, or the one in its configuration (of several the one named default)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", "copy it from the source model again") from error
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
