from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from gateway.prefix import BadTemplate
from gateway.prefix.messages import ContentFormat, Unrenderable
from gateway.prefix.template import ChatTemplate
from gateway.prefix.tools import Tool
from gateway.records import EngineKind


def template(source: str, *, engine: EngineKind = EngineKind.VLLM, clock: Any = None) -> ChatTemplate:
    return ChatTemplate(source, engine=engine, clock=clock)


def render(source: str, **variables: Any) -> str:
    return template(source).render(variables)


def reason(source: str, **variables: Any) -> str:
    with pytest.raises(Unrenderable) as caught:
        render(source, **variables)
    return caught.value.reason


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", ContentFormat.STRING),
        ("{% for m in messages %}{% for c in m['content'] %}{% endfor %}{% endfor %}", ContentFormat.OPENAI),
        ("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", ContentFormat.OPENAI),
        ("{% for m in messages %}{% for c in m.content[1:] %}{% endfor %}{% endfor %}", ContentFormat.OPENAI),
        ("{% for m in messages %}{% for c in m.content | list %}{% endfor %}{% endfor %}", ContentFormat.OPENAI),
        ("{% for m in messages[1:] %}{% for c in m.content %}{% endfor %}{% endfor %}", ContentFormat.OPENAI),
        (
            "{% set rest = messages[1:] %}{% set all = rest | list %}"
            "{% for m in all %}{% for c in m.content %}{% endfor %}{% endfor %}",
            ContentFormat.OPENAI,
        ),
        ("{% set x = messages %}{% set x = x[1:] %}{% for m in x %}{{ m.content }}{% endfor %}", ContentFormat.STRING),
        ("{% for m in messages %}{% for c in m.parts %}{% endfor %}{% endfor %}", ContentFormat.STRING),
        ("{% for m in other %}{% for c in m.content %}{% endfor %}{% endfor %}", ContentFormat.STRING),
        ("{% for a, b in messages %}{% for c in a.content %}{% endfor %}{% endfor %}", ContentFormat.STRING),
        ("{% for tool in tools %}{% for c in tool.content %}{% endfor %}{% endfor %}", ContentFormat.STRING),
    ],
)
def test_content_format_of_vllm(source: str, expected: ContentFormat) -> None:
    assert template(source).content_format is expected


def test_content_format_of_sglang_asks_for_media() -> None:
    loops = "{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}"
    assert template(loops, engine=EngineKind.SGLANG).content_format is ContentFormat.STRING
    assert template(loops + "<|image|>", engine=EngineKind.SGLANG).content_format is ContentFormat.OPENAI


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("{% if m.role == 'developer' %}", True),
        ('{% if m.role == "developer" %}', True),
        ("You are a developer. {% if m.role == 'user' %}", False),
        ("{% set developer = 1 %}{% if 'a' %}", False),
        ("{% if 'developers' %}", False),
        ("{% if 1 %}", False),
    ],
)
def test_a_template_knows_the_developer_role_when_it_names_it_in_quotes(source: str, known: bool) -> None:
    assert template(source + "{% endif %}").keeps_developer is known


def test_blocks_are_trimmed_and_loops_controlled() -> None:
    source = "{% for n in range(9) %}\n    {% if n == 2 %}{% break %}{% endif %}\n{{ n }}\n{% endfor %}\n"
    assert render(source) == "0\n1\n"


def test_the_generation_tag_shows_its_body() -> None:
    assert render("a{% generation %}b{{ x }}{% endgeneration %}d", x="c") == "abcd"


def test_tojson_does_not_escape() -> None:
    assert render("{{ x | tojson }}", x={"b": "<é&'>", "a": [1, 1.0, None]}) == '{"b": "<é&\'>", "a": [1, 1.0, null]}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert render("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", x={"b": 1, "a": 2}) == '{"a":2,"b":1}'
    assert render("{{ x | tojson(ensure_ascii=true) }}", x="é") == '"\\u00e9"'


@pytest.mark.parametrize("x", [{"b": 1, "a": "é"}, Tool({"b": 1, "a": "é"})])
def test_tojson_takes_what_json_takes(x: object) -> None:
    """Templates are not typed: 0 stands for false, a list for a pair, a text for an indent."""
    assert render("{{ x | tojson(separators=[',', ':']) }}", x=x) == '{"b":1,"a":"é"}'
    assert render("{{ x | tojson(indent='\\t') }}", x=x) == '{\n\t"b": 1,\n\t"a": "é"\n}'
    assert render("{{ x | tojson(ensure_ascii=0, sort_keys=1) }}", x=x) == '{"a": "é", "b": 1}'
    assert render("{{ x | tojson(ensure_ascii=none) }}", x=x) == '{"b": 1, "a": "é"}'
    assert render("{{ x | tojson(ensure_ascii=missing) }}", x=x) == '{"b": 1, "a": "é"}'


def test_tools_look_like_dicts_to_templates() -> None:
    tool = Tool({"type": "function", "function": Tool({"name": "f", "items": 1})})
    plain = {"type": "function", "function": {"name": "f", "items": 1}}
    sources = (
        "{{ x | tojson }}{{ x | tojson(indent=1) }}{{ x | tojson }}",
        "{{ x }}{{ x.function.name }}{{ x['function'] }}",
        "{{ x is mapping }}{% for k, v in x.items() %}{{ k }}{{ v }}{% endfor %}",
        "{{ x.missing is defined }}{{ x.written is defined }}{{ x == y }}{{ x.function['items'] }}",
    )
    for source in sources:
        assert render(source, x=tool, y=plain) == render(source, x=plain, y=plain)


def test_dict_methods_win_over_items_of_the_same_name_as_in_jinja() -> None:
    source = "{{ x.items is callable }}{{ x['items'] }}{{ x.role }}{{ x.none is defined }}"
    assert render(source, x={"items": 1, "role": 2}) == "True12False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[5].role }}",
        "{{ missing.x }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ messages[0].pop('role') }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% include 'x' %}",
        "{{ deep | tojson }}",
        "{{ messages | map(attribute='__class__') | list | first | tojson }}",
        "{{ 'x'.encode().decode('nope') }}",
        "{{ [].pop() }}",
    ],
)
def test_whatever_goes_wrong_is_the_workers_to_judge(source: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert reason(source, messages=[{"role": "user"}], deep=deep) == "template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ messages._x }}",
        "{{ messages[0].clear }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ tool.clear }}",
        "{{ tool._x }}",
    ],
)
def test_forbidden_attributes_are_undefined(source: str) -> None:
    assert render(source, messages=[{"role": "user"}], tool=Tool({"a": 1})) == ""


@pytest.mark.parametrize("source", ["\n{% for %}", "\n{{ messages | unknown_filter }}"])
def test_templates_that_do_not_compile_are_an_error_at_start(source: str) -> None:
    with pytest.raises(BadTemplate, match="line 2"):
        template(source)


def test_the_date_comes_from_the_clock() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    dated = template(source, clock=lambda: datetime(2026, 7, 4))
    assert dated.volatile
    assert dated.render({}) == "04 Jul 2026"
    assert reason(source) == "volatile"
    assert not template("{{ x }}").volatile


LAST = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
KEPT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (KEPT, " It is ", "<assistant> It is "),
        (LAST, " It is ", "<assistant>It is"),
        (LAST, "It is", "<assistant>It is"),
        (KEPT, [{"type": "text", "text": "x"}], None),
        (KEPT, None, None),
        ("{% for m in messages %}{{ m.role }}{% endfor %} content", "gone", None),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "gone", None),
    ],
)
def test_the_final_message_can_be_left_open(source: str, content: object, expected: str | None) -> None:
    messages = [{"role": "assistant", "content": content}]
    chat = template(source)
    if expected is None and content != [{"type": "text", "text": "x"}]:
        with pytest.raises(Unrenderable):
            chat.render_open({}, messages)
    elif expected is not None:
        assert chat.render_open({}, messages) == expected
    assert messages == [{"role": "assistant", "content": content}]
