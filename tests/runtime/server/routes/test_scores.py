"""`/v1/rerank` and `/score`: the likelihood of a query after each document."""

import math
from typing import Any

import httpx
import pytest
from servers import answer

DOCUMENTS = [
    "The river was named after the town, and the town lies near the sea.",
    "He played football for the national team and scored three goals.",
    "The album reached number one on the music charts in 1995.",
]


def refused(api: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = api.post(path, json={"model": "alphabet", **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def mean_of(first: int, count: int) -> float:
    """Returns the score by the scripted engine, whose i-th token has the log-probability -i/8."""
    return math.exp(-sum(range(first, first + count)) / count / 8)


def test_scores_are_geometric_means_of_the_querys_probabilities(api: httpx.Client) -> None:
    found = answer(api, path="/v1/rerank", model="alphabet", query="QQ", documents=["abc", {"text": "x"}, "abcdef"])
    scores = [(each["index"], each["relevance_score"]) for each in found["results"]]
    assert scores == [(1, mean_of(3, 2)), (0, mean_of(5, 2)), (2, mean_of(8, 2))]
    assert [each["document"]["text"] for each in found["results"]] == ["x", "abc", "abcdef"]
    assert found["usage"] == {"prompt_tokens": 22, "total_tokens": 22}


def test_the_best_without_their_texts(api: httpx.Client) -> None:
    fields = {"query": "Q", "documents": ["abc", "x"], "top_n": 1, "return_documents": False}
    found = answer(api, path="/v1/rerank", model="alphabet", **fields)
    assert found["results"] == [{"index": 1, "relevance_score": mean_of(3, 1)}]


def test_templates_and_shortened_documents(api: httpx.Client) -> None:
    fields = {"query": "Q", "documents": ["abcdef"], "template": "<{document}>{query}"}
    (whole,) = answer(api, path="/v1/rerank", model="alphabet", **fields)["results"]
    (cut,) = answer(api, path="/v1/rerank", model="alphabet", max_tokens_per_doc=2, **fields)["results"]
    assert whole["relevance_score"] == mean_of(8, 1)
    assert cut["relevance_score"] == mean_of(4, 1)


@pytest.mark.parametrize("queries", ["Q", ["Q"], ["Q", "Q"]])
def test_pairs(api: httpx.Client, queries: Any) -> None:
    found = answer(api, path="/score", model="alphabet", text_1=queries, text_2=["ab", "a"])
    assert found["data"] == [
        {"index": 0, "object": "score", "score": mean_of(4, 1)},
        {"index": 1, "object": "score", "score": mean_of(3, 1)},
    ]


def test_more_documents_than_the_queue_takes(api: httpx.Client) -> None:
    found = answer(api, path="/score", model="alphabet", text_1="Q", text_2=["x" * length for length in range(1, 12)])
    assert [each["score"] for each in found["data"]] == [mean_of(2 + length, 1) for length in range(1, 12)]


def test_wrong_bodies_are_refused(api: httpx.Client) -> None:
    assert "3 documents" in refused(api, "/score", text_1=["a", "b"], text_2=["c", "d", "e"])["message"]
    assert refused(api, "/v1/rerank", query="", documents=["a"])["param"] == "query"
    assert refused(api, "/v1/rerank", query="q", documents=[])["param"] == "documents"
    assert refused(api, "/v1/rerank", query="q", documents=["a"], template="{query}{document}")["param"] == "template"
    assert refused(api, "/v1/rerank", query="q", documents=["a" * 200])["code"] == "context_length_exceeded"
    assert "no tokens" in refused(api, "/score", text_1="", text_2="a")["message"]


QUERIES = [
    "The town lies near the sea.",
    "Who scored three goals for the national team?",
    "Which album reached the music charts?",
]


def test_the_document_that_a_query_is_about_comes_first(demo_server: tuple[str, Any, Any]) -> None:
    with httpx.Client(base_url=demo_server[0], timeout=60) as client:
        fields = {"path": "/v1/rerank", "model": "demo", "documents": DOCUMENTS, "top_n": 1}
        best = [answer(client, query=query, **fields)["results"][0]["index"] for query in QUERIES]
    assert best == [0, 1, 2]


def test_scores_are_those_of_scored_prompts(demo_server: tuple[str, Any, Any]) -> None:
    url, _, tokenizer = demo_server
    with httpx.Client(base_url=url, timeout=60) as client:
        query = "The town lies near the sea."
        found = answer(client, path="/v1/rerank", model="demo", query=query, documents=DOCUMENTS)["results"]
        first = tokenizer.encode(DOCUMENTS[0] + "\n\n")
        last = tokenizer.encode(query, add_special_tokens=False)
        fields = {"prompt": first + last, "max_tokens": 0, "echo": True, "logprobs": 0}
        (scored,) = answer(client, path="/v1/completions", model="demo", **fields)["choices"]
    assert found[0]["index"] == 0
    expected = math.exp(sum(scored["logprobs"]["token_logprobs"][-len(last) :]) / len(last))
    assert found[0]["relevance_score"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("path", "others"), [("/v1/rerank", ("/rerank", "/v2/rerank")), ("/score", ("/v1/score",))])
def test_paths_of_other_servers(api: httpx.Client, path: str, others: tuple[str, ...]) -> None:
    fields = {"query": "q", "documents": ["a"]} if "rerank" in path else {"text_1": "q", "text_2": "a"}
    answers = [api.post(each, json={"model": "alphabet", **fields}).json() for each in (path, *others)]
    found = [each.get("results") or each["data"] for each in answers]
    assert found == [found[0]] * len(found)
