"""Any two models side by side: folders, GGUF files and servers over real HTTP, with answers known another way."""

import json
import math
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from folders import change_config, change_tensors, private_copy
from servers import running, serving_demo, url_of
from torch import Tensor

from calibration.sequences import load_tokenizer
from compress.checkpoint.gguf.export import export_gguf
from compress.cli import main
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, DataError
from compress.evaluate.layers import layer_errors
from compress.evaluate.perplexity import Windows, evaluate
from compress.evaluate.positions import TopTokens, compare_positions, on_common_events
from compress.evaluate.scorers import Scorer, TransformersScorer, open_scorer
from compress.evaluate.server import Server, ServerScorer
from compress.evaluate.session import EvaluationRequest, run_evaluation

SHORT = ["--tokens", "256", "--max-seq-length", "64"]
EXACT = ["--dtype", "float64"]
Compare = Callable[..., dict[str, Any]]


EMBEDDING = "model.embed_tokens.weight"


def padded(rows: Tensor) -> Tensor:
    return torch.cat((rows, torch.full((64, rows.shape[1]), 0.01, dtype=rows.dtype)))


def scaled(block: int, factor: float) -> Callable[[dict[str, Tensor]], object]:
    """Edits one linear of a block."""
    return lambda tensors: tensors[f"model.layers.{block}.mlp.down_proj.weight"].mul_(factor)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> Compare:
    """Runs `compress compare-logits ... --json` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["compress", "compare-logits", *map(str, arguments), *SHORT, "--json"])
        with pytest.raises(SystemExit) as stop:
            main()
        out, error = capsys.readouterr()
        return {"status": stop.value.code or 0, "error": error} | (json.loads(out) if out else {})

    return run


def test_a_packed_model_is_itself(compare: Compare, make_packed) -> None:
    packed, dequantized = make_packed()
    for other in (packed, dequantized):
        found = compare(packed, other, *EXACT, "--by-layer")
        assert found["status"] == 0
        assert found["kl_mean"] == pytest.approx(0, abs=1e-12)
        assert found["acceptance"] == pytest.approx(1, abs=1e-6)
        assert found["flips"] == 0
        assert [each["relative_error"] for each in found["layers"]] == pytest.approx([0, 0, 0], abs=1e-12)


def test_streamed_figures_are_those_of_whole_models(compare: Compare, make_packed, tiny_model) -> None:
    packed, dense = make_packed()[0], tiny_model(dtype=torch.float32)
    whole, streamed = compare(dense, packed), compare(dense, packed, "--stream")
    assert whole["kl_mean"] > 0
    assert 0 < whole["acceptance"] < 1
    assert streamed == whole | {"error": streamed["error"]}


@pytest.mark.full
def test_transformers_logits_give_the_same_figures(make_packed, tiny_model) -> None:
    packed, dense = make_packed()[0], tiny_model(dtype=torch.float32)
    request = EvaluationRequest(packed, dense, length=64, max_tokens=256, dtype="float64")
    report = run_evaluation(request)
    p, q = (TransformersScorer(path, dtype="float64").logits(report.windows.tokens) for path in (dense, packed))
    p, q = (side[:, :-1].double().softmax(-1) for side in (p, q))
    assert report.result.kl_mean == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3)
    assert report.result.acceptance == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), rel=1e-4)
    assert report.result.flips == pytest.approx(float((p.argmax(-1) != q.argmax(-1)).double().mean()), abs=1e-2)


def test_a_gguf_file_is_compared_with_its_folder(compare: Compare, tmp_path: Path) -> None:
    file = tmp_path / "demo.gguf"
    export_gguf(demo_model_path(), file)
    found = compare("demo", file, *EXACT)
    assert found["status"] == 0, found["error"]
    assert found["kl_mean"] == pytest.approx(0, abs=1e-6)
    assert found["acceptance"] == pytest.approx(1, abs=1e-3)


def test_the_first_block_that_differs_is_the_first_with_an_error(tmp_path: Path, tiny_model) -> None:
    dense = tiny_model(dtype=torch.float32)
    other = private_copy(dense, tmp_path / "other")
    change_tensors(other, scaled(1, 1.5))
    tokens = torch.randint(3, 112, (3, 20), generator=torch.Generator().manual_seed(0))
    found = layer_errors(dense, other, tokens, {"dtype": "float64"})
    assert [each.block for each in found] == [f"model.layers.{index}" for index in range(3)]
    assert found[0].relative_error == 0
    assert found[1].relative_error > 1e-6
    assert found[1].standard_error is not None
    with pytest.raises(DataError, match=r"3 blocks .*\d+ of"):
        layer_errors(dense, demo_model_path(), tokens, {})


@pytest.fixture(scope="module")
def demo_url():
    """URL of a server of the demo model in float64."""
    with serving_demo() as (url, _engine, _tokenizer):
        yield url


def test_a_folder_is_compared_with_its_own_server(compare: Compare, demo_url: str) -> None:
    for pair in ((demo_model_path(), demo_url), (f"{demo_url}/v1", "demo"), (demo_url, demo_url)):
        servers = ["--tokenizer", "demo"] if pair == (demo_url, demo_url) else []
        found = compare(*pair, *servers, *EXACT)
        assert found["status"] == 0, found["error"]
        assert found["kl_mean"] == pytest.approx(0, abs=1e-6)
        assert found["acceptance"] == pytest.approx(1, abs=1e-4)
        assert found["flips"] <= 0.01
        assert found["top_tokens"] == 20
        assert found["perplexity"] == pytest.approx(found["baseline_perplexity"], rel=1e-5)
        assert any("lower bound" in each for each in found["warnings"])


def test_figures_of_a_server_are_bounds_of_those_of_its_folder(compare: Compare, demo_url: str, tmp_path: Path) -> None:
    other = private_copy(demo_model_path(), tmp_path / "other")
    change_tensors(other, scaled(2, 1.4))
    whole, of_server = compare("demo", other, *EXACT), compare(demo_url, other, *EXACT)
    assert 0.3 * whole["kl_mean"] < of_server["kl_mean"] < whole["kl_mean"]
    assert whole["acceptance"] < of_server["acceptance"] < 1
    assert of_server["flips"] == pytest.approx(whole["flips"], abs=0.01)
    assert of_server["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-9)


def other_server(app: FastAPI) -> AbstractContextManager[uvicorn.Server]:
    """Runs an application that is not ours."""
    return running(uvicorn.Server(uvicorn.Config(app, log_config=None)))


def test_a_server_that_only_echoes_is_asked_that_way(demo_url: str) -> None:
    """Refuses `prompt_logprobs` and more than 5 alternatives, as OpenAI's own API."""
    import httpx

    app, asked = FastAPI(), []

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "demo"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        asked.append({"prompt_logprobs", "echo"} & body.keys())
        if "prompt_logprobs" in body or body["logprobs"] > 5:
            return Response("no", 400)
        async with httpx.AsyncClient(base_url=demo_url, timeout=60) as client:
            answer = await client.post("/v1/completions", json=body)
        return Response(answer.content, media_type="application/json")

    tokens = torch.tensor([load_tokenizer(demo_model_path())("The castle was built in the north of")["input_ids"]])
    with other_server(app) as server:
        found = ServerScorer(Server(url_of(server)), load_tokenizer(demo_model_path())).states(tokens.repeat(2, 1))
    expected = open_scorer(demo_model_path(), dtype="float64").logits(tokens).log_softmax(-1)[:, :-1]
    assert [each for each in asked if each == {"prompt_logprobs"}] == [{"prompt_logprobs"}]
    known = found.tokens[0] >= 0
    assert int(known.sum(-1).min()) >= 4
    given = expected[0].gather(-1, found.tokens[0].clamp(min=0))
    torch.testing.assert_close(found.logp[0][known], given[known], rtol=0, atol=1e-5)


@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_server_that_scores_no_prompts_is_refused(compare: Compare, status: int) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "demo"}]}

    @app.post("/v1/completions")
    def completions() -> Response:
        return Response("no", status)

    with other_server(app) as server:
        found = compare("demo", url_of(server))
        assert url_of(server) in found["error"]
    assert found["status"] == 1
    assert len(found["error"].splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("http://127.0.0.1:1", "http://127.0.0.1:1"), "--tokenizer"),
        (("http://127.0.0.1:1", "demo", "--stream"), "--stream"),
        (("demo", "http://127.0.0.1:1", "--stream"), "--stream"),
        (("http://127.0.0.1:1", "demo", "--by-layer"), "--by-layer"),
        (("http://127.0.0.1:1", "demo"), "address"),
    ],
)
def test_what_servers_cannot_do_is_one_line(compare: Compare, arguments: tuple[str, ...], option: str) -> None:
    found = compare(*arguments)
    assert found["status"] == 1
    assert option in found["error"]
    assert len(found["error"].splitlines()) == 1


def test_models_of_other_vocabularies_are_refused_with_their_sizes(compare: Compare, tmp_path: Path) -> None:
    other = private_copy(demo_model_path(), tmp_path / "other")
    file = other / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    first, second = (next(key for key, value in vocabulary.items() if value == token) for token in (1000, 1001))
    vocabulary[first], vocabulary[second] = 1001, 1000
    swap_all = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    names = list(swap_all)
    text["model"]["vocab"] = {name: token for token, name in enumerate([*names[:300], *names[:299:-1]])}
    file.write_text(json.dumps(text))
    found = compare("demo", other)
    assert found["status"] == 1
    assert re.search(r"\d+ of the \d+ tokens", found["error"])


def test_a_padded_vocabulary_is_compared_on_its_common_part(compare: Compare, tmp_path: Path) -> None:
    dense = demo_model_path()
    wider = private_copy(dense, tmp_path / "wider")
    size = json.loads((dense / "config.json").read_text())["vocab_size"]
    change_config(wider, vocab_size=size + 64)
    change_tensors(wider, lambda tensors: tensors.update({EMBEDDING: padded(tensors[EMBEDDING])}))
    found = compare(dense, wider, *EXACT)
    assert found["status"] == 0, found["error"]
    assert found["kl_mean"] == pytest.approx(0, abs=1e-9)
    assert any(f"{size} " in each and f"{size + 64}" in each for each in found["warnings"])


class _Given(Scorer):
    """Distributions that are given, whatever the tokens are."""

    vocab_size = 6

    def __init__(self, known: TopTokens) -> None:
        self.known = known

    def states(self, tokens: Tensor) -> TopTokens:
        return self.known

    def predict(self, states: TopTokens, who: str) -> TopTokens:
        return states


def test_events_of_two_servers_are_the_tokens_that_both_know() -> None:
    nothing = -math.inf
    first = TopTokens(torch.tensor([[[0, 1, 2]]]), torch.tensor([[[0.5, 0.3, 0.1]]], dtype=torch.float64).log())
    second = TopTokens(
        torch.tensor([[[1, 0, -1]]]), torch.tensor([[[math.log(0.4), math.log(0.2), nothing]]], dtype=torch.float64)
    )
    p, q = (side.exp()[0, 0] for side in on_common_events(first, second))
    torch.testing.assert_close(p, torch.tensor([0.5, 0.3, 0, 0.2], dtype=torch.float64))
    torch.testing.assert_close(q, torch.tensor([0.2, 0.4, 0, 0.4], dtype=torch.float64))
    found = evaluate(_Given(second), Windows(torch.tensor([[5, 1]]), "", "", ""), _Given(first))
    expected = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.4) + 0.2 * math.log(0.2 / 0.4)
    assert found.kl_mean == pytest.approx(expected)
    assert found.acceptance == pytest.approx(0.2 + 0.3 + 0.2)
    assert found.flips == 1
    assert found.perplexity == pytest.approx(1 / 0.4)
    logits = torch.zeros(1, 1, 2)
    with pytest.raises(CheckpointError, match=r"token 2, .* 2 tokens"):
        compare_positions(logits.log_softmax(-1), first, torch.tensor([[1]]))


def test_bounds_hold_for_any_distributions(tmp_path: Path) -> None:
    p, q = (torch.randn(1, 50, 40, generator=torch.Generator().manual_seed(seed)).double() for seed in (0, 1))
    p, q = p.log_softmax(-1), (p + 0.5 * q).log_softmax(-1)
    following = torch.randint(40, (1, 50), generator=torch.Generator().manual_seed(2))
    whole = compare_positions(q, p, following)
    for count in (1, 5, 20):
        top = p.topk(count).indices
        found = compare_positions(q, TopTokens(top, p.gather(-1, top)), following)
        assert (found.divergence <= whole.divergence + 1e-12).all()
        assert (found.acceptance >= whole.acceptance - 1e-12).all()
        assert torch.equal(found.agreement, whole.agreement)
    assert float(found.divergence.mean() / whole.divergence.mean()) > 0.5
