"""Requests and answers of a simulated engine beside those captured from vLLM 0.32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.sim.openai_answers import Answer, Counts, Text
from gateway.sim.openai_asks import ApiError, Ask, Rules, Shape, parse_chat, parse_completion, parse_json
from gateway.sim.speech import DEMO_MODEL, Speech

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sim" / "vllm_0.32.0.json").read_text())["answers"]
RULES = Rules({"tiny": None, "lora": "lora"}, max_model_len=2048, default_output_tokens=64)
SPEECH = Speech.load(DEMO_MODEL)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def shape_of(value: object) -> object:
    """Keys in order, and the kind of every value."""
    match value:
        case dict():
            return {key: shape_of(item) for key, item in value.items()}
        case list():
            return [shape_of(item) for item in value[:1]]
        case None:
            return None
    return type(value).__name__


def events(body: str) -> list[Any]:
    return [json.loads(part[6:]) for part in body.split("\n\n") if part.startswith("data: {")]


def answer(ask: Ask) -> Answer:
    return Answer(ask, answer_id="chatcmpl-1", created=1795963863, version="0.32.0", details=True)


def ask(*, chat: bool, shape: Shape | None = None) -> Ask:
    return Ask(
        chat=chat,
        model="tiny",
        adapter=None,
        salt=None,
        prompts=([1, 2, 3],),
        output_tokens=2,
        finish="length",
        shape=shape or Shape(),
    )


@pytest.mark.parametrize(
    ("name", "chat", "token_ids"),
    [("chat_shared_prefix_1", True, False), ("completion_repeat", False, False), ("chat_return_token_ids", True, True)],
)
def test_whole_answers_have_the_captured_shape(name: str, chat: bool, token_ids: bool) -> None:
    made = answer(ask(chat=chat, shape=Shape(token_ids=token_ids))).whole(
        [Text("ab", [4, 5], [1, 2, 3])], Counts(prompt=3, completion=2, cached=2, created=1)
    )
    wanted = json.loads(GOLDEN[name]["body"])
    assert json.dumps(shape_of(json.loads(made))) == json.dumps(shape_of(wanted))


@pytest.mark.parametrize(
    ("name", "chat", "shape"),
    [
        ("chat_stream_plain", True, Shape(stream=True)),
        ("chat_stream_usage", True, Shape(stream=True, usage=True)),
        ("chat_stream_continuous_usage", True, Shape(stream=True, usage=True, running_usage=True)),
        ("completion_stream", False, Shape(stream=True, usage=True)),
    ],
)
def test_stream_events_have_the_captured_shape(name: str, chat: bool, shape: Shape) -> None:
    maker = answer(ask(chat=chat, shape=shape))
    made = maker.opening(0, [1, 2, 3])
    made += maker.piece(0, "a", token_ids=[4], prompt_ids=[1, 2, 3], done=1, finish=None)
    made += maker.piece(0, "b", token_ids=[5], prompt_ids=[1, 2, 3], done=2, finish="length")
    made += maker.closing(Counts(prompt=3, completion=2, cached=2, created=1))
    assert made.endswith(b"data: [DONE]\n\n")
    wanted = [json.dumps(shape_of(event)) for event in events(GOLDEN[name]["body"])]
    got = [json.dumps(shape_of(event)) for event in events(made.decode())]
    # The captured answer has more middle events, all alike.
    head, tail = (2, 2 if shape.usage else 1) if chat else (1, 2)
    assert got == wanted[:head] + wanted[-tail:]


def refused(body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_chat(body, RULES, speech=SPEECH)
    return caught.value


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("err_unknown_model", {"model": "nope"}),
        ("err_empty_messages", {"messages": []}),
        ("err_max_tokens", {"max_tokens": 1_000_000}),
        ("err_bad_temperature", {"temperature": -1}),
        ("err_greedy_n2", {"temperature": 0, "n": 2}),
    ],
)
def test_errors_are_the_captured_ones(name: str, change: dict[str, Any]) -> None:
    error = refused({**CHAT, **change})
    wanted = json.loads(GOLDEN[name]["body"])
    made = json.loads(error.body)
    assert error.status == GOLDEN[name]["status"]
    if name == "err_unknown_model":
        made["error"]["message"] = made["error"]["message"].replace("tiny, lora", "tiny")
    assert made == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"max_tokens": 2048},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"n": 0},
        {"cache_salt": ""},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []},
    ],
)
def test_bad_chats_are_refused_with_400(change: dict[str, Any]) -> None:
    assert refused({**CHAT, **change}).status == 400


def test_missing_messages_name_the_field() -> None:
    assert json.loads(refused({"model": "tiny"}).body)["error"]["param"] == "body.messages"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_object_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("one two", None),
        (["one", "two words"], None),
        ([5, 6, 7], [3]),
        ([[5, 6, 7], [8]], [3, 1]),
    ],
)
def test_the_four_forms_of_a_completion_prompt(prompt: object, lengths: list[int] | None) -> None:
    parsed = parse_completion({"model": "lora", "prompt": prompt, "max_tokens": 3}, RULES, speech=SPEECH)
    texts = [prompt] if isinstance(prompt, str) else prompt
    assert isinstance(texts, list)
    assert [len(tokens) for tokens in parsed.prompts] == (
        lengths or [len(SPEECH.encode(text, special=True)) for text in texts]
    )
    assert (parsed.adapter, parsed.output_tokens, parsed.finish) == ("lora", 3, "length")


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], [1, "a"], [True], [-1], [1.5], {}, [[1], 2]])
def test_bad_completion_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse_completion({"model": "tiny", "prompt": prompt}, RULES, speech=SPEECH)
    assert caught.value.status == 400


def test_without_a_limit_an_answer_stops_by_itself_and_fits() -> None:
    parsed = parse_completion({"prompt": [1] * 2000}, RULES, speech=SPEECH)
    assert (parsed.output_tokens, parsed.finish) == (48, "stop")


def test_a_forced_tool_call_gets_arguments_that_fit_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
            "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}},
        },
        "required": ["city", "days", "unit", "deep"],
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    call = parse_chat({**CHAT, "tools": tools, "tool_choice": "required"}, RULES, speech=SPEECH).tool_call
    assert call is not None
    assert call.name == "weather"
    assert json.loads(call.arguments) == {"city": "text", "days": 1, "unit": "c", "deep": {"on": True}}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "messages", "model", "tools", "tool_choice", "stream", "stream_options", "n", "max_tokens", "temperature",
    "cache_salt", "prompt", "chat_template_kwargs", "documents", "reasoning_effort", "add_generation_prompt",
)  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), anything, max_size=4), st.booleans())
def test_whatever_a_body_holds_is_understood_or_refused(change: dict[str, Any], chat: bool) -> None:
    body = {**CHAT, "prompt": "one", **change}
    parse = parse_chat if chat else parse_completion
    try:
        parsed = parse(body, RULES, speech=SPEECH)
    except ApiError:
        return
    assert all(parsed.prompts)
    assert parsed.output_tokens >= 1
