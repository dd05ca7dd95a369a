"""Train the demo model, its draft model or the demo mixture from a folder of text, on a CPU or a GPU, and write it with
its model card.

A killed run continues when the same command is given again. Examples:

    python scripts/train_demo_model.py --model demo  --texts texts/ --minutes 60 --out demo_model
    python scripts/train_demo_model.py --model draft --texts texts/ --minutes 20 --tokenizer demo_model --out draft
    python scripts/train_demo_model.py --model mixture --texts texts/ --minutes 60 --init demo_model --out mixture
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_training import card, evaluation, models, texts
from demo_training.loop import Budget, Trainer
from rich.console import Console
from transformers import PreTrainedTokenizerBase

TITLES = {"demo": "Demo model", "draft": "Draft model of the demo model", "mixture": "Demo mixture"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--texts", type=Path, required=True, help="folder of .txt, .md, .jsonl (field `text`) and .jsonl.xz files")
    add("--out", type=Path, required=True, help="folder for the finished checkpoint; an existing one is replaced")
    add("--model", default="demo", choices=[*models.SHAPES, models.MIXTURE])
    add("--minutes", type=float, help="stop after this many minutes of training")
    add("--steps", type=int, help="stop after this many steps")
    add("--tokenizer", type=Path, help="folder with the tokenizer to use (default: of --init, else a new BPE)")
    add("--vocabulary", type=int, default=8192, help="size of a new tokenizer")
    add("--init", type=Path, help="checkpoint to start from")
    add("--tokens-before", type=int, default=0, help="tokens the --init checkpoint has seen, for the model card")
    add("--exclude", action="append", default=[], help="pattern of files or sources to leave out; may be repeated")
    add("--held-out", type=Path, action="append", default=[], help="text file to report perplexity on; may be repeated")
    add("--about-texts", default="a folder of English text", help="a description of the texts, for the model card")
    add("--batch", type=int, default=8, help="windows in a step")
    add("--length", type=int, default=512, help="tokens in a window")
    add("--long-every", type=int, default=10, help="windows four times as long once in this many steps (0: never)")
    add("--muon-lr", type=float, default=0.02, help="peak learning rate of the matrices")
    add("--adam-lr", type=float, default=3e-3, help="peak learning rate of embeddings and norms")
    add("--seed", type=int, default=0, help="seed of weights and data order")
    add("--eval-windows", type=int, default=240, help="windows scored for each held-out text")
    add("--threads", type=int, default=0, help="CPU threads (0: leave as it is)")
    add("--snapshot-minutes", type=float, default=5.0, help="minutes between snapshots")
    add("--work", type=Path, help="folder for token cache and snapshots (default: OUT-training)")
    switch = argparse.BooleanOptionalAction
    add("--resume", action=switch, default=True, help="continue from the newest snapshot")
    add("--autocast", action=switch, default=True, help="bfloat16 autocast")
    add("--compile", action=switch, default=False, help="torch.compile (twice as fast on a CPU, needs a C++ compiler)")
    add("--export-only", action=switch, default=False, help="write the newest snapshot as a checkpoint, train nothing")
    options = parser.parse_args(arguments)
    if options.model == models.MIXTURE and options.init is None:
        parser.error("a mixture is cut from a trained dense model: give it by --init")
    if not (options.minutes or options.steps):
        parser.error("give a budget: --minutes or --steps")
    options.work = options.work or options.out.with_name(options.out.name + "-training")
    return options


def get_tokenizer(options: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The given tokenizer, the one of the starting checkpoint, or a new one that a resumed run finds again."""
    given = options.tokenizer or options.init
    if given is not None:
        return models.load_tokenizer(given)
    folder = options.work / "tokenizer"
    if not (folder / "chat_template.jinja").exists():  # written last
        chunks = (piece for t in texts.read_folder(options.texts, options.exclude) for piece in texts.pieces(t.text))
        models.write_tokenizer(folder, models.train_tokenizer(chunks, options.vocabulary))
    return models.load_tokenizer(folder)


def make_trainer(options: argparse.Namespace, streams: texts.Streams, vocabulary: int) -> Trainer:
    model = models.create(options.model, vocabulary, options.init, options.seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    kept = ("model", "batch", "length", "long_every", "muon_lr", "adam_lr", "seed", "autocast")
    settings = {name: getattr(options, name) for name in kept} | {"train_tokens": len(streams.train)}
    return Trainer(
        model=model,
        learning_rates=(options.muon_lr, options.adam_lr),
        sampler=texts.Sampler(streams.train, options.batch, options.length, options.seed, options.long_every),
        budget=Budget(options.steps, options.minutes),
        folder=options.work / "snapshots",
        settings=settings,
        snapshot_minutes=options.snapshot_minutes,
        compiled=options.compile,
    )


def measure(
    options: argparse.Namespace, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, tail: texts.Tokens
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


def describe(options: argparse.Namespace, arguments: Sequence[str]) -> card.Run:
    return card.Run(
        title={"demo": "Demo model", "draft": "Draft model of the demo model", "mixture": "Demo mixture"}.get(
            options.model, options.model
        ),
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
    streams = texts.cached_streams(options.work / "tokens", tokenizer, options.texts, options.exclude)
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
