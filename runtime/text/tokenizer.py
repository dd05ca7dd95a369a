"""Tokenizer of a checkpoint folder, and incremental detokenization. Imports neither torch nor transformers."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from compress.common.chat_template import ChatTemplate
from compress.common.errors import CheckpointError, LongPromptError, RequestError
from compress.common.files import read_json, read_text
from compress.common.model_folder import no_file
from compress.common.tokenizer_file import COPY_AGAIN, TOKENIZER_FILE, LibraryErrors, check_tokenizer_file

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@cache
def byte_alphabet() -> dict[str, int]:
    """Returns the bytes of byte-level BPE's characters: printable bytes as themselves, others from code point 256
    on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts(dict[int, str]):
    """Cache of the texts of single tokens.

    Args:
        decode: converts token ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str:
        self[token_id] = text = self._decode([token_id])
        return text


SEPARATOR = b"\xff"


class TokenByteTable(dict[int, bytes]):
    """Cache of the bytes of tokens, for byte-level vocabularies and for those with U+2581 for spaces and `<0xAB>` for
    bytes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._is_byte_level = "ByteLevel" in repr(backend.decoder)

    @cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """Concatenation of all tokens, separated by bytes that text cannot contain, and their offsets."""
        tokens = [self[token_id] for token_id in range(self._backend.get_vocab_size(with_added_tokens=True))]
        return SEPARATOR.join(tokens), list(accumulate((len(token) + 1 for token in tokens), initial=0))

    def find(self, text: bytes) -> Iterator[int]:
        """Yields the ids of the tokens that contain a text."""
        joined, starts = self._joined
        place = joined.find(text)
        while place >= 0:
            token_id = bisect_right(starts, place) - 1
            yield token_id
            place = joined.find(text, starts[token_id + 1])

    def __missing__(self, token_id: int) -> bytes:
        """Computes and stores the bytes of a token; empty for an id outside the vocabulary."""
        self[token_id] = found = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) or ""
        if self._is_byte_level:
            alphabet = byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8
"""Number of prompt tokens decoded before the first new one, because they decide whether it starts with a space.
Sufficient for a character of four tokens before three tokens of an incomplete one."""

MAX_CHARACTER_TOKENS = 4
"""Maximum tokens of a character: UTF-8 has at most four bytes per character."""


class Detokenizer:
    """Incremental detokenizer of one sequence. The concatenated pieces equal the text of all tokens.

    Keeps a short window of tokens. The text of tokens before `_read` was returned; they are decoded again as context
    only. The others end within a character, and their text is held back until the character is complete.

    Args:
        decode: converts token ids to text.
        prompt_token_ids: tokens before the new ones. Their text is not returned, except for a character whose last
            bytes are new.
        alone: texts of single tokens, where the text of tokens is that of their joined bytes; None elsewhere.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int] = (),
        alone: Mapping[int, str] | None = None,
    ) -> None:
        self._decode = decode
        self._alone = alone
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._read = self._settled_length()
        self._context = decode(self._window[: self._read])

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that it completes, possibly none."""
        if self._alone is not None and self._read == len(self._window):
            text = self._alone[token_id]
            if REPLACEMENT not in text:
                return text  # whole characters, to which the tokens before and after add nothing
        self._window.append(token_id)
        text = self._text_until(len(self._window))
        if not text:
            self._window.pop()  # special tokens have no text, and any number of them may be adjacent
            return ""
        if not text.endswith(REPLACEMENT):
            return self._settle(len(self._window), text)
        # Only the last three tokens can begin an incomplete character.
        end = len(self._window) - MAX_CHARACTER_TOKENS + 1
        if end > self._read and (first := self._text_until(end)) and text.startswith(first):
            return self._settle(end, first)
        return ""

    def flush(self) -> str:
        """Returns the remaining text after the last token; bytes of incomplete characters become U+FFFD."""
        return self._settle(len(self._window), self._text_until(len(self._window)))

    def _text_until(self, end: int) -> str:
        """Returns the text of the window's tokens from `_read` to `end`."""
        return self._decode(self._window[:end])[len(self._context) :]

    def _settle(self, end: int, text: str) -> str:
        self._window = self._window[self._read :]
        self._read = end - self._read
        self._context = self._decode(self._window[: self._read])
        return text

    def _settled_length(self) -> int:
        """Returns the number of prompt tokens before an incomplete character at the end."""
        length = len(self._window)
        for end in range(length, max(length - MAX_CHARACTER_TOKENS, -1), -1):
            if not self._decode(self._window[:end]).endswith(REPLACEMENT):
                return end
        return length


LONG_TOKENS = 1024
"""Number of tokens above which decoding releases the interpreter lock, which costs more than decoding a few tokens."""

TEXT_ERRORS = LibraryErrors(RequestError, "the tokenizer cannot process this text", "Check the model's tokenizer.json")

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Tokenizer with chat template.

    `encode` adds the special tokens of the tokenizer's post-processor; `encode_chat` adds none, because templates
    contain them.
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
        self._folder: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the folder only: reading it again is faster than copying a vocabulary."""
        if self._folder is not None:
            return Tokenizer.open, (self._folder,)
        return Tokenizer, (self._backend, self.special_tokens, self.chat_template)

    @classmethod
    def open(cls, path: str | Path) -> Tokenizer:
        """Reads the tokenizer files of a checkpoint folder.

        Raises:
            CheckpointError: the files are missing or cannot be read.
        """
        folder = Path(path)
        config = _read_object(folder / "tokenizer_config.json")
        special_tokens = _named_tokens(_read_object(folder / "special_tokens_map.json") | config)
        opened = cls(_open_backend(folder), special_tokens, _read_template(folder, config))
        opened._folder = folder.absolute()
        return opened

    @classmethod
    def open_in_thread(cls, path: str | Path) -> Future[Tokenizer]:
        """Opens the tokenizer of a folder while this thread does something else: most of that is done by the library,
        without the lock of the interpreter. The result raises the errors of `open`."""
        opened: Future[Tokenizer] = Future()

        def run() -> None:
            try:
                opened.set_result(cls.open(path))
            except Exception as error:
                opened.set_exception(error)

        threading.Thread(target=run, name="tokenizer", daemon=True).start()
        return opened

    @cached_property
    def _texts(self) -> Mapping[bool, TokenTexts | None]:
        """Texts of single tokens without and with special tokens' texts skipped, for a byte-level vocabulary."""
        if not isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return {False: None, True: None}
        return {skips: TokenTexts(partial(self.decode, skip_special_tokens=skips)) for skips in (False, True)}

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of token ids; the model's embedding may be larger."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Ids of special tokens by their content; `decode` omits them."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a text.

        Args:
            max_tokens: limit above which a text is rejected after tokenizing only its beginning. Texts with slightly
                more tokens are returned.

        Raises:
            RequestError: the text has a lone surrogate, which is not valid Unicode.
            LongPromptError: the beginning of the text has more than `max_tokens`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"the text has half a surrogate pair at character {error.start}"
            raise RequestError(problem, "Send valid Unicode") from error
        if max_tokens is not None:
            self._check_length(text, max_tokens)
        return self._encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; bytes of incomplete characters become U+FFFD."""
        ids = list(token_ids)
        with TEXT_ERRORS:
            if len(ids) < LONG_TOKENS:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to the text, possibly part of a character; special tokens as their
        name."""
        return self._bytes[token_id]

    def tokens_with(self, text: str) -> list[int]:
        """Returns the ids of the tokens that contain a text."""
        return list(self._bytes.find(text.encode(errors="surrogatepass")))

    def count_differences(self, other: Tokenizer) -> int:
        """Returns the number of token ids that differ from, or are missing in, another tokenizer."""
        mine, others = (set(t._backend.get_vocab(with_added_tokens=True).items()) for t in (self, other))
        return len({token_id for _, token_id in mine ^ others})

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Returns an incremental detokenizer for the tokens after a prompt."""
        decode, alone = partial(self.decode, skip_special_tokens=skip_special_tokens), self._texts[skip_special_tokens]
        return Detokenizer(decode, prompt_token_ids, alone)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Renders messages with the chat template.

        Raises:
            RequestError: the model has no chat template, or the template rejects the messages.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template", "Use completions with a plain prompt")
        if self._chat is None:
            self._chat = ChatTemplate(self.chat_template, self.special_tokens)
        return self._chat.render(messages, **variables)

    @property
    def template_variables(self) -> set[str]:
        """Names of the variables that the chat template uses; none without a template."""
        if self.chat_template is None:
            return set()
        if self._chat is None:
            self._chat = ChatTemplate(self.chat_template, self.special_tokens)
        return self._chat.variables

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Returns the token ids of a conversation up to the answer; see `render_chat`."""
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raises LongPromptError by tokenizing prefixes of growing length."""
        num_characters = 8 * max_tokens
        while num_characters < len(text):
            num_tokens = len(self._encode(text[:num_characters], add_special_tokens=False))
            if num_tokens > 1.25 * max_tokens:  # the following text may change the last few tokens
                problem = f"the first {num_characters} of {len(text)} characters alone have {num_tokens} tokens"
                raise LongPromptError(f"{problem}, but the context is {max_tokens} tokens", "Shorten the prompt")
            num_characters *= 4

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Unlike `encode`, batch encoding releases the interpreter lock.
        with TEXT_ERRORS:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _open_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        return _convert_with_transformers(folder)
    check_tokenizer_file(path)
    with LibraryErrors(CheckpointError, f"{path} cannot be used", COPY_AGAIN):
        return tokenizers.Tokenizer.from_str(read_text(path))


def _convert_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    """Converts the tokenizer of a folder without tokenizer.json. Imports transformers, which is slow."""
    if not (folder / "config.json").exists():
        raise no_file(folder / "config.json", "Name a folder with config.json, safetensors files and tokenizer.json")
    remedy = "Copy tokenizer.json and tokenizer_config.json of the source model into the folder"
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
        raise no_file(folder / TOKENIZER_FILE, remedy)
    from transformers import AutoTokenizer

    try:
        backend: tokenizers.Tokenizer | None = getattr(AutoTokenizer.from_pretrained(folder), "backend_tokenizer", None)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"the tokenizer files of {folder} cannot be converted: {error}", remedy) from error
    if backend is None:
        raise CheckpointError(f"the tokenizer of {folder} cannot be converted to a fast tokenizer", remedy)
    return backend


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path, COPY_AGAIN) if path.exists() else {}
    return content if isinstance(content, dict) else {}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns special tokens by name; the file has strings or objects with their content."""
    tokens = {name: config.get(name) for name in NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Reads the template file, else the template in the configuration (of several, the one named default)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = _read_object(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
