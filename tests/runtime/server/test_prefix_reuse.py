"""Common prefixes are computed once, over HTTP: growing conversations, few-shot prompts, one system prompt for many
users. A salt keeps tenants apart."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import answer, serving_demo, serving_engine
from tiny_configs import DELTA_NET
from tiny_models import save_tiny_model

from compress.common.cli import demo_model_path
from runtime.core.config import RuntimeConfig
from runtime.llm import load_engine

BLOCK_SIZE = 4
EXAMPLES = "Berlin is in Germany. Paris is in France. Rome is in Italy. Madrid is in "
SYSTEM = {"role": "system", "content": "You answer questions about old castles, in one short and friendly sentence."}


@pytest.fixture
def api() -> Iterator[httpx.Client]:
    with (
        serving_demo(max_model_len=512, block_size=BLOCK_SIZE) as (url, *_),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def ask(api: httpx.Client, path: str, **body: Any) -> tuple[dict[str, Any], int, int]:
    """The first choice, how many tokens the prompt has and how many of them were found."""
    found = answer(api, f"/v1/{path}", **{"model": "demo", "temperature": 0, "max_tokens": 12, **body})
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0], found["usage"]["prompt_tokens"], cached


def test_a_conversation_that_goes_on_computes_only_what_is_new(api: httpx.Client) -> None:
    messages, previous = [SYSTEM], 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"And what about castle number {turn}?"})
        choice, length, cached = ask(api, "chat/completions", messages=messages)
        assert cached >= previous - previous % BLOCK_SIZE, "the prompt of the turn before is known"
        assert cached < length
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        previous = length


def test_many_users_share_a_system_prompt(api: httpx.Client) -> None:
    found = []
    for question in ("Who built it?", "How old is it?", "May I come in?"):
        messages = [SYSTEM, {"role": "user", "content": question}]
        found.append(ask(api, "chat/completions", messages=messages)[2])
    assert found[0] == 0
    assert found[1] == found[2] >= BLOCK_SIZE * 4


def test_examples_before_a_question_are_computed_once(api: httpx.Client) -> None:
    first = ask(api, "completions", prompt=EXAMPLES + "Spain. Lisbon is in")
    second = ask(api, "completions", prompt=EXAMPLES + "Spain. Vienna is in")
    alone = ask(api, "completions", prompt=EXAMPLES + "Spain. Vienna is in", cache_salt="another tenant")
    assert first[2] == alone[2] == 0
    assert second[2] >= second[1] - 4 - 2 * BLOCK_SIZE
    assert second[0] == alone[0], "and that changes nothing"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_salt_keeps_tenants_apart(api: httpx.Client, path: str) -> None:
    prompt = {"messages": [SYSTEM]} if path.startswith("chat") else {"prompt": EXAMPLES}
    found = [ask(api, path, **prompt, cache_salt=salt)[2] for salt in ("a", "b", "a", "b", None, "", None)]
    assert found[:2] == [0, 0]
    assert found[4] == 0
    assert found[2] == found[3] == found[5] == found[6] > 0


@pytest.mark.full
def test_a_conversation_with_a_hybrid_may_be_changed_at_any_message(tmp_path: Path) -> None:
    """It is new to the server; recurrent states are saved where the chat template ends its messages."""
    folder = save_tiny_model(tmp_path / "hybrid", "qwen3_5_text", **DELTA_NET | {"vocab_size": 8192})
    for file in demo_model_path().iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(file, folder)
    config = RuntimeConfig(device="cpu", dtype="float32", max_model_len=256, block_size=BLOCK_SIZE, num_state_slots=64)
    engine, tokenizer = load_engine(folder, config)
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[n % 2], "content": f"Castle {n} is older than that."} for n in range(7))]
    with serving_engine(engine, tokenizer, 32) as url, httpx.Client(base_url=url, timeout=60) as api:
        ask(api, "chat/completions", messages=messages)
        for count in (7, 5, 3, 1):
            kept, changed = messages[:count], {"role": "user", "content": "Why?"}
            _, same, _ = ask(api, "chat/completions", messages=kept, cache_salt="another tenant", max_tokens=1)
            _, _, cached = ask(api, "chat/completions", messages=[*kept, changed])
            # The beginning of the answer is not part of the messages.
            assert same - 2 * BLOCK_SIZE - 4 <= cached <= same
