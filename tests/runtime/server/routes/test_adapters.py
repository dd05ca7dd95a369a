"""Adapters over HTTP, of a server of the demo model in a process of its own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from lora_files import save_adapter, shapes_of
from servers import answer, serving, streamed

from compress.common.cli import demo_model_path
from runtime.core.config import DataParallelOptions, Limits, RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM
from runtime.model.loader import read_model
from runtime.served_engine import EngineSource, LoadingApart
from runtime.server.app import create_app
from runtime.transfer.options import TransferOptions

MODULES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "linear_backend": "reference",
    "num_blocks": 512,
    "max_loras": 2,
    "max_cpu_loras": 2,
}
PROMPT = "Once upon a time, in a country far away"
GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
NAMES = ("demo", "a", "b", "c")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from compress.checkpoint.reader import PackedCheckpoint

    spec = read_model(PackedCheckpoint.open(demo_model_path())).spec
    names = [linear.name for linear in spec.linears() if linear.name.endswith(MODULES)]
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(root / name, shapes_of(spec, names), seed=seed, size=0.2) for seed, name in enumerate("abc")
    }


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Path]) -> dict[str, str]:
    """Texts of all models, computed in a script."""
    llm = LLM(demo_model_path(), RuntimeConfig(**CONFIG, lora_modules=[f"a={adapters['a']}"]))
    for name in "bc":
        llm.load_adapter(name, adapters[name])
    found = llm.generate([PROMPT] * 4, SamplingParams(max_tokens=8, temperature=0), ["", "a", "b", "c"])
    return dict(zip(NAMES, (each.text for each in found), strict=True))


@pytest.fixture(scope="module", params=[1, 2], ids=["one engine", "two engines"])
def api(adapters: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of a server that began with one adapter, and loads others when it is asked to."""
    config = RuntimeConfig(**CONFIG, lora_modules=[f"a={adapters['a']}"])
    engines = DataParallelOptions(data_parallel_size=request.param)
    with LoadingApart.begin(EngineSource(demo_model_path(), config), engines, TransferOptions()) as loading:
        loading.describe_weights()
        engine = loading.finish(lambda *_: None)
        limits, options = Limits(engine.facts.max_model_len), {"adapters": {"a": adapters["a"]}}
        app = create_app(engine.client, engine.tokenizer, "demo", limits, changes_adapters=True, **options)
        with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client


@pytest.fixture
def all_loaded(api: httpx.Client, adapters: dict[str, Path]) -> Iterator[None]:
    for name in "bc":
        load(api, name, adapters[name])
    yield
    for name in "bc":
        api.post("/v1/unload_lora_adapter", json={"lora_name": name})


def load(api: httpx.Client, name: str, path: Path) -> httpx.Response:
    return api.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def test_texts_differ(expected: dict[str, str]) -> None:
    assert len(set(expected.values())) == len(NAMES)


@pytest.mark.usefixtures("all_loaded")
def test_requests_name_their_adapter_all_at_once(api: httpx.Client, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(16) as clients:
        names = NAMES * 4
        found = clients.map(lambda name: answer(api, "/v1/completions", model=name, **GREEDY), names)
    for name, body in zip(names, found, strict=True):
        assert (body["model"], body["choices"][0]["text"]) == (name, expected[name])


def test_a_stream_names_its_adapter(api: httpx.Client, expected: dict[str, str]) -> None:
    parts = streamed(api, "/v1/completions", model="a", **GREEDY)
    assert {part["model"] for part in parts} == {"a"}
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == expected["a"]


def test_other_routes_take_adapters(api: httpx.Client) -> None:
    conversation = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    bodies = {
        "/v1/chat/completions": conversation,
        "/v1/messages": conversation,
        "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
        "/v1/embeddings": {"input": "Hello"},
        "/score": {"text_1": "Hello", "text_2": "world"},
        "/v1/rerank": {"query": "Hello", "documents": ["world"]},
    }
    for path, body in bodies.items():
        own, adapted = (answer(api, path, model=name, **body) for name in ("demo", "a"))
        assert (own["model"], adapted["model"]) == ("demo", "a"), path
        if path in ("/v1/embeddings", "/score"):
            assert own["data"] != adapted["data"]


def test_a_long_body_may_name_an_adapter_that_was_loaded_later(api, all_loaded) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "logit_bias": {str(number): 0.5 for number in range(500)}}
    body |= {"user": "x" * 2**16}
    assert answer(api, "/v1/completions", model="b", **body)["model"] == "b"
    api.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
    assert api.post("/v1/completions", json={"model": "b", **body}).status_code == 404


def test_models_are_listed_with_their_parent(api: httpx.Client, adapters: dict[str, Path], all_loaded) -> None:
    found = {model["id"]: model for model in api.get("/v1/models").json()["data"]}
    assert list(found) == list(NAMES)
    assert [model["parent"] for model in found.values()] == [None, "demo", "demo", "demo"]
    assert found["c"]["root"] == str(adapters["c"])
    assert api.get("/v1/models/c").json() == found["c"]


def test_an_adapter_comes_and_goes(api: httpx.Client, adapters: dict[str, Path], expected: dict[str, str]) -> None:
    request = {"model": "late", **GREEDY}
    unknown = api.post("/v1/completions", json=request)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    for name in ("b", "c"):
        loaded = load(api, "late", adapters[name])
        assert (loaded.status_code, "late" in loaded.text) == (200, True)
        assert answer(api, "/v1/completions", **request)["choices"][0]["text"] == expected[name]
        assert load(api, "late", adapters["a"]).status_code == 400
        assert api.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
    assert api.post("/v1/completions", json=request).status_code == 404
    assert api.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404


def test_a_bad_adapter_is_refused_and_nothing_changes(api: httpx.Client, tmp_path: Path) -> None:
    refused = load(api, "bad", tmp_path / "missing")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
    wrong = save_adapter(tmp_path / "wrong", {"model.layers.0.self_attn.q_proj": (8, 8)})
    assert load(api, "bad", wrong).status_code == 400
    assert load(api, "demo", wrong).json()["error"]["param"] == "lora_name"
    assert api.post("/v1/completions", json={"model": "bad", **GREEDY}).status_code == 404
    assert [model["id"] for model in api.get("/v1/models").json()["data"]] == ["demo", "a"]


def test_adapters_do_not_change_without_permission(new_alphabet_app, tmp_path: Path) -> None:
    with serving(new_alphabet_app(adapters={"x": tmp_path})) as url, httpx.Client(base_url=url) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["alphabet", "x"]
        assert load(client, "y", tmp_path).status_code == 404
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 404
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        assert schemas["CompletionRequest"]["properties"]["model"]["enum"] == ["alphabet", "x"]


def test_routes_that_change_adapters_are_described(new_alphabet_app) -> None:
    with serving(new_alphabet_app(changes_adapters=True)) as url, httpx.Client(base_url=url) as client:
        described = client.get("/openapi.json").json()
    assert {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"} <= described["paths"].keys()
    assert "enum" not in described["components"]["schemas"]["CompletionRequest"]["properties"]["model"]
