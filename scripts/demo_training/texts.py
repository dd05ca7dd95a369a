"""A folder of text -> token streams: one to train on, small ones that are held out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from compress.common.files import json_lines

Tokens = np.ndarray
CHUNK = 100_000  # characters given to the tokenizer at once; pieces end at a line break
LONG = 4  # length of a long window, in usual windows
HELD_OUT_SHARE, HELD_OUT_CAP = 0.01, 4096  # the tail of every source that is never trained on
PROBLEM = re.compile(r"^Question: (?P<question>.*?)\nAnswer: (?P<answer>.*?)(?=\n\nQuestion: |\Z)", re.S | re.M)


@dataclass(frozen=True)
class Text:
    source: str
    text: str


@dataclass(frozen=True)
class Streams:
    train: Tokens
    held_out: Tokens


def read_folder(folder: Path, exclude: Iterable[str] = ()) -> Iterator[Text]:
    """Every text under `folder`, in a stable order, except files and sources that match a pattern."""
    patterns = tuple(exclude)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if not _matches(name, patterns):
            yield from (text for text in read_file(path, name) if not _matches(text.source, patterns))


def read_file(path: Path, name: str) -> Iterator[Text]:
    if path.name.endswith((".jsonl", ".jsonl.xz")):
        for _, record in json_lines(path):
            yield Text(record.get("source", name), record["text"])
    elif path.suffix in {".txt", ".md"} and path.name != "README.md":
        yield Text(name, path.read_text(encoding="utf-8"))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def documents(text: str) -> Iterator[str]:
    """A text as training documents. A collection of problems becomes one plain and one chat document for each."""
    problems = list(PROBLEM.finditer(text))
    if not problems:
        yield text
    for problem in problems:
        yield problem.group(0)
        yield (
            f"<|im_start|>user\n{problem['question']}<|im_end|>\n<|im_start|>assistant\n{problem['answer']}<|im_end|>\n"
        )


def pieces(text: str, size: int = CHUNK) -> Iterator[str]:
    """The text cut at line breaks into pieces of about `size` characters, because tokenizers like short inputs."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    encodings = tokenizer.backend_tokenizer.encode_batch(list(pieces(text)), add_special_tokens=False)
    ids: list[Tokens] = [np.array(encoding.ids, dtype=np.uint16) for encoding in encodings]
    return np.concatenate(ids) if ids else np.zeros(0, dtype=np.uint16)


def encode_source(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Tokens:
    """All documents of a source, each followed by the end-of-text token."""
    docs = [doc for text in texts for doc in documents(text)]
    end = tokenizer.eos_token
    return encode(tokenizer, "".join(doc + end for doc in docs))


def build_streams(tokenizer: PreTrainedTokenizerBase, texts: Iterable[Text]) -> Streams:
    """Tokenise every source and keep its last 1 % (at most 4,096 tokens) out of the training stream."""
    if len(tokenizer) > np.iinfo(np.uint16).max:
        raise ValueError(f"the vocabulary has {len(tokenizer)} entries; this trainer stores tokens as uint16")
    by_source: dict[str, list[str]] = {}
    for text in texts:
        by_source.setdefault(text.source, []).append(text.text)
    if not by_source:
        raise ValueError("no text found: the folder needs .txt, .md, .jsonl or .jsonl.xz files")
    train, held_out = [], []
    for source_texts in by_source.values():
        tokens = encode_source(tokenizer, source_texts)
        cut = len(tokens) - min(int(len(tokens) * HELD_OUT_SHARE), HELD_OUT_CAP)
        train.append(tokens[:cut])
        held_out.append(tokens[cut:])
    return Streams(np.concatenate(train), np.concatenate(held_out))


def cached_streams(
    cache: Path, tokenizer: PreTrainedTokenizerBase, folder: Path, exclude: tuple[str, ...] = ()
) -> Streams:
    """`build_streams` of a folder, kept as two .npy files named by what went in."""
    files = [(p.relative_to(folder).as_posix(), p.stat().st_size) for p in sorted(folder.rglob("*")) if p.is_file()]
    facts = json.dumps([files, exclude, tokenizer.backend_tokenizer.to_str()])
    key = hashlib.sha256(facts.encode()).hexdigest()[:16]
    train, held_out = cache / f"train-{key}.npy", cache / f"held-out-{key}.npy"
    if not (train.exists() and held_out.exists()):
        streams = build_streams(tokenizer, read_folder(folder, exclude))
        cache.mkdir(parents=True, exist_ok=True)
        for path, tokens in ((train, streams.train), (held_out, streams.held_out)):
            partial = path.with_suffix(".tmp.npy")
            np.save(partial, tokens)
            partial.replace(path)
    return Streams(np.load(train, mmap_mode="r"), np.load(held_out))


@dataclass(frozen=True)
class Sampler:
    """Which tokens step `n` sees: a pure function of the step, so resuming needs nothing but its number.

    The stream is cut into windows that are visited in a fresh shuffled order every epoch, which mixes the sources.
    Every `long_every`-th step has the same number of tokens in windows four times as long.
    """

    tokens: Tokens
    batch: int
    length: int
    seed: int = 0
    long_every: int = 0

    def __post_init__(self) -> None:
        longest = self.length * (LONG if self.long_every else 1)
        if len(self.tokens) <= longest:
            raise ValueError(f"{len(self.tokens)} training tokens do not fill a window of {longest}: add text")

    @property
    def windows(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __call__(self, step: int) -> np.ndarray:
        """Token ids [batch, length + 1]: inputs and, one to the right, what they should predict."""
        factor = LONG if self.long_every and step % self.long_every == self.long_every - 1 else 1
        picks = range(step * self.batch, (step + 1) * self.batch, factor)
        length = self.length * factor
        starts = [min(self._window(pick) * self.length, len(self.tokens) - 1 - length) for pick in picks]
        return np.stack([self.tokens[start : start + length + 1] for start in starts]).astype(np.int64)

    def _window(self, pick: int) -> int:
        epoch, place = divmod(pick, self.windows)
        return int(_order(self.seed, epoch, self.windows)[place])


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(windows)
