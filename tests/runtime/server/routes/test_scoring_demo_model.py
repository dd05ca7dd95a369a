"""Scores, embeddings and tokens of the bundled demo model over HTTP, through the official client, equal transformers'
in float64."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from servers import answer, is_idle
from tiny_models import load_reference
from transformers import AutoTokenizer, PreTrainedModel

from compress.common.cli import demo_model_path

TEXTS = ["The castle was built in the", "Once", "In 1943, the naïve 日本 captain \U0001f600 said: " + "far away, " * 30]


@pytest.fixture(scope="module")
def client(demo_server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client
    assert is_idle(demo_server[1])


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return load_reference(demo_model_path())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model_path())


@torch.no_grad()
def expected_logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].log_softmax(-1)


def greedy(logprobs: Any) -> list[bool]:
    """Evaluation tools recognize the most likely token by bit-equal numbers."""
    pairs = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    return [own == max(top.values()) for own, top in pairs]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("as_ids", [False, True])
def test_echoed_scores(client: openai.OpenAI, reference: Any, tokenizer: Any, text: str, as_ids: bool) -> None:
    token_ids = tokenizer(text)["input_ids"]
    prompt = token_ids if as_ids else text
    answer = client.completions.create(
        model="demo", prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(token_ids) + 1
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    expected = expected_logprobs(reference, token_ids)
    following = torch.tensor(token_ids[1:])
    wanted = expected[:-1].gather(-1, following.unsqueeze(-1)).squeeze(-1).tolist()
    assert logprobs.token_logprobs[1:-1] == pytest.approx(wanted, abs=1e-10)
    assert logprobs.token_logprobs[-1] == pytest.approx(expected[-1].max().item(), abs=1e-10)
    assert greedy(logprobs) == [*(expected[:-1].argmax(-1) == following).tolist(), True]


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_point_at_the_tokens(client: openai.OpenAI, text: str) -> None:
    choice = client.completions.create(model="demo", prompt=text, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert choice.text == text
    logprobs = choice.logprobs
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\ufffd" not in token:
            assert text.startswith(token, offset)


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_of_answers_count_what_the_text_has(client: openai.OpenAI, tokenizer: Any, skips: bool) -> None:
    end, lone = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer("\U0001f600")["input_ids"][-1]
    options: dict[str, Any] = {"allowed_token_ids": [end, lone, tokenizer(" cat")["input_ids"][0]]}
    options |= {"ignore_eos": True, "skip_special_tokens": skips}
    found = client.completions.create(
        model="demo", prompt="A", logprobs=0, max_tokens=12, temperature=0, frequency_penalty=2, extra_body=options
    ).choices[0]
    tokens = found.logprobs.tokens
    assert {"<|im_end|>", "\ufffd", " cat"} == set(tokens)
    shown = ["" if skips and token == "<|im_end|>" else token for token in tokens]
    assert found.text == "".join(shown)
    assert found.logprobs.text_offset == [len("".join(shown[:place])) for place in range(len(shown))]


def test_streamed_scores_equal_whole_ones(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "prompt": TEXTS, "echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**options).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        pieces = [chunk.logprobs for chunk in mine if chunk.logprobs]
        for name in ("tokens", "text_offset"):
            assert [value for piece in pieces for value in getattr(piece, name)] == getattr(choice.logprobs, name)
        scores = [value for piece in pieces for value in piece.token_logprobs]
        assert scores[0] is None
        assert scores[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-10)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings(client: openai.OpenAI, reference: Any, tokenizer: Any, encoding: Any) -> None:
    options = {"encoding_format": encoding} if encoding else {}  # without it the client asks for base64 and decodes
    found = client.embeddings.create(model="demo", input=TEXTS, **options)
    token_ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    for entry, ids in zip(found.data, token_ids, strict=True):
        with torch.no_grad():
            hidden = reference.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        if encoding == "base64":
            assert isinstance(entry.embedding, str)
        else:
            tolerance = 1e-10 if encoding == "float" else 1e-5
            assert entry.embedding == pytest.approx(hidden.mean(0).tolist(), abs=tolerance)
    assert found.usage.prompt_tokens == sum(map(len, token_ids))


def test_everything_at_once(client: openai.OpenAI) -> None:
    """Scored, embedded and generated together, each as if it were alone."""

    def score(text: str) -> list[float]:
        answer = client.completions.create(model="demo", prompt=text, echo=True, logprobs=0, max_tokens=0)
        return answer.choices[0].logprobs.token_logprobs[1:]

    def embed(text: str) -> list[float]:
        return client.embeddings.create(model="demo", input=text, encoding_format="float").data[0].embedding

    def write(text: str) -> str:
        return client.completions.create(model="demo", prompt=text, max_tokens=24, seed=3).choices[0].text

    jobs = [(function, text) for text in TEXTS for function in (score, embed, write)]
    alone = [function(text) for function, text in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: job[0](job[1]), jobs))
    for first, second in zip(alone, together, strict=True):
        assert second == (first if isinstance(first, str) else pytest.approx(first, abs=1e-10))


def test_penalties_and_bias_change_the_answer(client: openai.OpenAI, tokenizer: Any) -> None:
    def write(**options: Any) -> str:
        answer = client.completions.create(model="demo", prompt=TEXTS[0], temperature=0, max_tokens=40, **options)
        return answer.choices[0].text

    plain = write()
    for options in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 1.8}}):
        assert write(**options) != plain
    token_id = tokenizer(" the", add_special_tokens=False)["input_ids"][0]
    assert write(logit_bias={str(token_id): 100}).startswith(" the the the")
    with pytest.raises(openai.BadRequestError, match=r"logit_bias.*id 999999"):
        write(logit_bias={"999999": 1})


def test_tokens_there_and_back(demo_server: Any, tokenizer: Any) -> None:
    with httpx.Client(base_url=demo_server[0]) as api:
        for text in TEXTS:
            for special in (True, False):
                tokens = answer(api, "/tokenize", prompt=text, add_special_tokens=special)["tokens"]
                assert tokens == tokenizer(text, add_special_tokens=special)["input_ids"]
            assert answer(api, "/detokenize", tokens=tokens) == {"prompt": text}
        refused = api.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers={"Content-Type": "application/json"})
        assert refused.status_code == 400
        assert "surrogate" in refused.json()["error"]["message"]
