"""Tokenizer data of a GGUF file from tokenizer.json and its companions; the inverse of `tokenizer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.gguf.pretokenizers import PRE_TOKENIZERS
from compress.checkpoint.gguf.tokenizer import BYTE, CONTROL, NAMED, PREFIX, SPACE, UNKNOWN, USER_DEFINED
from compress.common.errors import CheckpointError
from compress.common.files import read_json, read_text

NORMAL, UNUSED = 1, 5
LAST_SCORE = -1e6
"""Score of tokens that no merge makes."""
REMEDY = "Export to another format, or serve the folder itself"


def tokenizer_metadata(folder: Path, num_rows: int) -> dict[str, Any]:
    """Returns the metadata of the tokenizer in a folder; tokens without a text get one up to `num_rows`.

    Raises:
        CheckpointError: no tokenizer.json, or one that is neither byte-level BPE with a known pre-tokenizer nor the BPE
            of SentencePiece.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json", "Copy it from the source model")
    stored = read_json(path)
    model = stored.get("model") or {}
    if model.get("type") != "BPE":
        raise CheckpointError(f"{path} has a tokenizer of type {model.get('type')!r}, and GGUF needs BPE", REMEDY)
    tokens = _texts(stored, num_rows)
    kind = _sentencepiece(stored, tokens) if model.get("byte_fallback") else _byte_level(stored, path)
    config = _optional(folder / "tokenizer_config.json")
    return {
        **kind,
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": _types(stored, tokens),
        **_named(folder, config, tokens),
        f"{PREFIX}add_bos_token": _begins_with_special(stored),
        **_template(folder, config),
    }


def _texts(stored: Mapping[str, Any], num_rows: int) -> list[str]:
    vocab = {token: text for text, token in stored["model"]["vocab"].items()}
    vocab |= {each["id"]: each["content"] for each in stored.get("added_tokens", ())}
    if vocab and max(vocab) >= num_rows:
        raise CheckpointError(
            f"tokenizer.json has token id {max(vocab)}, and the embedding has {num_rows} rows",
            "Copy the tokenizer that belongs to the model",
        )
    return [vocab.get(token, f"[PAD{token}]") for token in range(num_rows)]


def _types(stored: Mapping[str, Any], tokens: list[str]) -> list[int]:
    known = {*stored["model"]["vocab"].values()}
    types = [NORMAL if token in known else UNUSED for token in range(len(tokens))]
    if stored["model"].get("byte_fallback"):
        types = [BYTE if _is_byte(text) else kind for text, kind in zip(tokens, types, strict=True)]
    for each in stored.get("added_tokens", ()):
        types[each["id"]] = CONTROL if each.get("special") else USER_DEFINED
    unknown = stored["model"].get("unk_token")
    if unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return types


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _merges(stored: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for merge in stored["model"].get("merges", ()):
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        yield first, second


def _byte_level(stored: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = [name for name, entry in PRE_TOKENIZERS.items() if entry == _plain(stored.get("pre_tokenizer"))]
    if not found:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"the pre-tokenizer of {path} is none that GGUF names ({known})", REMEDY)
    merges = [f"{first} {second}" for first, second in _merges(stored)]
    return {f"{PREFIX}model": "gpt2", f"{PREFIX}pre": found[0], f"{PREFIX}merges": merges}


def _plain(entry: Any) -> Any:
    """Returns a pre-tokenizer without what changes no token."""
    if isinstance(entry, dict):
        plain = {key: _plain(value) for key, value in entry.items()}
        return plain | ({"trim_offsets": True} if plain.get("type") == "ByteLevel" else {})
    return [_plain(each) for each in entry] if isinstance(entry, list) else entry


def _sentencepiece(stored: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    ranks: dict[str, int] = {}
    for rank, (first, second) in enumerate(_merges(stored)):
        ranks.setdefault(first + second, rank)
    return {
        f"{PREFIX}model": "llama",
        f"{PREFIX}scores": [-float(ranks[text]) if text in ranks else LAST_SCORE for text in tokens],
        f"{PREFIX}add_space_prefix": {"type": "Prepend", "prepend": SPACE} in _steps(stored.get("normalizer")),
    }


def _steps(entry: Any) -> list[Any]:
    return [] if entry is None else entry.get("normalizers", [entry])


def _begins_with_special(stored: Mapping[str, Any]) -> bool:
    processor = stored.get("post_processor") or {}
    for each in (processor, *processor.get("processors", ())):
        if each.get("type") == "TemplateProcessing" and "SpecialToken" in each["single"][0]:
            return True
    return False


def _named(folder: Path, config: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    ids = {text: token for token, text in enumerate(tokens)}
    named = {}
    for name, key in NAMED.items():
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in ids:
            named[f"{PREFIX}{key}_token_id"] = ids[text]
    ends = _optional(folder / "generation_config.json").get("eos_token_id")
    others = [token for token in ends if token != named.get(f"{PREFIX}eos_token_id")] if isinstance(ends, list) else []
    return named | ({f"{PREFIX}eot_token_id": others[0]} if others else {})


def _template(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / "chat_template.jinja"
    template = read_text(path) if path.is_file() else config.get("chat_template")
    return {"tokenizer.chat_template": template} if isinstance(template, str) else {}


def _optional(path: Path) -> Mapping[str, Any]:
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}
