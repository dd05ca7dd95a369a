"""`runtime simulate`: its report, its choices, and what it does without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_command import runtime, runtime_here

from runtime.cli.simulate import DeviceOptions
from runtime.simulate.costs import read_costs
from runtime.simulate.jobs import TRACES
from runtime.simulate.policy import POLICIES
from runtime.simulate.routing import ROUTERS

SMALL = ("simulate", "-n", "20", "--input-len", "8:64", "--output-len", "2:8")


def test_report_over_all_policies(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = runtime_here(*SMALL, "--devices", "2", "-r", "20", "--slo", "ttft=1s", "--json", str(file), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert [each["policy"] for each in found["outcomes"]] == [*POLICIES]
    assert all(each["figures"]["complete"] == 20 for each in found["outcomes"])
    assert found["choice"] == "chunked"  # all keep the limit, and it is the simplest
    assert found["objectives"] == {"ttft": 1.0}
    for name in POLICIES:
        assert re.search(rf"\b{name}\b", result.stdout)


def test_policies_that_need_more_devices_are_named(tmp_path: Path) -> None:
    result = runtime_here(*SMALL, "-r", "20", "--policy", "chunked", "--policy", "apart", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"apart.*--devices 2", result.stdout)
    for options in (("--policy", "apart"), ("--policy", "none"), ("--costs", "none"), ("--measure", "demo")):
        assert runtime_here(*SMALL, *options, cwd=tmp_path).returncode == 1


def test_requests_of_a_file_and_their_rate(tmp_path: Path) -> None:
    lines = [{"timestamp": 250 * number, "input_length": 40, "output_length": 4} for number in range(9)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--trace", "trace.jsonl", "--policy", "chunked", "-r", "8", "--json", "report.json")
    result = runtime_here("simulate", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    (outcome,) = found["outcomes"]
    assert (found["trace_requests_per_s"], outcome["rate"]) == (4.0, 8.0)
    assert (outcome["figures"]["input_tokens"], outcome["figures"]["output_tokens"]) == (360, 36)


def test_options_name_all_entries_of_the_registries(tmp_path: Path) -> None:
    (router,) = (each for name, each in DeviceOptions.__dataclass_fields__.items() if name == "router")
    assert set(router.metadata["option"].choices) == set(ROUTERS)
    text = " ".join(runtime_here("simulate", "--help", cwd=tmp_path).stdout.split()).replace("- ", "-")
    assert all(name in text for name in TRACES)
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text(encoding="utf-8")
    assert all(re.search(rf"`(--trace )?{name}`", page) for names in (POLICIES, TRACES, ROUTERS) for name in names)


def test_a_simulation_needs_no_torch() -> None:
    call = "app(sys.argv[1:], standalone_mode=False)"
    code = f"import sys\nfrom runtime.cli import app\n{call}\nprint('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *SMALL, "-r", "20", "--devices", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.full
def test_measured_costs_of_the_demo_model(tmp_path: Path) -> None:
    result = runtime("simulate", "--measure", "demo", "--costs", "costs.json", "--max-num-seqs", "8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    costs, bundled = read_costs(str(tmp_path / "costs.json")), read_costs("demo")
    same = ("max_model_len", "kv_bytes", "hidden_bytes", "num_layers", "mlp_share", "prefill_chunk")
    assert [getattr(costs, name) for name in same] == [getattr(bundled, name) for name in same]
    assert costs.of_tokens(256) > 2 * costs.of_tokens(1) > 0
    assert 0 < costs.request < 1
    again = runtime(*SMALL, "--costs", "costs.json", "-r", "5", "--policy", "chunked", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
