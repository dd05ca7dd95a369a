"""Prunes the demo model to 2:4 sparsity and quantizes what is left: `python examples/recipe.py OUT`.

The same text in a file is run by `compress run FILE --out OUT`. See docs/recipes.md.
"""

import sys
from pathlib import Path

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.cli import demo_model_path
from compress.pipeline.prepare import RunRequest, prepare
from compress.pipeline.run import run
from compress.recipe_file import parse_recipe

RECIPE = """
calibration: {source: bundled, num_calibration_samples: 8, max_seq_length: 256}
stages:
  - prune: {method: wanda, pattern: "2:4"}
  - quantize: {method: rtn, bits: 8, group_size: 128}
"""


def main(out: Path) -> None:
    model = demo_model_path()
    run(prepare(RunRequest(model, str(model), parse_recipe(RECIPE, "example"), out, measure=False)))
    print(PackedCheckpoint.open(out).describe())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "packed-example"))
