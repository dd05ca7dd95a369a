"""Quality of every method on a trained model: KL to the dense model and perplexity, over calibration seeds.

Calibration and evaluation texts do not overlap; all is scored in float32 by the runtime's model. It ends with verdicts
on the promised orders (GPTQ < RTN, SparseGPT <= Wanda <= magnitude, ...), and exits with status 1 when one of them does
not hold. Settings and their methods are listed in `benchmarking/quality.py`. Examples:

    python scripts/bench_quality.py
    python scripts/bench_quality.py --settings w3g64 w2g64 --methods rtn gptq
    python scripts/bench_quality.py --model demo-mixture --settings coverage --num-calibration-samples 2
    python scripts/bench_quality.py --data wikitext2_test.txt --seeds 3 --tokens 65536 --markdown quality.md
    python scripts/bench_quality.py --settings w2exl3 w2g64 bpw2.25 --methods trellis signround --searches .
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarking.machine import environment, in_own_process, leave_with, weights_sha256
from benchmarking.models import Cost, compress
from benchmarking.quality import (
    COVERAGE,
    NO_CALIBRATION,
    SETTINGS,
    TOKENS_PER_CHANNEL,
    Trial,
    Verdict,
    is_search,
    judge,
    methods_of,
    searched_stages,
    stages_of,
    table_rows,
)
from benchmarking.tables import Row, describe, markdown_table, print_table, write_json
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from calibration.parts import parse_parts
from calibration.sequences import load_tokenizer, pack_parts
from calibration.sources import load_texts
from compress.checkpoint.locate import find_model
from compress.evaluate.checks import SeenText, overlap_warning, shared_spans
from compress.evaluate.perplexity import Windows, cut_windows, score_positions
from compress.evaluate.positions import summarize
from compress.evaluate.scorers import BACKENDS, Scorer, open_scorer
from compress.recipe import CalibrationOptions


class RememberedScorer(Scorer):
    """A scorer whose logits are kept on disk: the dense model runs once over each batch, not once for every trial."""

    def __init__(self, scorer: Scorer, folder: Path) -> None:
        self._scorer, self.vocab_size = scorer, scorer.vocab_size
        self._folder = folder

    def states(self, tokens: Tensor) -> Tensor:
        key = hashlib.sha256(str(tokens.shape).encode() + tokens.numpy().tobytes()).hexdigest()
        file = self._folder / f"{key}.safetensors"
        if not file.exists():
            save_file({"logits": self._scorer.logits(tokens).cpu().contiguous()}, file)
        return load_file(file)["logits"]


def run_trials(options: argparse.Namespace, model: Path, console: Console, work: Path) -> Iterator[Trial]:
    """Compresses a model and scores it, setting by setting."""
    tokenizer = load_tokenizer(model)
    texts = [
        cut_windows(load_texts(name), tokenizer, length=options.max_seq_length, max_tokens=options.tokens)
        for name in ("pydoc", *options.data)
    ]
    parts = parse_parts(options.calibration)
    seen = SeenText.of(
        pack_parts(parts, tokenizer, samples=options.num_calibration_samples, length=options.max_seq_length)
    )
    for windows in texts:
        console.print(f"{windows.source}: {windows.num_predicted:,} predicted tokens; {windows.protocol}")
        for warning in overlap_warning(shared_spans(seen, windows), seen, windows):
            console.print(f"warning: {warning}", style="bold red")
    dense = RememberedScorer(open_scorer(model, options.backend, device=options.device, dtype="float32"), work)
    for setting in options.settings:
        for method in methods_of(setting):
            if options.methods and method not in options.methods:
                continue
            for seed in range(1 if method in NO_CALIBRATION else options.seeds):
                yield from _try(options, model, setting, method, seed, texts, dense, work)


def _try(
    options: argparse.Namespace,
    model: Path,
    setting: str,
    method: str,
    seed: int,
    texts: Iterable[Windows],
    dense: Scorer,
    work: Path,
) -> Iterator[Trial]:
    out = work / "packed"
    cost = in_own_process(_compress, options, model, setting, method, seed, out)
    packed = open_scorer(out, options.backend, device=options.device, dtype="float32")
    for windows in texts:
        (positions,) = score_positions([packed], windows, dense)
        yield Trial(
            model.name,
            setting,
            method,
            seed,
            Path(windows.source).name,
            summarize(positions, compared=True),
            positions.losses.mean(-1).cpu(),
            cost,
        )
    shutil.rmtree(out)


def _compress(options: argparse.Namespace, model: Path, setting: str, method: str, seed: int, out: Path) -> Cost:
    calibration = CalibrationOptions(options.calibration, options.num_calibration_samples, options.max_seq_length)
    request = {"devices": options.device, "dtype": "float32"}
    if is_search(setting):
        known = (options.searches or out.parent) / f"{model.name}-{method}-{seed}.json"
        stages = searched_stages(model, setting, method, calibration, seed, known, **request)
    else:
        stages = stages_of(setting, method)
    least = {"tokens_per_channel": TOKENS_PER_CHANNEL[method]} if setting == COVERAGE else {}
    return compress(model, out, stages, calibration, seed, **request, **least)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    demo = [find_model("demo")]
    parser.add_argument("--model", nargs="+", type=find_model, default=demo, help="folders, demo or demo-mixture")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="e.g. w4g64 nvfp4 2:4 rank0.8 recipes")
    parser.add_argument("--methods", nargs="+", default=(), help="only these; default: all of each setting")
    parser.add_argument("--seeds", type=int, default=3, help="calibration seeds of the calibrated methods")
    parser.add_argument("--calibration", default="bundled", help="calibration text")
    parser.add_argument(
        "--num-calibration-samples", type=int, default=CalibrationOptions().samples, help="calibration sequences"
    )
    parser.add_argument("--data", nargs="*", default=(), help="more evaluation texts in addition to pydoc")
    parser.add_argument("--tokens", type=int, default=32768, help="most tokens of each evaluation text")
    parser.add_argument(
        "--max-seq-length", type=int, default=CalibrationOptions().length, help="tokens of sequences and windows"
    )
    parser.add_argument("--searches", type=Path, help="folder that keeps sensitivities of searches for the next run")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--backend", default="runtime", choices=BACKENDS, help="what scores; see compress eval")
    parser.add_argument("--json", type=Path, help="write every trial and verdict here")
    parser.add_argument("--markdown", type=Path, help="write the table and verdicts here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parse_options(arguments), Console(width=160, highlight=False)
    facts = environment() | {
        "models": " and ".join(f"{model.name} ({weights_sha256(model)[:16]})" for model in options.model),
        "calibration": f"{options.calibration} {options.num_calibration_samples} x {options.max_seq_length} tokens",
        "seeds": f"0 to {options.seeds - 1}",
    }
    console.print(describe(facts))
    trials: list[Trial] = []
    with suppress(KeyboardInterrupt):  # what is done by then is judged and written
        for model in options.model:
            with tempfile.TemporaryDirectory() as work:
                for trial in run_trials(options, model, console, Path(work)):
                    trials.append(trial)
                    console.print(f"  {trial}")
    rows, verdicts = table_rows(trials), judge(trials)
    print_table("Means over calibration seeds", rows, console)
    for verdict in verdicts:
        console.print(str(verdict), style=None if verdict.holds else "bold red")
    _write(options, facts, trials, rows, verdicts)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _write(
    options: argparse.Namespace,
    facts: dict[str, Any],
    trials: Sequence[Trial],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
) -> None:
    if options.json:
        content = {
            "facts": facts,
            "trials": [trial.to_dict() for trial in trials],
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
        write_json(options.json, content)
    if options.markdown:
        lines = "\n".join(f"- {verdict}" for verdict in verdicts)
        options.markdown.write_text(f"{describe(facts)}\n\n{markdown_table(rows)}\n{lines}\n", encoding="utf-8")


if __name__ == "__main__":
    leave_with(main)
