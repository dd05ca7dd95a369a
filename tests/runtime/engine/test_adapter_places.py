"""A step computes at most `max_loras` adapters, and every sequence gets its turn."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from lora_files import adapted_engine, save_adapter, shapes_of
from tiny_models import save_tiny_model

from runtime.core.request import Request, RequestOptions, SamplingParams, Sequence
from runtime.core.step import StepPlan
from runtime.engine.engine import Engine
from runtime.engine.planned_step import with_places

NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class NamedAdapter:
    name: str

    @property
    def digest(self) -> str:
        return self.name


def sequences(names: str) -> list[Sequence]:
    """One for each letter, which names its adapter; `-` for none, capitals are held."""
    found = []
    for number, name in enumerate(names):
        adapter = None if name == "-" else NamedAdapter(name.lower())
        sequence = Sequence(Request(f"{name}{number}", (1,), SamplingParams(), 0, adapter=adapter), [1])
        sequence.is_held = name.isupper()
        found.append(sequence)
    return found


@pytest.mark.parametrize(
    ("running", "waiting", "limit", "ready"),
    [
        ("", "abc", 1, "abc"),
        ("a", "abc", 1, "a"),
        ("a", "ba-a", 1, "-"),
        ("a", "ba-a", 2, "ba-a"),
        ("ab", "c-ab-", 2, "--"),
        ("ab", "Ca-b", 2, "a-b"),
        ("--", "a-", 1, "a-"),
        ("a", "-", 1, "-"),
    ],
)
def test_which_waiting_sequences_may_enter(running: str, waiting: str, limit: int, ready: str) -> None:
    found = with_places(sequences(waiting), sequences(running), limit)
    assert "".join(sequence.id[0] for sequence in found) == ready


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def engine_with_adapters(folder: Path, **options: object) -> Engine:
    engine = adapted_engine(folder, {}, **options)
    shapes = shapes_of(engine.runner.decoder.config.spec, engine.runner.adapters.modules)
    for seed, name in enumerate(NAMES):
        engine.adapters.load(name, save_adapter(folder.parent / name, shapes, seed=seed))
    return engine


@pytest.mark.parametrize("max_loras", [1, 2])
def test_no_step_holds_more_adapters_than_allowed_and_all_end(folder: Path, max_loras: int, monkeypatch) -> None:
    engine = engine_with_adapters(folder, max_loras=max_loras, num_blocks=24)
    seen, submit = Counter[int](), engine.runner.submit

    def counted(plan: StepPlan):
        seen[len({entry.sequence.request.options.adapter for entry in plan.entries} - {""})] += 1
        return submit(plan)

    monkeypatch.setattr(engine.runner, "submit", counted)
    for number in range(24):
        name = ("", *NAMES)[number * 7 % 4]
        options = RequestOptions(adapter=name, client=f"client {number % 3}")
        sampling = SamplingParams(max_tokens=1 + number % 9, temperature=0, n=1 + number % 2)
        engine.add_request(list(range(1, 4 + number % 11)), sampling, None, options)
        engine.step()
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert max(seen) == max_loras


def test_what_waits_for_a_place_comes_before_later_requests_of_running_adapters(folder: Path) -> None:
    engine = engine_with_adapters(folder, max_loras=1)
    sampling, started = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), []
    for name in ("a", "b", "a", ""):
        engine.add_request([1, 2, 3], sampling, f"{name}{len(started)}", RequestOptions(adapter=name))
        started.append(name)
    order: list[str] = []
    while engine.has_work:
        order += [delta.request_id for delta in engine.step() if delta.num_output_tokens == 1]
    assert order == ["a0", "3", "b1", "a2"]


def test_metrics_name_the_adapters_in_use(folder: Path) -> None:
    engine = engine_with_adapters(folder, max_loras=2)
    sampling = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    for name in ("b", "", "a", "b", "c"):
        engine.add_request([1, 2, 3], sampling, None, RequestOptions(adapter=name))
    engine.step()
    labels = 'max_lora="2",model_name="m",running_lora_adapters="a,b",waiting_lora_adapters="c"'
    assert f'vllm:lora_requests_info{{engine="0",{labels}}}' in engine.render_metrics("m")
    while engine.has_work:
        engine.step()
    labels = 'max_lora="2",model_name="m",running_lora_adapters="",waiting_lora_adapters=""'
    found = [line for line in engine.render_metrics("m").splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert [line.rpartition("}")[0] for line in found] == [f'vllm:lora_requests_info{{engine="0",{labels}']
