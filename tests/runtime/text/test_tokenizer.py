import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compress.common.chat_template import ChatTemplate
from compress.common.cli import demo_model_path
from compress.common.errors import CheckpointError, LongPromptError, RequestError
from runtime.text.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "Be <brief> & “kind”."}, {"role": "user", "content": "Wie geht's? 你好"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(demo_model_path())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, tmp_path)
    return tmp_path


def test_it_equals_transformers_for_text_and_chat(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(demo_model_path())
    text = "def f(x):\n    return x ** 2  # 你好 <|im_end|>"
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.vocab_size == len(reference)
    rendered = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(MESSAGES) == rendered
    ids = reference.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode_chat(MESSAGES) == ids


@pytest.mark.parametrize("word", ["the castle ", "x", " ", "日本", "\n", "<|im_end|>"])
def test_texts_far_beyond_a_limit_are_refused_and_others_read_whole(tokenizer: Tokenizer, word: str) -> None:
    """Also one long word, or blanks of which a token takes many."""
    ids = tokenizer.encode(word * 40_000)
    assert tokenizer.encode(word * 40_000, max_tokens=len(ids)) == ids
    with pytest.raises(LongPromptError, match=rf" {40_000 * len(word)} .* \d+ .* \d+ tokens"):
        tokenizer.encode(word * 40_000, max_tokens=min(1000, len(ids) // 100))


def test_a_long_text_is_refused_by_its_beginning(tokenizer: Tokenizer) -> None:
    """The refusal of the half is that of the whole."""
    text = "the castle " * 10_000
    messages = []
    for length in (len(text) // 2, len(text)):
        with pytest.raises(LongPromptError) as caught:
            tokenizer.encode(text[:length], max_tokens=1000)
        messages.append(caught.value.problem.replace(str(length), "N"))
    assert messages[0] == messages[1]


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys; from runtime.text.tokenizer import Tokenizer;"
        "from compress.common.cli import demo_model_path;"
        "Tokenizer.open(demo_model_path()).encode_chat([{'role': 'user', 'content': 'hi'}]);"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_beginning_of_sequence_follows_the_post_processor_and_chat_gets_none(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    special = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    content["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}})
    content["post_processor"]["special_tokens"] = {"<|endoftext|>": special}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.open(folder)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [0, *plain]


def test_truncation_in_the_file_is_switched_off(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.open(folder).encode("one two three four five six seven")) > 4


def test_special_tokens_may_be_objects_and_templates_may_be_named(folder: Path) -> None:
    config = {
        "bos_token": {"content": "<|im_start|>", "lstrip": False},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}ok"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.render_chat(MESSAGES) == "<|im_start|>ok"


def test_variables_of_a_template_are_its_own(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if answer_now is defined %}{{ answer_now }}{% endif %}")
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.render_chat(MESSAGES) == ""
    assert tokenizer.render_chat(MESSAGES, answer_now=False) == "False"
    with pytest.raises(RequestError, match="'answer'"):
        tokenizer.render_chat(MESSAGES, answer=False)


def test_no_template_is_refused_with_the_way_out(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"chat template.*completions"):
        Tokenizer.open(folder).encode_chat(MESSAGES)


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_a_tokenizer_opens_in_a_thread_with_the_same_errors(folder: Path) -> None:
    opened = Tokenizer.open_in_thread(folder)
    assert opened.result().encode("Once") == Tokenizer.open(folder).encode("Once")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError):
        Tokenizer.open_in_thread(folder).result()


def test_a_template_that_is_no_text_is_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Tokenizer.open(folder)


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    content = json.loads((demo_model_path() / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be <brief> & “kind”."}'),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% generation %}{{ messages[1].role }}{% endgeneration %}!", "user!"),
        ("{{ strftime_now('%%') }}", "%"),
        ("  {% if tools %}tools{% endif %}\nend", "end"),
        ("{{ add_generation_prompt }}{{ eos_token }}", "True</s>"),
    ],
)
def test_templates_have_the_usual_functions(template: str, expected: str) -> None:
    assert ChatTemplate(template, {"eos_token": "</s>"}).render(MESSAGES) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[7].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_a_request_error(template: str) -> None:
    with pytest.raises(RequestError, match="roles"):
        ChatTemplate(template, {}).render(MESSAGES)


def test_a_template_that_is_no_jinja_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("\n{% if %}", {})
