"""`runtime serve a/ b/`: names, memory and virtual models, from the command line to the answers."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from lora_files import save_adapter, shapes_of
from runtime_command import runtime_here, serving
from servers import free_port

from compress.checkpoint.reader import PackedCheckpoint
from compress.common.cli import demo_model_path, draft_model_path
from compress.common.errors import ToolkitError
from runtime.cli.several_models import resolve_models
from runtime.core.config import RuntimeConfig
from runtime.model.loader import read_model
from runtime.model_sizes import measure, measure_apart

ROUTES = """
auto:
  rules: [{model: large, tools: true}]
  cascade: {small: small, large: large, threshold: -0.01, tokens: 4}
"""


def test_models_are_named_by_their_folder_or_as_asked_for(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    shutil.copytree(draft_model_path(), odd)
    found = resolve_models(["demo", f"small={odd}", str(odd)], None, code=False)
    assert [(model.name, model.path) for model in found] == [
        ("demo", demo_model_path()),
        ("small", odd),
        ("a=b", odd),
    ]
    assert [model.name for model in resolve_models(["demo"], "other", code=False)] == ["other"]
    assert [model.name for model in resolve_models([], None, code=False)] == ["demo"]


@pytest.mark.parametrize(
    ("given", "name", "problem"),
    [(["demo", "demo"], None, "two models.*'demo'"), (["demo", "a=demo"], "b", "NAME=MODEL")],
)
def test_names_are_distinct(given: list[str], name: str | None, problem: str) -> None:
    with pytest.raises(ToolkitError, match=problem):
        resolve_models(given, name, code=False)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["demo", "--route", "routes.yaml"], "--route has no effect on one model"),
        (["demo", "--model-memory", "1GiB"], "--model-memory has no effect on one model"),
        (["demo", "a=demo", "--lora-modules", "a=sql"], "--lora-modules names an adapter 'a', as a model is named"),
        (["demo", "a=demo", "--lora-modules", "sql=sql"], "sql holds no adapter_config.json"),
        (
            ["demo", "a=demo", "--role", "prefill", "--transfer-socket", "s"],
            "transfer-socket has pages of one model",
        ),
        (["demo", "a=demo", "--no-api-process"], "--no-api-process does not go with several models"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: list[str], problem: str) -> None:
    ended = runtime_here("serve", "--port", "0", *options, cwd=tmp_path)
    assert ended.returncode == 1
    assert problem in ended.stderr


def test_an_adapter_has_another_name_than_a_virtual_model(tmp_path: Path) -> None:
    save_adapter(tmp_path / "sql", {}, base_model_name_or_path="large")
    (tmp_path / "routes.yaml").write_text(ROUTES)
    options = ["large=demo", "small=demo", "--route", "routes.yaml", "--lora-modules", "auto=sql"]
    ended = runtime_here("serve", "--port", "0", *options, cwd=tmp_path)
    assert "names an adapter 'auto', as a virtual model of --route is named" in ended.stderr


def test_sizes_are_those_of_runtime_memory() -> None:
    config = RuntimeConfig(device="cpu", kv_memory_bytes=64 * 2**20, max_model_len=512)
    small, large = (measure(path, config) for path in (draft_model_path(), demo_model_path()))
    assert large.max_model_len == 512
    assert large.device == "cpu"
    assert small.num_bytes < large.num_bytes < large.free_bytes
    wider = measure(demo_model_path(), RuntimeConfig(device="cpu", kv_memory_bytes=96 * 2**20, max_model_len=512))
    assert wider.num_bytes - large.num_bytes == pytest.approx(32 * 2**20, rel=0.02)
    adapted = measure(demo_model_path(), replace(config, enable_lora=True, kv_offload_bytes=2**20))
    assert adapted.num_bytes > large.num_bytes + 2**20


@pytest.mark.full
def test_sizes_are_measured_in_a_process_whose_refusals_arrive(tmp_path: Path) -> None:
    config = RuntimeConfig(device="cpu")
    (found,) = measure_apart([(demo_model_path(), config)])
    assert found.num_bytes == measure(demo_model_path(), config).num_bytes
    with pytest.raises(ToolkitError, match=r"model\.safetensors does not exist"):
        measure_apart([(tmp_path, config)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, httpx.Client]]:
    """A large, a small and a broken model, two of which fit in the memory."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(draft_model_path(), folder / "broken")
    (folder / "routes.yaml").write_text(ROUTES)
    models = ["large=demo", f"small={draft_model_path()}", "broken=broken"]
    options = ["--route", "routes.yaml", "--kv-memory", "16MiB", "--model-memory", "900MiB", "--max-model-len", "512"]
    with serving(*models, *options, cwd=folder) as (process, url, _), httpx.Client(base_url=url, timeout=120) as api:
        (folder / "broken" / "model.safetensors").unlink()
        yield process, api


def ask(api: httpx.Client, model: str, **body: Any) -> Any:
    fields = {"model": model, "prompt": "The river", "max_tokens": 8, "temperature": 0}
    return api.post("/v1/completions", json=fields | body)


@pytest.mark.full
def test_models_answer_by_name_and_by_confidence(server: tuple[Any, httpx.Client]) -> None:
    _, api = server
    large, small = ask(api, "large").json(), ask(api, "small").json()
    assert (large["model"], small["model"]) == ("large", "small")
    found = ask(api, "auto").json()
    assert (found["model"], found["choices"]) == ("large", large["choices"])
    with ThreadPoolExecutor(8) as pool:
        texts = [
            each.json()["choices"][0]["text"] for each in pool.map(lambda name: ask(api, name), ["large", "small"] * 4)
        ]
    assert set(texts) == {large["choices"][0]["text"], small["choices"][0]["text"]}
    assert ask(api, "none").status_code == 404


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_says_why_and_the_others_answer(server: tuple[Any, httpx.Client]) -> None:
    _, api = server
    refused = ask(api, "broken")
    assert refused.status_code == 500
    assert "the model broken cannot be loaded" in refused.json()["error"]["message"]
    assert "safetensors" in refused.json()["error"]["message"]
    assert ask(api, "large").status_code == 200
    metrics = api.get("/metrics").text
    assert 'runtime_model_loaded{model_name="broken"} 0.0' in metrics
    assert 'runtime_model_loaded{model_name="large"} 1.0' in metrics


@pytest.mark.full
def test_an_engine_that_is_killed_ends_its_requests_only_and_comes_back(server: tuple[Any, httpx.Client]) -> None:
    process, api = server
    expected = ask(api, "small").json()["choices"]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, api, "small", max_tokens=480, ignore_eos=True)
        while not api.get("/health").json()["running"]:
            assert not long.done()
            time.sleep(0.01)
        for children in Path(f"/proc/{process.pid}/task").glob("*/children"):  # of the threads that started them
            for child in map(int, children.read_text().split()):
                if b"served_engine" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)
        assert long.result().status_code == 500
    assert api.get("/health").status_code == 200
    assert ask(api, "small").json()["choices"] == expected
    assert ask(api, "large").status_code == 200


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path, int]]:
    """Two models of which one at a time fits in the memory, with adapters, prompts computed apart, and events."""
    folder, port = tmp_path_factory.mktemp("adapted"), free_port()
    for name, path in {"large": demo_model_path(), "small": draft_model_path()}.items():
        spec = read_model(PackedCheckpoint.open(path)).spec
        modules = [linear.name for linear in spec.linears() if linear.name.endswith(("q_proj", "down_proj"))]
        for seed, kind in enumerate(("first", "later")):
            base = {"base_model_name_or_path": f"org/{name}"}
            save_adapter(folder / f"{kind}-{name}", shapes_of(spec, modules), seed=seed, size=0.3, **base)
    models = ["large=demo", f"small={draft_model_path()}", "--kv-memory", "16MiB", "--max-model-len", "512"]
    models += ["--model-memory", "1200MiB", "--prefill-engines", "1", "--kv-offload", "16MiB", "--local-prefill", "16"]
    options = ["--lora-modules", "one=first-large", "--allow-runtime-lora-updating"]
    options += ["--lora-modules", '{"name": "two", "path": "first-small", "base_model_name": "small"}']
    options += ["--kv-events", f"tcp://*:{free_port()}", "--kv-events-replay", f"tcp://*:{port}"]
    with serving(*models, *options, cwd=folder) as (_, url, _), httpx.Client(base_url=url, timeout=120) as api:
        yield api, folder, port


def text(api: httpx.Client, model: str) -> str:
    response = ask(api, model, prompt="The river runs through the old town " * 8)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    return response.json()["choices"][0]["text"]


@pytest.mark.full
def test_each_model_has_adapters_which_outlive_its_engine(adapted: tuple[httpx.Client, Path, int]) -> None:
    api, folder, _ = adapted
    listed = {each["id"]: each["parent"] for each in api.get("/v1/models").json()["data"]}
    assert listed == {"large": None, "small": None, "one": "large", "two": "small"}
    body = {"lora_name": "three", "lora_path": str(folder / "later-small")}
    assert api.post("/v1/load_lora_adapter", json=body).status_code == 200  # small is loaded for it
    assert api.post("/v1/load_lora_adapter", json=body | {"base_model_name": "large"}).status_code == 400
    wrong = api.post("/v1/load_lora_adapter", json=body | {"lora_name": "x", "base_model_name": "large"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lora_path")
    before = {name: text(api, name) for name in ("small", "two", "three", "large", "one")}
    assert len(set(before.values())) == len(before)
    assert {name: text(api, name) for name in reversed(before)} == before  # each model is loaded again
    assert api.post("/v1/unload_lora_adapter", json={"lora_name": "three"}).status_code == 200
    assert ask(api, "three").status_code == 404
    loads = re.findall(r"\nruntime_model_loads_total\S* (\S+)", api.get("/metrics").text)
    assert min(map(float, loads)) > 1


@pytest.mark.full
def test_each_model_publishes_events_and_prompts_are_computed_apart(adapted: tuple[httpx.Client, Path, int]) -> None:
    api, _, port = adapted
    zmq = pytest.importorskip("zmq")
    for place, name in enumerate(("large", "small")):
        text(api, name)
        computed = rf'prompt_tokens_total{{engine="prefill-0",model_name="{name}"}} [1-9]'
        deadline = time.monotonic() + 30
        while not re.search(computed, api.get("/metrics").text):  # a new engine may answer before it is connected
            assert time.monotonic() < deadline
            ask(api, name, prompt=f"{time.monotonic()} " * 20, max_tokens=1)
        with zmq.Context.instance().socket(zmq.DEALER) as reader:
            reader.set(zmq.RCVTIMEO, 10_000)
            reader.connect(f"tcp://127.0.0.1:{port + place}")
            reader.send_multipart((b"", bytes(8)))
            assert reader.recv_multipart()[1].endswith(f"@{name}".encode())
