"""Chat templates end: whatever multiplies itself is refused, and long conversations are not."""

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compress.common.chat_template import MAX_WIDTH, MIN_SIZE, MIN_STEPS, ChatTemplate
from compress.common.errors import CheckpointError, RequestError

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
LOOP = "{% for i in range(99999) %}"


def doubled(expression: str, start: str = "'x'") -> str:
    """A template that applies an expression 60 times to a value `s`."""
    return f"{{% set s = {start} %}}" + f"{{% set s = {expression} %}}" * 60 + "{{ s }}"


ENDLESS = {
    "nested loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "nothing passes": LOOP + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for i in range(99999) if i == 0 recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "sums": LOOP + "{{ range(99999) | sum }}{% endfor %}",
    "searches": "{% set l = range(99999) | list %}{% for i in l %}{% if 'x' in l %}{% endif %}{% endfor %}",
    "comparisons": "{% set l = range(99999) | list %}{% for i in l %}{% if l == l[:] %}{% endif %}{% endfor %}",
    "slices": "{% set l = range(99999) | list %}{% for i in l %}{% set k = l[1:] %}{% endfor %}",
    "methods": "{% set s = 'x' * 9999999 %}" + LOOP + "{{ s.find('y') }}{% endfor %}",
    "lists": doubled("s + s", "[1]"),
}
LARGE = {
    "joined": doubled("s ~ s"),
    "added": doubled("s + s"),
    "multiplied": doubled("s * 9"),
    "join": doubled("[s, s] | join"),
    "method join": doubled("''.join([s, s])"),
    "replace": doubled("s | replace('x', 'xx')"),
    "method replace": doubled("s.replace('x', 'xx')"),
    "format": doubled("'%s%s' | format(s, s)"),
    "method format": doubled("'{}{}'.format(s, s)"),
    "percent": doubled("'%s%s' % (s, s)"),
    "nested lists": doubled("[s, s]", "[1]"),
    "blocks": "{% set s = 'x' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "static text": "{% set s %}" + LOOP + "y" * 10_000 + "{% endfor %}{% endset %}",
    "indent": "{{ 'x' | indent(9999999999, true) }}",
    "wrapped": "{{ ('x ' * 4999999) | wordwrap(1) }}",
}
WIDE = [
    "{{ 'x' | center(9999999999) }}",
    "{{ 'x'.ljust(9999999999) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 9999999999) }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ [1] | tojson(indent=9999999999) }}",
    "{{ [1] | batch(9999999999, 0) | list }}",
    "{{ lipsum(n=99999999) }}",
]


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_stopped_after_so_many_steps(template: str) -> None:
    with pytest.raises(RequestError) as refusal:
        ChatTemplate(template, {}).render(MESSAGES)
    (steps,) = map(int, re.findall(r"(\d+) steps", refusal.value.problem))
    assert MIN_STEPS < steps < 2 * MIN_STEPS


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_that_multiplies_its_text_is_stopped_at_a_size(template: str) -> None:
    with pytest.raises(RequestError) as refusal:
        ChatTemplate(template, {}).render(MESSAGES)
    (size,) = map(int, re.findall(r"(\d+) characters", refusal.value.problem))
    assert MIN_SIZE < size < 2 * MIN_SIZE


@pytest.mark.parametrize("template", WIDE)
def test_wide_text_is_refused_before_it_is_made(template: str) -> None:
    with pytest.raises(RequestError, match=str(MAX_WIDTH)):
        ChatTemplate(template, {}).render(MESSAGES)


def test_recursion_ends() -> None:
    with pytest.raises(RequestError, match="recursion"):
        ChatTemplate("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", {}).render(MESSAGES)
    with pytest.raises(CheckpointError):
        ChatTemplate("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", {})


VALUES = ["5", "none", "'x'", "[1, 'a', none]", "nothing", "messages[0].items", "namespace(a=1)", "{1: none}"]
SANDBOX = ImmutableSandboxedEnvironment()
TESTS = [name for name in SANDBOX.tests if name.isidentifier()]


@pytest.mark.parametrize("argument", ["", "(none)", "(1.5, 1.5)"])
@pytest.mark.parametrize("name", sorted({*SANDBOX.filters, *TESTS, *SANDBOX.globals, "strftime_now"}))
def test_values_of_any_type_are_taken_or_refused(name: str, argument: str) -> None:
    """Filters and functions raise errors of any type: AttributeError, AssertionError, RuntimeError."""
    forms = [f"{{{{ {value} | {name}{argument} }}}}" for value in VALUES if name in SANDBOX.filters]
    forms += [f"{{{{ {value} is {name}{argument} }}}}" for value in VALUES if name in TESTS]
    for form in [*forms, f"{{{{ {name}{argument or '()'} }}}}"]:
        with suppress(RequestError):
            assert isinstance(ChatTemplate(form, {}).render(MESSAGES), str)


@pytest.mark.parametrize("kind", [MemoryError, IndexError, OSError, NotImplementedError, OverflowError])
def test_an_error_of_any_type_is_a_refusal_that_names_it(kind: type[Exception], monkeypatch: Any) -> None:
    def fail(pattern: str) -> str:
        raise kind

    monkeypatch.setattr("compress.common.chat_template._strftime_now", fail)
    with pytest.raises(RequestError, match=kind.__name__):
        ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_refusal(kind: type[BaseException], monkeypatch: Any) -> None:
    def fail(pattern: str) -> str:
        raise kind

    monkeypatch.setattr("compress.common.chat_template._strftime_now", fail)
    with pytest.raises(kind):
        ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES)


def test_a_long_reason_is_cut_and_one_line() -> None:
    with pytest.raises(RequestError) as refusal:
        ChatTemplate("{{ raise_exception('x\n' * 99999) }}", {}).render(MESSAGES)
    assert len(str(refusal.value)) < 1000
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{{ " + "9" * 5000 + " }}",
        "{% break %}",
        "{% macro f(a, a) %}{% endmacro %}",
        "{{ range(stop=1, stop=2) }}",
        "{{ \ud800 }}",
    ],
)
def test_what_cannot_be_compiled_is_the_checkpoints_fault(template: str) -> None:
    with pytest.raises(CheckpointError):
        ChatTemplate(template, {})


USUAL = """\
{{- bos_token }}
{%- macro call(name, arguments) %}<call>{{ {"name": name, "arguments": arguments} | tojson }}</call>{% endmacro %}
{%- set ns = namespace(last=-1, text="") %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == "user" and not (message.content.startswith("<result>")) %}
        {%- set ns.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}
{%- for message in messages if message.role != "system" %}
    {%- set content = message.content %}
    {%- if content is string and "</think>" in content %}
        {%- set content = content.split("</think>")[-1].lstrip("\\n") | trim %}
    {%- endif %}
    {{- "<|" ~ message.role ~ "|>" + content + "\\n" * 2 }}
    {%- for tool_call in message.tool_calls or [] %}{{ call(tool_call.name, tool_call.arguments) }}{% endfor %}
    {%- if loop.index0 > ns.last and loop.last %}{{ "%s %d" % (loop.index, ns.last) }}{% endif %}
    {%- filter upper %}{{ message.role | default("none") | replace("u", "v") }}{% endfilter %}
    {%- if loop.nextitem is defined and loop.nextitem.role in ["user", message.role] %}!{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def conversation(length: int) -> list[dict[str, Any]]:
    calls = [{"name": "find", "arguments": {"query": f"<&{number}>", "limit": 5}} for number in range(2)]
    turns = [
        {"role": "user", "content": "A question? " * 20},
        {"role": "assistant", "content": "<think>Hm.</think>\nYes."},
    ]
    return [turns[number % 2] | ({"tool_calls": calls} if number % 4 == 1 else {}) for number in range(length)]


def plainly_rendered(template: str, **variables: Any) -> str:
    """Renders a template without a meter."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment.from_string(template).render(add_generation_prompt=True, **variables)


@pytest.mark.parametrize("length", [1, 2, 7, 400])
def test_the_meter_changes_no_text(length: int) -> None:
    messages, tools = conversation(length), [{"name": "find", "parameters": {"type": "object"}}]
    found = ChatTemplate(USUAL, {"bos_token": "<s>"}).render(messages, tools=tools)
    assert found == plainly_rendered(USUAL, messages=messages, tools=tools, bos_token="<s>")


QUADRATIC = """\
{% set ns = namespace(text="", seen=[]) %}
{% for message in messages %}
{% set ns.seen = ns.seen + [message.role] %}{% set ns.text = ns.text + message.content %}
{% endfor %}{{ ns.text }}{{ ns.seen | length }}"""


def test_long_conversations_fit_into_the_budget() -> None:
    messages = conversation(1200)
    assert ChatTemplate(USUAL, {"bos_token": ""}).render(messages).count("<call>") == 600
    assert ChatTemplate(QUADRATIC, {}).render(messages).endswith("1200")


def test_errors_in_metered_expressions_are_those_of_the_request() -> None:
    template = "{% for m in messages if m.content[1:] != 'x' %}\n{{ 'a' ~ 1 / 0 }}\n{% endfor %}"
    with pytest.raises(RequestError, match="division"):
        ChatTemplate(template, {}).render(MESSAGES)
