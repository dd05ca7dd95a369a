"""Measures which engines load what is written here: by model type, container and form of the weights.

    python scripts/measure_loaders.py --write --vllm /tmp/vllm/bin/python
    python scripts/measure_loaders.py --types llama mixtral

For each model type it makes a tiny random model from transformers' configuration class, rounds it to each form by the
pipeline, exports it to each container, and loads the result in transformers (no tensor is missing, left over or of
another shape, and the logits are those of the runtime) and, with `--vllm`, in vLLM (scripts/check_in_vllm.py, which
says how to make the environment). Prints what each does; `--write` keeps it in
compress/checkpoint/formats/loaders.json, which `compress doctor`, `compress export --list`, plans and model cards ask.
Only what was measured is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.config import read_config
from compress.checkpoint.formats.awq import AWQ
from compress.checkpoint.formats.base import CONTAINERS, TRANSFORMERS, VLLM
from compress.checkpoint.formats.compress_runtime import COMPRESS_RUNTIME
from compress.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from compress.checkpoint.formats.dense import DENSE
from compress.checkpoint.formats.fp8 import FP8
from compress.checkpoint.formats.gptq import GPTQ
from compress.checkpoint.formats.readers import MIXED, TABLE_FILE, Measured, form_of, measured
from compress.checkpoint.meta_model import auto_class
from compress.checkpoint.reader import PackedCheckpoint
from compress.checkpoint.weights import Activations, BlockFp8, Fp8, Int, Mxfp4, Mxfp8, NMSparsity, Nvfp4
from compress.checkpoint.writer import export_checkpoint
from compress.common.errors import ToolkitError
from compress.evaluate.scorers import RuntimeScorer
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe import CalibrationOptions, Recipe
from compress.stages.base import Stage
from compress.stages.factorize import FactorizeStage
from compress.stages.prune import PruneStage
from compress.stages.quantize import QuantizeStage

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests/support"))
from loadable_models import MODEL_TYPES, save_loadable_model  # noqa: E402

TOKENS = torch.randint(1, 200, (1, 24), generator=torch.Generator().manual_seed(0))
LEAST_CORRELATION = 0.92
"""Least for the logits of the best token, in bfloat16, with those of the runtime in float32. Most tokens of a random
model with many layers or experts have less, as errors grow; of a model with other weights, none was above 0.86."""
PACKAGES = {
    TRANSFORMERS: ("transformers", "compressed-tensors", "torch"),
    VLLM: ("vllm", "transformers", "compressed-tensors"),
}
"""Packages whose versions are recorded."""


WIDE = "llama", "mixtral"
"""Model types that show all widths and sizes of groups; the others show the widths and the size in use."""


def forms(model_type: str) -> Iterator[tuple[str, str, tuple[Stage, ...]]]:
    """Yields containers, names of forms and the stages that make them."""
    usual = [Int(4, 128), Int(8, 128)]
    widths = [Int(bits, 128) for bits in (2, 3)] if model_type in WIDE else []
    others = [Int(6, 128), Int(8, 128, symmetric=False)] if model_type in WIDE else []
    grouped = [Int(bits, group) for bits in (4, 8) for group in (32, 64, None)] if model_type in WIDE else []
    floats = [Fp8(), Fp8(Activations.FP8), BlockFp8(), Nvfp4(), Mxfp4(), Mxfp8()]
    rounded, asymmetric = Int(8, None, activations=Activations.INT8), Int(4, 128, symmetric=False)
    held = {
        COMPRESSED_TENSORS.name: [*usual, asymmetric, rounded, *floats, *widths, *others, *grouped],
        GPTQ.name: [*usual, *widths, *grouped],
        AWQ.name: [Int(4, 128), asymmetric, *(each for each in grouped if each.bits == 4)],
        FP8.name: [BlockFp8()],
        DENSE.name: [Int(4, 128)],
    }
    for container, schemes in held.items():
        for scheme in schemes:
            yield container, form_of(container, scheme, scheme in grouped), (QuantizeStage("rtn", scheme),)
    eight = QuantizeStage("rtn", Int(8, 128), targets=("*down_proj", "*out_proj"))
    yield COMPRESSED_TENSORS.name, MIXED, (QuantizeStage("rtn", Int(4, 128)), eight)
    four = QuantizeStage("rtn", Int(4, 32))
    yield COMPRESS_RUNTIME.name, "sparsity", (PruneStage("magnitude", pattern=NMSparsity(2, 4)), four)
    yield COMPRESS_RUNTIME.name, "rank", (FactorizeStage("svd", keep=0.5), four)
    if model_type in WIDE:  # the only form whose columns are chosen on a text
        yield COMPRESS_RUNTIME.name, "outliers", (QuantizeStage("rtn", Int(4, 32), outlier_columns=4),)


@dataclass
class Checkpoints:
    """Checkpoints of one model in a folder, each made once.

    Attributes:
        packed: as the pipeline writes them, by the stages that make them.
    """

    folder: Path
    model_type: str
    packed: dict[tuple[Stage, ...], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        save_loadable_model(self.folder / "dense", self.model_type)

    def make(self, container: str, stages: tuple[Stage, ...]) -> Path:
        """Rounds the model by `stages` and writes it to a container. Raises ToolkitError where that is impossible."""
        if stages not in self.packed:
            self.packed[stages] = self._compress(stages)
        packed = self.packed[stages]
        if PackedCheckpoint.open(packed).format == container:
            return packed
        return export_checkpoint(packed, container, packed.with_name(f"{packed.name}-{container}"))

    def _compress(self, stages: tuple[Stage, ...]) -> Path:
        source, out = self.folder / "dense", self.folder / str(len(self.packed))
        recipe = Recipe(stages, CalibrationOptions(samples=6, length=48), 0)
        request = RunRequest(source, str(source), recipe, out, devices="cpu", measure=False)
        return run(prepare(request), quiet=True).out


@torch.no_grad()
def refusal_in_transformers(folder: Path) -> str | None:
    """Returns why transformers does not load a checkpoint, which may be an error of any class; "" where it does, None
    where a package is missing here."""
    try:
        model, info = auto_class(read_config(folder)["model_type"]).from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(each if isinstance(each, str) else each[0] for each in info[kind]):
                return f"{kind.replace('_', ' ')} such as {without_numbers(names[0])}"
        found = model.eval()(TOKENS, use_cache=False).logits
    except ImportError:
        return None
    except Exception as error:
        return summary(type(error).__name__, str(error))
    expected = RuntimeScorer(folder, dtype="float32").logits(TOKENS)
    both = (each.float().reshape(TOKENS.shape[1], -1) for each in (found, expected))
    centred = (each - each.mean(-1, keepdim=True) for each in both)
    correlation = float(torch.cosine_similarity(*centred, dim=-1).max())
    return "" if correlation >= LEAST_CORRELATION else "other logits than those of the runtime"


def refusal_in_vllm(answer: dict[str, Any]) -> str | None:
    """Returns why vLLM does not load a checkpoint, of a line that scripts/check_in_vllm.py prints; None where a package
    is missing there."""
    if answer["refusal"].startswith(("ImportError", "ModuleNotFoundError")):
        return None
    if answer["unfilled"]:
        return f"random parameters such as {without_numbers(answer['unfilled'][0])}"
    return summary(*answer["refusal"].split(": ", 1)) if answer["refusal"] else ""


def summary(kind: str, text: str = "") -> str:
    """Returns the first sentence of an error, without what differs from file to file."""
    problem = " ".join(text.split()).rpartition("Value error, ")[2]  # of pydantic, which says before it where it is
    sentence = re.split(r"(?<=[a-z)])\. | \[type=", problem)[0]
    return f"{kind}: {without_numbers(sentence)[:160]}"


def without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


@contextmanager
def vllm_loader(python: str) -> Iterator[Callable[[Path], str | None]]:
    """Starts scripts/check_in_vllm.py in its environment, and gives what asks it for a refusal."""
    command = [python, str(ROOT / "scripts/check_in_vllm.py"), "--json", "-"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:

        def ask(folder: Path) -> str:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("{"):
                    return refusal_in_vllm(json.loads(line))
            raise ToolkitError(
                f"vLLM ended with status {process.wait()} at {folder}", f"Run {' '.join(command[:2])} {folder}"
            )

        yield ask
        process.stdin.close()


Ask = Callable[[Path], str | None]


def measure(
    model_type: str, engines: Mapping[str, Ask], wanted: Callable[[str, str], bool]
) -> Iterator[tuple[str, str, dict[str, str | None]]]:
    """Yields containers and forms with the refusal of each engine that was asked."""
    with tempfile.TemporaryDirectory() as work:
        checkpoints = Checkpoints(Path(work), model_type)
        for container, form, stages in forms(model_type):
            if not wanted(container, form):
                continue
            try:
                folder = checkpoints.make(container, stages)
            except ToolkitError as error:
                print(f"{model_type} {container} {form}: not written: {error}", file=sys.stderr)
                continue
            yield (
                container,
                form,
                {engine: ask(folder) for engine, ask in engines.items() if engine in CONTAINERS[container].engines},
            )


def versions(python: str, packages: Iterable[str]) -> dict[str, str]:
    """Versions of packages in an environment."""
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(packages, found, strict=True))


def summary_rows() -> Iterator[str]:
    """Yields rows of docs/families.md: forms with the model types that engines refuse, and those that are unknown."""
    table = measured()
    for form in ("w4a16 sym", "w8a8 sym", "w8a8 fp8"):
        outcomes = [table[engine].found[COMPRESSED_TENSORS.name][form] for engine in (TRANSFORMERS, VLLM)]
        cells = []
        for found in outcomes:
            refused = sorted(f"`{each}`" for each, refusal in found.items() if refusal)
            unknown = sorted(f"`{each}`" for each in set().union(*outcomes) - found.keys())
            cells.append(", ".join(refused) + (f"; unknown: {', '.join(unknown)}" if unknown else ""))
        yield f"| {form} | {' | '.join(cells)} |"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=MODEL_TYPES, help="model types; all by default")
    parser.add_argument("--containers", nargs="+", help="all by default")
    parser.add_argument("--forms", nargs="+", help="names of forms as in the table, such as 'w4a16 sym'")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of the environment with vLLM")
    parser.add_argument("--no-transformers", action="store_true", help="measure vLLM alone")
    parser.add_argument("--rows", action="store_true", help="measure nothing; print the rows of docs/families.md")
    parser.add_argument("--write", action="store_true", help=f"replace what was measured in {TABLE_FILE.name}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints each refusal, and writes the table."""
    options = parse(arguments)
    if options.rows:
        print("\n".join(summary_rows()))
        return 0

    def wanted(container: str, form: str) -> bool:
        of_container = not options.containers or container in options.containers
        return of_container and (not options.forms or form in options.forms)

    interpreters = {TRANSFORMERS: sys.executable, VLLM: options.vllm}
    with ExitStack() as stack:
        engines: dict[str, Ask] = {} if options.no_transformers else {TRANSFORMERS: refusal_in_transformers}
        if options.vllm:
            engines[VLLM] = stack.enter_context(vllm_loader(options.vllm))
        for model_type in options.types:
            found = {}
            for container, form, refusals in measure(model_type, engines, wanted):
                for engine, refusal in refusals.items():
                    found[engine, container, form, model_type] = refusal
                    outcome = "unknown" if refusal is None else refusal or "loads"
                    print(f"{engine}: {model_type} {container} {form}: {outcome}", flush=True)
            if options.write:
                write(found, interpreters)
    return 0


def write(found: Mapping[tuple[str, str, str, str], str | None], interpreters: Mapping[str, str]) -> None:
    """Puts refusals by engine, container, form and model type into the table, with the versions of the packages."""
    table = measured()
    for (engine, container, form, model_type), refusal in found.items():
        outcomes = table.setdefault(engine, Measured()).found.setdefault(container, {}).setdefault(form, {})
        outcomes.pop(model_type, None)
        outcomes |= {} if refusal is None else {model_type: refusal}
    for engine in {engine for engine, *_ in found}:
        table[engine].versions = versions(interpreters[engine], PACKAGES[engine])
    entries = {engine: each.to_dict() for engine, each in sorted(table.items())}
    TABLE_FILE.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
