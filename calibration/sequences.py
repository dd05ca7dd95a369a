"""Packing of documents, or of a mixture of sources, into fixed-length token sequences without padding."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from calibration.parts import Part, share_out
from calibration.sources import SELF, Document, Messages, TextSource, load_texts
from compress.common.chat_template import ChatTemplate, reason_of
from compress.common.errors import DataError, RequestError
from compress.common.files import without_marks
from compress.common.tokenizer_file import TOKENIZER_FILE, LibraryErrors, check_tokenizer_file

FEW_TOKENS = 8192
OVERLAP_WINDOW = 32
# Ordinary text takes 2.5 bytes per token or more in languages of the tokenizer; other text falls apart into bytes or
# letters.
FEW_BYTES_PER_TOKEN = 1.5
MAX_UNKNOWN = 0.01


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One packed source of a mixture."""

    source: str
    sha256: str
    weight: float
    sequences: int


@dataclass(frozen=True, slots=True)
class SequenceSet:
    """Token sequences ready for a model.

    Attributes:
        tokens: int64 `[N, L]`, no padding anywhere.
        sha256: hash of the text source; empty while the model has not written its own text yet.
        description: origin, order and special-token policy in words.
        warnings: one line each, for example on too little text.
        parts: of a mixture; empty for a single source.
    """

    tokens: Tensor
    source: str
    sha256: str
    description: str
    warnings: tuple[str, ...] = ()
    parts: tuple[PackedPart, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def token_sha256(self) -> str:
        """Hash of the token ids; a resumed run compares it."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()


def encode_documents(documents: Sequence[Document], tokenizer: Any) -> list[list[int]]:
    """Encodes each document. Chats go through the tokenizer's template; plain text gets no special tokens. Raises
    DataError: a chat without a template, or one that the template refuses."""
    return [_encode(document_text(document, tokenizer), tokenizer) for document in documents]


def document_text(document: Document, tokenizer: Any) -> str:
    """Returns the text of a document; a chat is rendered by the model's template."""
    return document if isinstance(document, str) else _render(document, tokenizer)


def _render(messages: Messages, tokenizer: Any) -> str:
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):  # several templates by name
        source = source.get("default")
    if not source:
        raise DataError("the text holds chats but the model has no chat template", "Give plain text instead")
    template = read_template(source, tuple(tokenizer.special_tokens_map.items()))
    # As in transformers, where templates may ask whether there are none.
    given = {"add_generation_prompt": False, "tools": None, "documents": None}
    try:
        return template.render(messages, **{name: given[name] for name in given.keys() & template.variables})
    except RequestError as error:
        roles = ", ".join(str(message["role"]) for message in messages[:6])
        reason = reason_of(error.__cause__ or error)
        problem = f"the model's chat template refuses a chat with the roles {roles}: {reason}"
        raise DataError(problem, "Correct the chat, or give its text as plain text") from error


@lru_cache(maxsize=1)
def read_template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Compiles a chat template. Raises CheckpointError if it is not valid."""
    return ChatTemplate(source, dict(special_tokens))


def _encode(text: str, tokenizer: Any) -> list[int]:
    if not hasattr(tokenizer, "bos_token_id"):
        return list(tokenizer(text))
    # verbose=False: documents longer than the context are meant to be cut into windows, not warned about.
    with LibraryErrors(DataError, "the tokenizer cannot process the text", "Check the model's tokenizer.json"):
        return cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def separator_token(tokenizer: Any) -> int | None:
    """Returns the id between documents: beginning-of-sequence, else end-of-sequence, else None."""
    ids: Iterable[int | None] = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
    return next((each for each in ids if each is not None), None)


def pack_sequences(source: TextSource, tokenizer: Any, *, samples: int, length: int, seed: int = 0) -> SequenceSet:
    """Packs shuffled documents into `samples` sequences of `length` tokens, each document after one separator token.

    Documents are shuffled by `seed`, joined, and cut into windows; a random subset of the windows is kept when there
    are more than needed, in an order that `seed` decides too. Raises DataError: less than one window of text.
    """
    separator = separator_token(tokenizer)
    prefix = [] if separator is None else [separator]
    stream, num_bytes = _token_stream(source, tokenizer, prefix, seed, enough=4 * samples * length)
    windows = len(stream) // length
    if windows == 0:
        raise DataError(
            f"{source.name} gives {len(stream)} tokens, fewer than one sequence of {length}",
            f"Use --max-seq-length {max(1, len(stream))} or give more text",
        )
    tokens = torch.tensor(stream[: windows * length], dtype=torch.int64).view(windows, length)
    keep = np.random.default_rng(seed + 1).permutation(windows)[:samples]
    tokens = tokens[torch.from_numpy(keep)].contiguous()
    warnings = (*few_sequences(tokens, samples, source.name), *_foreign(stream, num_bytes, tokenizer, source.name))
    return SequenceSet(tokens, source.name, source.sha256, _describe(source, prefix, seed), warnings)


def _token_stream(
    source: TextSource, tokenizer: Any, prefix: list[int], seed: int, enough: int
) -> tuple[list[int], int]:
    """Encodes documents in shuffled order until there are `enough` tokens: large datasets are not encoded whole.
    Returns token ids, and the number of bytes of their text."""
    stream: list[int] = []
    num_bytes = 0
    for index in np.random.default_rng(seed).permutation(len(source.documents)):
        text = document_text(source.documents[index], tokenizer)
        ids = _encode(text, tokenizer)
        # Some chat templates write the beginning token themselves.
        stream += ids if prefix and ids[:1] == prefix else prefix + ids
        num_bytes += len(text.encode())
        if len(stream) >= enough:
            break
    return stream, num_bytes


def _describe(source: TextSource, prefix: list[int], seed: int) -> str:
    policy = f"token {prefix[0]} before each document" if prefix else "no special tokens"
    return f"{source.description}; shuffled with seed {seed}, packed without padding, {policy}"


def few_sequences(tokens: Tensor, samples: int, name: str) -> tuple[str, ...]:
    """Warns when a text does not fill the requested sequences."""
    if len(tokens) >= samples:
        return ()
    return (
        f"{name} fills only {len(tokens)} of {samples} sequences; more text gives better statistics, also text that "
        f"the model writes after it ({SELF} in a mixture)",
    )


def few_tokens(tokens: Tensor) -> tuple[str, ...]:
    """Warns when there are fewer than `FEW_TOKENS` calibration tokens."""
    if tokens.numel() >= FEW_TOKENS:
        return ()
    return (
        f"{tokens.numel()} calibration tokens are few; {FEW_TOKENS} or more are advised, also tokens that the model "
        f"writes ({SELF} in a mixture)",
    )


def _foreign(stream: list[int], num_bytes: int, tokenizer: Any, name: str) -> tuple[str, ...]:
    """Warns of text outside of the tokenizer's domain, which the model hardly saw in training."""
    found = []
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    unknown = stream.count(unknown_id) / len(stream) if unknown_id is not None else 0.0
    if unknown > MAX_UNKNOWN:
        found.append(f"{100 * unknown:.1f} % of the tokens of {name} are unknown to the model: it is off its domain")
    if num_bytes / len(stream) < FEW_BYTES_PER_TOKEN:
        found.append(
            f"{name} gives only {num_bytes / len(stream):.2f} bytes per token (ordinary text: 2.5 and more): the model "
            "was hardly trained on such text"
        )
    return tuple(found)


def overlap(first: Tensor, second: Tensor, window: int = OVERLAP_WINDOW) -> float:
    """Returns the fraction of all `window`-token spans of `first`, at any offset, that also occur in `second`. `first`,
    `second`: int64 token ids `[N, L]` or `[L]`."""
    seen = {span for row in second.reshape(-1, second.shape[-1]) for span in _spans(row, window)}
    spans = [span for row in first.reshape(-1, first.shape[-1]) for span in _spans(row, window)]
    return sum(span in seen for span in spans) / len(spans) if spans else 0.0


def _spans(row: Tensor, window: int) -> list[bytes]:
    data = row.numpy().astype(np.int32)
    return [data[start : start + window].tobytes() for start in range(len(data) - window + 1)]


def check_token_ids(tokens: Tensor, config: Mapping[str, Any], path: Path) -> None:
    """Raises DataError for token ids that a model does not have: the tokenizer in its folder belongs to another."""
    size, largest = config.get("vocab_size"), int(tokens.max())
    if isinstance(size, int) and largest >= size:
        raise DataError(
            f"the tokenizer in {path} gives token id {largest}, and the model has {size} tokens (vocab_size)",
            "Copy the tokenizer that belongs to the model into the folder",
        )


def load_tokenizer(path: str | Path) -> Any:
    """Loads the transformers tokenizer of a model folder; nothing is downloaded. Raises DataError: no tokenizer there,
    or one that cannot be read."""
    from transformers import AutoTokenizer

    if (file := Path(path, TOKENIZER_FILE)).exists():
        check_tokenizer_file(file)
    remedy = "Copy tokenizer.json and tokenizer_config.json of the model into it"
    with (
        LibraryErrors(DataError, f"{path} holds no tokenizer that can be read", remedy),
        without_marks(Path(path)) as folder,
    ):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


Sampler = Callable[[Tensor, int, int], Tensor]
"""Samples text from the model: prompts `[N, P]`, length and seed to tokens `[N, L]`."""

SELF_DESCRIPTION = "text sampled from the source model itself at temperature 1"
TOKENS_PER_PROMPT_TOKEN = 8
"""Length of a sequence that the model writes, relative to the piece of text that it continues."""


def pack_parts(
    parts: Sequence[Part], tokenizer: Any, *, samples: int, length: int, seed: int = 0, sampler: Sampler | None = None
) -> SequenceSet:
    """Packs one text or a mixture into token sequences. Equal arguments give equal sequences in equal order.

    Weights count tokens: each part is packed alone into its share of the sequences; all are shuffled by the seed. A
    `self` part continues pieces of the sequences of the other parts, at random places.
    Raises DataError: a text that cannot be used, or that does not fill one sequence. `sampler`: writes the text of a
    `self` part; without one, zeros of the same shape stand in for it, for a plan.
    """
    shares = {part.source: count for part, count in zip(parts, share_out(parts, samples), strict=True)}
    packed = {
        source: pack_sequences(load_texts(source), tokenizer, samples=count, length=length, seed=seed)
        for source, count in shares.items()
        if source != SELF
    }
    if SELF in shares:
        prompts = _prompts([text.tokens for text in packed.values()], shares[SELF], length, seed)
        packed[SELF] = _written(prompts, length, seed, sampler)
    in_order = [packed[part.source] for part in parts]
    mixed = in_order[0] if len(parts) == 1 else _mix(parts, in_order, seed)
    return replace(mixed, warnings=mixed.warnings + few_tokens(mixed.tokens))


def _prompts(texts: Sequence[Tensor], count: int, length: int, seed: int) -> Tensor:
    """Returns pieces `[count, P]` of sequences `[N, length]` at random places; P is 0 without a text."""
    if not texts:
        return torch.empty(count, 0, dtype=torch.int64)
    pieces = torch.cat(list(texts)).unfold(1, max(1, length // TOKENS_PER_PROMPT_TOKEN), 1)
    generator = np.random.default_rng(seed + 3)
    rows, places = (torch.from_numpy(generator.integers(size, size=count)) for size in pieces.shape[:2])
    return pieces[rows, places]


def _written(prompts: Tensor, length: int, seed: int, sampler: Sampler | None) -> SequenceSet:
    after = f", each after {prompts.shape[1]} tokens of the other texts" if prompts.numel() else ""
    description = f"{SELF_DESCRIPTION} with seed {seed}{after}"
    if sampler is None:
        return SequenceSet(torch.zeros(len(prompts), length, dtype=torch.int64), SELF, "", description)
    tokens = sampler(prompts, length, seed)
    return SequenceSet(tokens, SELF, hashlib.sha256(tokens.numpy().tobytes()).hexdigest(), description)


def _mix(parts: Sequence[Part], packed: Sequence[SequenceSet], seed: int) -> SequenceSet:
    total = sum(part.weight for part in parts)
    records = tuple(
        PackedPart(part.source, each.sha256, part.weight / total, len(each.tokens))
        for part, each in zip(parts, packed, strict=True)
    )
    tokens = torch.cat([each.tokens for each in packed])
    order = np.random.default_rng(seed + 2).permutation(len(tokens))
    return SequenceSet(
        tokens[torch.from_numpy(order)].contiguous(),
        ",".join(f"{part.source}:{part.weight:g}" for part in parts),
        _joint_hash(records),
        "; ".join(f"{part.weight / total:.0%} {each.description}" for part, each in zip(parts, packed, strict=True)),
        tuple(warning for each in packed for warning in each.warnings),
        records,
    )


def _joint_hash(records: Sequence[PackedPart]) -> str:
    """Hashes the texts and weights of a mixture in their order; empty while a text does not exist yet."""
    if not all(record.sha256 for record in records):
        return ""
    facts = [[record.sha256, record.weight] for record in records]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
