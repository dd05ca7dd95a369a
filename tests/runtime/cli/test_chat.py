"""`runtime chat`: conversations with the demo model, from a pipe and on a terminal of its own."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runtime_command import COMMAND, ENVIRONMENT, HEED_INTERRUPTS, runtime, runtime_here, start

from compress.common.cli import demo_model_path
from compress.common.errors import RequestError, ToolkitError
from runtime.cli.chat import COMMANDS, Conversation, Session, run_command
from runtime.core.config import RuntimeConfig
from runtime.core.request import SamplingParams
from runtime.llm import LLM, load_engine

pty = pytest.importorskip("pty")


def test_lines_of_a_pipe_are_turns(tmp_path: Path) -> None:
    lines = "Hello\n/system Be brief.\n/foo\n\nWho are you?\n/save chat.json\n/quit\nnever asked\n"
    result = runtime("chat", "--max-tokens", "12", "--temperature", "0", cwd=tmp_path, stdin=lines)
    assert result.returncode == 0, result.stderr
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert result.stdout == messages[2]["content"] + "\n" + messages[4]["content"] + "\n"
    assert "'/foo'" in result.stderr
    assert result.stderr.count("generated, first token after") == 2


def test_end_of_input_ends_it(tmp_path: Path) -> None:
    result = runtime_here("chat", "--max-tokens", "4", cwd=tmp_path, stdin="Hello")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_model_without_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns("chat_template*"))
    result = runtime_here("chat", str(folder), cwd=tmp_path, stdin="Hello\n")
    assert result.returncode == 1
    assert "runtime generate" in result.stderr
    assert "model:" not in result.stderr  # before loading


@pytest.mark.full
def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    chat = start("chat", "--max-tokens", "1800", "--seed", "1", cwd=tmp_path)
    chat.stdin.write("Write the letters of the alphabet one thousand times, and never stop.\n/temperature 0\n")
    chat.stdin.flush()
    assert chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    chat.stdin.write("/save c.json\n")
    output, errors = chat.communicate(timeout=120)
    assert chat.returncode == 0, errors
    assert "[stopped; " in errors or "tokens/s]" in errors  # the second when the answer was over already
    assert "temperature 0\n" in errors
    assert len(json.loads((tmp_path / "c.json").read_text())["messages"]) == 2
    assert output.endswith("\n")


@pytest.mark.full
def test_terminal_has_a_prompt_and_ctrl_c_drops_a_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    chat = subprocess.Popen(
        [*COMMAND, "chat", "--max-tokens", "5"],
        cwd=tmp_path,
        env=ENVIRONMENT | {"TERM": "dumb"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=HEED_INTERRUPTS,
    )
    os.close(theirs)
    try:
        read_until(ours, "> ")
        os.write(ours, b"half a li")
        read_until(ours, "half a li")
        for _ in range(100):  # between two reads of the terminal Python would notice the signal at the next key only
            chat.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 0.5)[0]:
                break
        read_until(ours, "/quit or Ctrl-D quits")
        os.write(ours, b"Hello\n")
        read_until(ours, "generated, first token after")
        os.write(ours, b"/quit\n")
        assert chat.wait(120) == 0
    finally:
        chat.kill()
        os.close(ours)


def read_until(terminal: int, words: str) -> str:
    seen, end = "", time.monotonic() + 120
    while words not in seen:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


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
    with pytest.raises(RequestError, match=r" \d{4,} .* 1024\. .*/reset"):
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

    monkeypatch.setattr(session.engine.runner, "submit", broken)
    with pytest.raises(ToolkitError, match="RuntimeError: boom"):
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
    for command in ("/quit", "/exit"):
        leaving = Conversation(GREEDY)
        run_command(leaving, command)
        assert leaving.is_over


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/foo", "/foo"),
        ("/", r"'/'.*/reset"),
        ("/temperature hot", "'hot'"),
        ("/temperature -1", "temperature=-1"),
        ("/temperature nan", "temperature=nan"),
        ("/save", "/save"),
        ("/save /no/such/folder/x", "^/no/such/folder/x "),
    ],
)
def test_wrong_commands_change_nothing(line: str, words: str) -> None:
    conversation = Conversation(GREEDY)
    with pytest.raises(RequestError, match=words):
        run_command(conversation, line)
    assert conversation == Conversation(GREEDY)
