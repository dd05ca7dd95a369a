"""Train the demo model or its draft model from a folder of text, on a CPU or a GPU, and write it with its model card.

A killed run continues when the same command is given again. Examples:

    python scripts/train_demo_model.py --model demo  --texts texts/ --minutes 60 --out demo_model
    python scripts/train_demo_model.py --model draft --texts texts/ --minutes 20 --tokenizer demo_model --out draft
"""

from __future__ import annotations

import argparse
import shlex
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated

import torch
from demo_training import card, evaluation, models, texts
from demo_training.loop import Budget, Trainer
from rich.console import Console
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Options:
    """Every field is a command-line option; a tuple may be given several times."""

    texts: Annotated[Path, "folder of .txt, .md, .jsonl and .jsonl.xz files (a `text` field in each record)"]
    out: Annotated[Path, "folder for the finished checkpoint; an existing one is replaced"]
    model: Annotated[str, "demo, draft or tiny"] = "demo"
    minutes: Annotated[float | None, "stop after this many minutes of training"] = None
    steps: Annotated[int | None, "stop after this many steps"] = None
    tokenizer: Annotated[Path | None, "folder with the tokenizer to use (default: of --init, else a new BPE)"] = None
    vocabulary: Annotated[int, "size of a new tokenizer"] = 8192
    init: Annotated[Path | None, "checkpoint to start from"] = None
    tokens_before: Annotated[int, "tokens the --init checkpoint has seen, for the model card"] = 0
    exclude: Annotated[tuple[str, ...], "pattern of files or sources to leave out"] = ()
    held_out: Annotated[tuple[Path, ...], "text file to report perplexity on; leave it out of --texts"] = ()
    about_texts: Annotated[str, "what the texts are, for the model card"] = "a folder of English text"
    batch: Annotated[int, "windows in a step"] = 8
    length: Annotated[int, "tokens in a window"] = 512
    long_every: Annotated[int, "use windows four times as long once in this many steps (0: never)"] = 10
    muon_lr: Annotated[float, "peak learning rate of the matrices"] = 0.02
    adam_lr: Annotated[float, "peak learning rate of embeddings and norms"] = 3e-3
    seed: Annotated[int, "seed of weights and data order"] = 0
    eval_windows: Annotated[int, "windows scored for each held-out text"] = 240
    threads: Annotated[int, "CPU threads (0: leave as it is)"] = 0
    snapshot_minutes: Annotated[float, "minutes between snapshots"] = 5.0
    work: Annotated[Path | None, "folder for token cache and snapshots (default: OUT-training)"] = None
    resume: Annotated[bool, "continue from the newest snapshot"] = True
    autocast: Annotated[bool, "bfloat16 autocast"] = True
    compile: Annotated[bool, "use torch.compile (twice as fast on a CPU, needs a C++ compiler)"] = False
    export_only: Annotated[bool, "write the newest snapshot as a checkpoint, without training"] = False

    @property
    def folder(self) -> Path:
        return self.work or self.out.with_name(self.out.name + "-training")


def parse(arguments: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = typing.get_type_hints(Options, include_extras=True)
    for entry in fields(Options):
        _add(parser, entry.name, *typing.get_args(hints[entry.name]), default=entry.default)
    values = vars(parser.parse_args(arguments))
    if not (values["minutes"] or values["steps"]):
        parser.error("give a budget: --minutes or --steps")
    return Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _add(parser: argparse.ArgumentParser, name: str, hint: typing.Any, text: str, default: object) -> None:
    flag = "--" + name.replace("_", "-")
    if hint is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
        return
    kind = next(t for t in typing.get_args(hint) or (hint,) if t is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        parser.add_argument(flag, action="append", type=kind, default=[], metavar=kind.__name__.upper(), help=text)
        return
    required = default is MISSING
    parser.add_argument(flag, type=kind, required=required, default=None if required else default, help=text)


def get_tokenizer(options: Options) -> PreTrainedTokenizerBase:
    """The given tokenizer, the one of the starting checkpoint, or a new one that a resumed run finds again."""
    given = options.tokenizer or options.init
    if given is not None:
        return models.load_tokenizer(given)
    folder = options.folder / "tokenizer"
    if not (folder / "chat_template.jinja").exists():  # written last
        chunks = (piece for t in texts.read_folder(options.texts, options.exclude) for piece in texts.pieces(t.text))
        models.write_tokenizer(folder, models.train_tokenizer(chunks, options.vocabulary))
    return models.load_tokenizer(folder)


def make_trainer(options: Options, streams: texts.Streams, vocabulary: int) -> Trainer:
    model = models.create(options.model, vocabulary, options.init, options.seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    kept = ("model", "batch", "length", "long_every", "muon_lr", "adam_lr", "seed", "autocast")
    settings = {name: getattr(options, name) for name in kept} | {"train_tokens": len(streams.train)}
    return Trainer(
        model=model,
        learning_rates=(options.muon_lr, options.adam_lr),
        sampler=texts.Sampler(streams.train, options.batch, options.length, options.seed, options.long_every),
        budget=Budget(options.steps, options.minutes),
        folder=options.folder / "snapshots",
        settings=settings,
        snapshot_minutes=options.snapshot_minutes,
        compiled=options.compile,
    )


def measure(
    options: Options, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, tail: texts.Tokens
) -> list[evaluation.Perplexity]:
    """Perplexity of the weights as they will be shipped, on every held-out text."""
    rounded = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    model.load_state_dict(rounded, strict=False)
    model.eval()
    held_out = {path.stem: texts.encode(tokenizer, path.read_text(encoding="utf-8")) for path in options.held_out}
    name, topics = evaluation.help_topics()
    held_out[name] = texts.encode(tokenizer, topics)
    if options.init is None:  # a starting checkpoint may have been trained on it
        held_out["tail of every training source"] = tail
    lengths = {options.length: options.eval_windows}
    if options.long_every:
        lengths[options.length * texts.LONG] = options.eval_windows // texts.LONG
    scores = [
        evaluation.perplexity(model, text, tokens, window, windows)
        for text, tokens in held_out.items()
        for window, windows in lengths.items()
    ]
    return [score for score in scores if score is not None]


def describe(options: Options, arguments: Sequence[str]) -> card.Run:
    return card.Run(
        title={"demo": "Demo model", "draft": "Draft model of the demo model"}.get(options.model, options.model),
        about_texts=options.about_texts,
        tokens_before=options.tokens_before,
        batch=f"{options.batch} x {options.length} tokens",
        autocast=options.autocast,
        command=shown_command(arguments),
    )


def shown_command(arguments: Sequence[str]) -> str:
    """The command for the card: absolute paths shortened to their last part, so that it names no machine's folders."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return shlex.join(["python", "scripts/train_demo_model.py", *words])


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(soft_wrap=True)
    tokenizer = get_tokenizer(options)
    streams = texts.cached_streams(options.folder / "tokens", tokenizer, options.texts, options.exclude)
    trainer = make_trainer(options, streams, len(tokenizer))
    size = sum(p.numel() for p in trainer.model.parameters())
    console.print(f"{len(streams.train) / 1e6:.1f}M training tokens, {size / 1e6:.1f}M parameters", highlight=False)
    if not options.resume:
        trainer.discard()
    if options.export_only:
        trainer.load()
    else:
        trainer.run(console)
    results = measure(options, trainer.model, tokenizer, streams.held_out)
    text = card.render(describe(options, given), trainer.model, trainer.progress, results)
    models.export(trainer.model, tokenizer, options.out, text)
    for result in results:
        console.print(f"perplexity {result}", highlight=False)


if __name__ == "__main__":
    main()
