"""Conversations with the demo model: commands, several turns, the prefix cache, stopping."""

import json
from pathlib import Path

import pytest

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError, ToolkitError
from runtime.cli.chat import COMMANDS, Conversation, Session, run_command
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM, load_engine

GREEDY = SamplingParams(max_tokens=24, temperature=0)
CONFIG = RuntimeConfig(device="cpu", dtype="float64", linear_backend="reference", num_blocks=64)


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def loaded() -> tuple:
    return load_engine(demo_model_path(), CONFIG)


@pytest.fixture
def session(loaded: tuple) -> Session:
    return Session(*loaded, Conversation(GREEDY))


def say(session: Session, text: str) -> str:
    return "".join(session.ask(text, never))


def is_idle(session: Session) -> bool:
    pool = session.engine.scheduler.pool
    return not session.engine.has_work and pool.num_free == pool.num_blocks


def test_turns_are_those_of_the_chat_template(session: Session) -> None:
    session.conversation.system = "Be kind."
    first, second = say(session, "Hello"), say(session, "Who built the castle?")
    llm = LLM(demo_model_path(), CONFIG)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    assert llm.chat([messages], GREEDY)[0].text == first
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Who built the castle?"}]
    assert llm.chat([messages], GREEDY)[0].text == second
    assert session.conversation.messages == [*messages, {"role": "assistant", "content": second}]
    assert is_idle(session)


def test_later_turns_find_earlier_ones_in_the_cache(session: Session) -> None:
    say(session, "Tell me about the river, the mill and the old road that leads to the town.")
    assert session.figures.output_tokens > 0
    say(session, "And then?")
    assert session.figures.cached_tokens >= 32
    assert session.figures.prompt_tokens > session.figures.cached_tokens
    assert f"({session.figures.cached_tokens} cached)" in str(session.figures)


def test_stopped_answers_stay_and_free_the_engine(session: Session) -> None:
    pieces: list[str] = []
    for piece in session.ask("Hello", lambda: len(pieces) >= 5):
        pieces.append(piece)
    assert len(pieces) == 5
    assert session.conversation.turns[1] == {"role": "assistant", "content": "".join(pieces)}
    assert is_idle(session)
    assert say(session, "Go on") != ""


def test_answer_nobody_reads_to_its_end_frees_the_engine(session: Session) -> None:
    answer = session.ask("Hello", never)
    next(answer)
    assert not is_idle(session)
    answer.close()
    assert is_idle(session)
    assert session.conversation.turns == []


def test_conversation_beyond_the_context(session: Session) -> None:
    with pytest.raises(RequestError, match=r"the conversation has \d+ tokens and the context 1024. Use /reset"):
        say(session, "word " * 2000)
    assert session.conversation.turns == []
    run_command(session.conversation, "/temperature 0")
    session.conversation.sampling = SamplingParams(max_tokens=5000, temperature=0, ignore_eos=True)
    say(session, "word " * 900)
    assert session.figures.prompt_tokens + session.figures.output_tokens == 1024
    assert session.figures.is_cut


def test_engine_failure_keeps_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(session.engine.runner, "execute", broken)
    with pytest.raises(ToolkitError, match="the answer failed: the step failed: RuntimeError: boom"):
        say(session, "Hello")
    assert session.conversation.turns == []
    assert is_idle(session)


def test_commands(tmp_path: Path) -> None:
    conversation = Conversation(GREEDY)
    assert run_command(conversation, "/system  Be brief. ") == "system message set"
    assert conversation.system == "Be brief."
    conversation.add_turn("a", "b")
    assert run_command(conversation, f"/save {tmp_path / 'c.json'}") == f"3 messages in {tmp_path / 'c.json'}"
    assert json.loads((tmp_path / "c.json").read_text()) == {"messages": conversation.messages}
    assert run_command(conversation, "/temperature 0.5") == run_command(conversation, "/temperature")
    assert conversation.sampling.temperature == 0.5
    assert "the system message is kept" in run_command(conversation, "/reset")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert run_command(conversation, "/system") == "no system message"
    assert conversation.messages == []
    assert all(name in run_command(conversation, "/help") for name in COMMANDS)
    run_command(conversation, "/quit")
    assert conversation.is_over


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/foo", "/foo"),
        ("/", "command /"),
        ("/temperature hot", "'hot'"),
        ("/temperature -1", "temperature=-1"),
        ("/temperature nan", "temperature=nan"),
        ("/save", "/save"),
        ("/save /no/such/folder/x", "cannot be written"),
    ],
)
def test_wrong_commands_change_nothing(line: str, words: str) -> None:
    conversation = Conversation(GREEDY)
    with pytest.raises(RequestError, match=words):
        run_command(conversation, line)
    assert conversation == Conversation(GREEDY)
