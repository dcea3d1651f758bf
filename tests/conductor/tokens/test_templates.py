"""Chat templates render as in transformers, and take no more than they may."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headwater.conductor.tokens.content import Unrendered, conversation, convert_tools
from headwater.conductor.tokens.sandbox import OverBudget
from headwater.conductor.tokens.templates import FAILURES, Template
from tests.conductor.tokens.chats import CASES, LLAMA, QWEN, SYSTEM, all_templates, assistant, chat, user

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
SIZE = 1 << 16
STYLES = ("smollm", "llama", "mistral", "qwen")
FIELDS = {"messages": [user("Hi")]}
MACRO = "{% macro r(x) %}{% for c in x %}{% endfor %}{% endmacro %}"


@pytest.fixture(scope="module")
def templates(model_dir: Path) -> dict[str, tuple[str, Template]]:
    return {name: (source, Template(source, SPECIAL)) for name, source in all_templates(model_dir).items()}


def theirs(source: str, template: Template, fields: dict[str, Any]) -> str | None:
    """What transformers makes of what the engine prepares; None if the template refuses."""
    try:
        (made,), _ = render_jinja_template(
            conversations=[conversation(fields["messages"], parts=template.parts, developer=template.developer)],
            tools=convert_tools(fields.get("tools")),
            chat_template=source,
            add_generation_prompt=fields.get("add_generation_prompt", True),
            continue_final_message=fields.get("continue_final_message", False),
            **{**SPECIAL, **fields.get("chat_template_kwargs", {})},
        )
    except FAILURES:
        return None
    return str(made)


def ours(template: Template, fields: dict[str, Any], size: int = SIZE) -> str | None:
    try:
        return template.render(chat(fields).fields, size)
    except Unrendered:
        return None


@pytest.mark.parametrize("style", STYLES)
def test_renders_as_transformers(style: str, templates: dict[str, tuple[str, Template]]) -> None:
    source, template = templates[style]
    made = {name: ours(template, fields) for name, fields in CASES.items()}
    assert made == {name: theirs(source, template, chat(fields).fields) for name, fields in CASES.items()}
    refused = {name for name, text in made.items() if text is None}
    assert (
        refused
        == {
            "smollm": set(),
            "llama": {"bad_arguments"},
            "mistral": {"developer"},
            "qwen": set(),
        }[style]
    )


def test_takes_parts_only_where_it_loops_over_content(templates: dict[str, tuple[str, Template]]) -> None:
    assert {name: template.parts for name, (_, template) in templates.items()} == {
        "smollm": False, "llama": False, "mistral": False, "qwen": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}", True),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{% set a = messages %}{% set b = a %}{% for m in b %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ r(m.content) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ r(x=m.content) }}{% endfor %}", True),
        ("{% macro r(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ r('abc') }}", False),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in tools %}{% for c in m.content %}{% endfor %}{% endfor %}", False),
    ],
    ids=range(11),
)  # fmt: skip
def test_finds_loops_over_content(source: str, parts: bool) -> None:
    assert Template(source, {}).parts is parts


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{{ 'abcdefghijklmnopqrstuvwxyz' }}{% endfor %}",
        "{{ 'x' * 10000000 }}",
        "{{ 10000000 * [1] }}",
        "{% set ns = namespace(s='x') %}{% for a in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for a in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'x' | center(100000000) }}",
        "{{ 'x'.rjust(100000000) }}",
        "{{ '%100000000d' % 1 }}",
        "{{ '%100000000d' | format(1) }}",
        "{{ '{:100000000}'.format(1) }}",
        "{{ {'a': 1} | tojson(indent=100000000) }}",
        "{{ [1] | tojson(indent=width) }}",
        "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999) | replace('', 'b' * 9999) }}",
        "{{ range(9999) | join('b' * 9999) }}",
        "{{ ('b' * 9999).join(['a'] * 9999) }}",
        "{{ 9 ** 99999999 }}",
        "{% set ns = namespace(n=9) %}{% for a in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% for a in range(9999) | map('string') %}{{ a * 99 }}{% endfor %}",
        "{% for a in range(99999) %}{% set x = 'ab' * 32000 %}{% endfor %}",
    ],
    ids=range(22),
)  # fmt: skip
def test_takes_no_more_than_it_may(source: str) -> None:
    begun_s = time.monotonic()
    with pytest.raises(OverBudget):
        Template(source, {}).render({**FIELDS, "chat_template_kwargs": {"width": 10**8}}, SIZE)
    assert time.monotonic() - begun_s < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no: ' + messages[0].content) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.append(1) }}",
        "{{ lipsum(9) }}",
    ],
    ids=range(8),
)
def test_says_nothing_of_what_it_fails_on(source: str) -> None:
    with pytest.raises(Unrendered) as caught:
        Template(source, {}).render(FIELDS, SIZE)
    assert str(caught.value) == "" and caught.value.__suppress_context__


@pytest.mark.parametrize("name", ["tools", "messages", "tokenize", "conversation", "chat_template", "return_dict"])
def test_goes_without_where_variables_would_mean_something_else(name: str) -> None:
    fields = {**FIELDS, "chat_template_kwargs": {name: []}}
    with pytest.raises(Unrendered):
        Template("{{ 1 }}", {}).render(fields, SIZE)


def test_gives_a_template_what_the_engine_does() -> None:
    template = Template(
        "{{ [effort is defined, reasoning_effort, enable_thinking, documents, none_given is defined] | tojson }}", {}
    )
    fields = {
        **FIELDS, "reasoning_effort": "low", "documents": [{"text": "a"}],
        "chat_template_kwargs": {"effort": "auto", "none_given": None},
    }  # fmt: skip
    assert json.loads(template.render(fields, SIZE)) == [False, "low", True, [{"text": "a"}], False]
    silent = {**fields, "reasoning_effort": "none"}
    assert json.loads(template.render(silent, SIZE))[2] is False


def test_going_on_keeps_or_strips_the_space_as_the_template_does() -> None:
    fields = {"messages": [user("a"), assistant("b ")], "continue_final_message": True, "add_generation_prompt": False}
    plain = Template("{% for m in messages %}<{{ m.content }}>{% endfor %}", {})
    strict = Template("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", {})
    silent = Template("{% for m in messages[:-1] %}<{{ m.content }}>{% endfor %}", {})
    assert plain.render(fields, SIZE) == "<a><b "
    assert strict.render(fields, SIZE) == "<a><b"
    for template, wrong in ((silent, fields), (plain, {**fields, "add_generation_prompt": True})):
        with pytest.raises(Unrendered):
            template.render(wrong, SIZE)


@pytest.mark.parametrize(
    ("source", "dated", "timed"),
    [
        ("{{ 1 }}", False, False),
        (LLAMA, True, False),
        (QWEN, False, False),
        ("{{ strftime_now('%Y-%m-%d') }}", True, False),
        ("{{ strftime_now('%H:%M') }}", True, True),
        ("{{ strftime_now(format) }}", True, True),
        ("{% set now = strftime_now %}{{ now('%H') }}", True, True),
    ],
    ids=range(7),
)
def test_knows_whether_the_time_matters(source: str, dated: bool, timed: bool) -> None:
    template = Template(source, {})
    assert (template.dated, template.timed) == (dated, timed)


def test_leaves_the_request_as_it_was() -> None:
    template = Template(QWEN, SPECIAL)
    for fields in CASES.values():
        parsed = chat(fields)
        ours(template, parsed.fields)
        assert parsed.fields == chat(fields).fields


@pytest.mark.parametrize(
    "message",
    [
        user([{"type": "image_url", "image_url": {"url": "x"}}]),
        user([{"text": "no type"}]),
        user([{"type": "text", "text": 1}]),
        assistant("", tool_calls=[{"type": "custom", "id": "1", "custom": {"name": "a", "input": ""}}]),
        assistant("", tool_calls=[{"id": "1", "function": "f"}]),
    ],
    ids=range(5),
)
def test_refuses_what_the_engine_refuses(message: dict[str, Any]) -> None:
    with pytest.raises(Unrendered):
        conversation([message], parts=False, developer=False)


def test_joins_systems_where_developers_are_not_known() -> None:
    said = [user("a"), {"role": "developer", "content": "b"}, SYSTEM]
    assert conversation(said, parts=False, developer=False) == [
        {"role": "system", "content": "b\n\n You are terse.\n"},
        user("a"),
    ]
    assert conversation([said[1], user("a")], parts=False, developer=False)[0] == {"role": "system", "content": "b"}
    assert [it["role"] for it in conversation(said, parts=False, developer=True)] == ["user", "developer", "system"]


def test_writes_tools_as_the_engine() -> None:
    function = {"name": "f", "strict": False, "more": 1}
    assert convert_tools([{"function": function, "defer_loading": True, "other": 2}]) == [
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": None, "strict": False, "defer_loading": True},
            "defer_loading": True,
        }
    ]
    for wrong in ({"type": "web_search"}, {"type": "function", "function": None}):
        with pytest.raises(Unrendered):
            convert_tools([wrong])
