"""The demo's table, from files as the demo leaves them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo_table.py"


def test_table_has_every_figure(tmp_path: Path) -> None:
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    for folder, size in ((dense, 2_000_000), (packed, 500_000)):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(size))
    structure = {"num_parameters": 1_000_000, "bits_per_weight": 4.28, "bits_per_parameter": 4.0}
    (packed / "compression_report.json").write_text(json.dumps({"structure": structure}))
    evaluation = {"baseline": str(dense), "perplexity": 21.5, "baseline_perplexity": 20.25, "kl_mean": 0.0123}
    (tmp_path / "evaluation.json").write_text(json.dumps({**evaluation, "kl_p999": 0.9}))
    answer = {"tokens": 96, "first_token_seconds": 0.01, "tokens_per_second": 123.4}
    (tmp_path / "client.json").write_text(json.dumps({"completion": answer, "chat": answer}))
    result = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    for words in (["2.00 MB", "0.50 MB (4.00x smaller)"], ["16.0", "4.28"], ["20.250", "21.500"], ["123.4"]):
        assert any(all(word in line for word in words) for line in lines), result.stdout
    assert len({len(line) for line in lines}) == 1
