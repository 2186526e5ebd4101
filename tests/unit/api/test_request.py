from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.api import ask_for_usual_priority, parse_request
from gateway.errors import BadRequest
from gateway.records import ChatPrompt, Endpoint, InferenceRequest, NoPrompt, Prompt, TextPrompt, TokenPrompt

HELLO = [{"role": "user", "content": "hello"}]


def parse(body: bytes | dict[str, Any], endpoint: Endpoint = Endpoint.CHAT, **options: Any) -> InferenceRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request(endpoint, raw, request_id="r1", **options)


def chat(**fields: Any) -> InferenceRequest:
    return parse({"model": "m", "messages": HELLO, **fields})


def prompt_of(endpoint: Endpoint, **fields: Any) -> Prompt:
    return parse({"model": "m", **fields}, endpoint).prompt


def refused(body: bytes | dict[str, Any], endpoint: Endpoint = Endpoint.CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(body, endpoint)
    return caught.value


def test_chat() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True, "x": 1},
        max_tokens=7,
        n=2,
        cache_salt="s",
        priority=-3,
        tools=[{"type": "function"}],
        chat_template_kwargs={"a": 1},
        reasoning_effort="low",
        unknown_field={"deep": [1]},
    )
    assert request.model == "m"
    assert request.request_id == "r1"
    assert (request.stream, request.usage_asked, request.max_tokens, request.choices) == (True, True, 7, 2)
    assert (request.cache_salt, request.priority) == ("s", -3)
    assert request.stream_options == {"include_usage": True, "x": 1}
    assert request.prompt == ChatPrompt(
        messages=HELLO,
        tools=[{"type": "function"}],
        template_kwargs={"a": 1},
        reasoning_effort="low",
    )


@pytest.mark.parametrize(
    ("endpoint", "field", "value"),
    [
        (Endpoint.CHAT, "cache_salt", "s"),
        (Endpoint.CHAT, "extra_key", "k"),
        (Endpoint.CHAT, "lora_path", "sql"),
        (Endpoint.CHAT, "n", 3),
        (Endpoint.CHAT, "priority", -1),
        (Endpoint.GENERATE, "sampling_params", {"max_new_tokens": 5}),
        (Endpoint.CHAT, "session_id", "x"),
        (Endpoint.CHAT, "stream_options", {"include_usage": True}),
        (Endpoint.CHAT, "add_generation_prompt", False),
        (Endpoint.CHAT, "add_special_tokens", True),
        (Endpoint.CHAT, "chat_template", "{{ messages }}"),
        (Endpoint.CHAT, "chat_template_kwargs", {"a": 1}),
        (Endpoint.CHAT, "continue_final_message", True),
        (Endpoint.CHAT, "documents", [{"text": "t"}]),
        (Endpoint.CHAT, "prompt_logprobs", 1),
        (Endpoint.CHAT, "echo", True),
        (Endpoint.CHAT, "reasoning_effort", "low"),
        (Endpoint.CHAT, "tool_choice", "none"),
        (Endpoint.CHAT, "tools", [{"type": "function"}]),
        (Endpoint.CHAT, "truncate_prompt_tokens", 100),
    ],
)
def test_a_field_that_most_bodies_lack_is_read_where_it_stands_alone(
    endpoint: Endpoint, field: str, value: object
) -> None:
    body = {"model": "m", "messages": HELLO} if endpoint is Endpoint.CHAT else {"text": "hello"}
    without, given = parse(body, endpoint), parse({**body, field: value}, endpoint)
    assert replace(given, body_bytes=0) != replace(without, body_bytes=0)
    assert parse({**body, field: None}, endpoint) == replace(without, body_bytes=len(json.dumps({**body, field: None})))


def test_defaults_and_null_fields_are_the_same() -> None:
    null = dict.fromkeys(
        ("stream", "stream_options", "max_tokens", "n", "cache_salt", "priority", "tools", "documents")
    )
    assert chat(**null).prompt == chat().prompt
    request = chat(**null)
    assert (request.stream, request.usage_asked, request.max_tokens, request.choices) == (False, False, None, 1)
    assert request.body_bytes == len(json.dumps({"model": "m", "messages": HELLO, **null}))


def test_the_last_of_two_equal_keys_wins_as_in_the_engines() -> None:
    request = parse(
        b'{"model":"a","stream":true,"messages":[{"role":"user","content":"x"}],"model":"b","stream":false}'
    )
    assert (request.model, request.stream) == ("b", False)


def test_text_inside_a_prompt_is_no_field() -> None:
    text = '{"model":"evil","stream":true,"priority":9,"session_id":"x"}'
    request = parse(
        {"model": "m", "messages": [{"role": "user", "content": text, "stream": True}]}, affinity_field="session_id"
    )
    assert (request.model, request.stream, request.priority, request.session) == ("m", False, 0, None)


def test_big_integers_are_exact() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"n":123456789012345678901234567890}]}'
    prompt = parse(raw).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == [{"n": 123456789012345678901234567890}]


@pytest.mark.parametrize(
    "fragment",
    [b'"temperature": NaN', b'"top_p": Infinity', b'"x": -Infinity', b'"x": 1e999', b'"x": "\\ud800"'],
)
def test_what_only_the_engines_decoder_accepts_is_left_to_the_worker(fragment: bytes) -> None:
    assert parse(b'{"model":"m","messages":[{"role":"user","content":"x"}],' + fragment + b"}").model == "m"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"nonsense",
        b'{"model":"m"',
        b'{"model":"m",}',
        b'{"model":"m"} x',
        b'{"model":"\xff\xfe"}',
        b'"text"',
        b"[1]",
        b"null",
        b"17",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","n":' + b"9" * 5_000 + b"}",
        '{"model":"m"}'.encode("utf-16"),
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_bodies_that_are_no_json_object_are_refused(body: bytes, endpoint: Endpoint) -> None:
    error = refused(body, endpoint)
    assert (error.status, error.code) == (400, "invalid_json")


def test_a_byte_order_mark_is_accepted_as_the_engines_do() -> None:
    assert parse(b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user","content":"x"}]}').model == "m"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"model": ["m"]}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [*HELLO, None]}, "messages"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": False}, "n"),
        ({"n": [2]}, "n"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"continue_final_message": 0}, "continue_final_message"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused({"model": "m", "messages": HELLO, **fields})
    assert error.param == param
    assert param in error.message


def test_a_whole_number_written_with_a_point_is_a_whole_number() -> None:
    assert chat(max_tokens=12.0).max_tokens == 12


def test_the_newer_limit_wins_in_chats() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).max_tokens == 9


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": {"type": "function"}},
        {"tools": ["f"]},
        {"documents": "text"},
        {"chat_template_kwargs": [1]},
        {"reasoning_effort": 3},
        {"chat_template": 3},
    ],
)
def test_other_wrong_fields_are_the_workers_to_judge(fields: dict[str, Any]) -> None:
    assert chat(**fields).prompt == NoPrompt("malformed")


def test_truncated_prompts_are_not_known() -> None:
    assert chat(truncate_prompt_tokens=100).prompt == NoPrompt("truncated")
    assert isinstance(chat(truncate_prompt_tokens=-1).prompt, ChatPrompt)
    assert prompt_of(Endpoint.COMPLETIONS, prompt="x", truncate_prompt_tokens=1) == NoPrompt("truncated")


@pytest.mark.parametrize(
    ("fields", "scored"),
    [
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": 5}, True),
        ({"prompt_logprobs": None}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True, "logprobs": 1}, True),
        ({"echo": True}, False),
        ({"echo": True, "logprobs": None}, False),
        ({"echo": False, "logprobs": 1}, False),
        ({"logprobs": 1}, False),
    ],
    ids=str,
)
def test_engines_compute_a_completions_prompt_anew_for_its_log_probabilities(
    fields: dict[str, Any], scored: bool
) -> None:
    for prompt in ("x", [1, 2]):
        found = prompt_of(Endpoint.COMPLETIONS, prompt=prompt, **fields)
        assert (found == NoPrompt("prompt_logprobs")) is scored


@pytest.mark.parametrize(
    ("fields", "scored"),
    [
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": 1}, True),
        ({"echo": True}, True),
        ({"echo": True, "top_logprobs": None}, True),
        ({"echo": False, "prompt_logprobs": None}, False),
        ({"logprobs": True, "top_logprobs": 3}, False),
    ],
    ids=str,
)
def test_engines_compute_a_chats_prompt_anew_for_its_log_probabilities(fields: dict[str, Any], scored: bool) -> None:
    assert (chat(**fields).prompt == NoPrompt("prompt_logprobs")) is scored


def test_a_wrong_prompt_is_refused_whatever_else_is_asked() -> None:
    assert refused({"model": "m", "prompt": 5, "prompt_logprobs": 1}, Endpoint.COMPLETIONS).param == "prompt"
    assert refused({"model": "m", "messages": [], "prompt_logprobs": 1}).param == "messages"


def test_completions() -> None:
    assert prompt_of(Endpoint.COMPLETIONS, prompt="a") == TextPrompt(("a",))
    assert prompt_of(Endpoint.COMPLETIONS, prompt=["a", "b"], add_special_tokens=False) == TextPrompt(("a", "b"), False)
    ids = prompt_of(Endpoint.COMPLETIONS, prompt=[1, 2, 4294967295])
    assert isinstance(ids, TokenPrompt)
    assert [list(tokens) for tokens in ids.token_lists] == [[1, 2, 4294967295]]
    lists = prompt_of(Endpoint.COMPLETIONS, prompt=[[1], [2, 3]])
    assert isinstance(lists, TokenPrompt)
    assert [list(tokens) for tokens in lists.token_lists] == [[1], [2, 3]]
    assert prompt_of(Endpoint.COMPLETIONS, prompt_embeds="...") == NoPrompt("prompt_embeds")


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], ["a", ""], [[]], [[1], []], 5, True, {}, [True], [1, True], [1, "a"], ["a", 1], [1.0], [-1],
     [4294967296], [[1], 2], [[1], "a"], [[1, -1]], [None], [[[1]]]],
    ids=repr,
)  # fmt: skip
def test_wrong_prompts_are_refused(prompt: object) -> None:
    assert refused({"model": "m", "prompt": prompt}, Endpoint.COMPLETIONS).param == "prompt"


class _Searched(bytes):
    """A body that counts how often it is searched."""

    searches = 0

    def __contains__(self, part: object) -> bool:
        type(self).searches += 1
        return super().__contains__(part)  # type: ignore[operator]


def test_a_body_of_many_prompts_is_not_searched_for_each_of_them() -> None:
    """200,000 prompts of one token, a megabyte, took minutes."""
    many = parse(_Searched(b'{"model":"m","prompt":[' + b"[1]," * 5_000 + b"[2]]}"), Endpoint.COMPLETIONS).prompt
    assert isinstance(many, TokenPrompt)
    assert len(many.token_lists) == 5_001
    assert 0 < _Searched.searches <= 2
    assert refused(b'{"model":"m","prompt":[' + b"[1]," * 100 + b"[true]]}", Endpoint.COMPLETIONS).param == "prompt"


def test_booleans_elsewhere_do_not_spoil_token_ids() -> None:
    prompt = prompt_of(Endpoint.COMPLETIONS, prompt=[1, 0], stream=True, echo=False)
    assert isinstance(prompt, TokenPrompt)


def test_generate_needs_no_model() -> None:
    request = parse({"text": "hi", "sampling_params": {"max_new_tokens": 3, "n": 2}}, Endpoint.GENERATE)
    assert (request.model, request.max_tokens, request.choices) == ("", 3, 2)
    assert request.prompt == TextPrompt(("hi",))
    ids = parse({"model": "m", "input_ids": [[1, 2], [3]], "sampling_params": [{}, {}]}, Endpoint.GENERATE).prompt
    assert isinstance(ids, TokenPrompt)
    assert refused({"text": ""}, Endpoint.GENERATE).param == "text"
    assert refused({"model": 4, "text": "x"}, Endpoint.GENERATE).param == "model"
    assert refused({"input_ids": [-1]}, Endpoint.GENERATE).param == "input_ids"
    assert parse({"text": "x", "image_data": "..."}, Endpoint.GENERATE).prompt == NoPrompt("multimodal")
    assert parse({"text": "x", "session_params": {"id": 1}}, Endpoint.GENERATE).prompt == NoPrompt("session")
    assert parse({"input_embeds": [[0.5]]}, Endpoint.GENERATE).prompt == NoPrompt("prompt_embeds")


def test_embeddings() -> None:
    assert prompt_of(Endpoint.EMBEDDINGS, input=["a", "b"]) == TextPrompt(("a", "b"))
    assert prompt_of(Endpoint.EMBEDDINGS, messages=HELLO) == ChatPrompt(HELLO, add_generation_prompt=False)
    assert prompt_of(Endpoint.EMBEDDINGS, input=[{"text": "a", "image": "b"}]) == NoPrompt("multimodal")
    assert refused({"model": "m"}, Endpoint.EMBEDDINGS).param == "input"


@pytest.mark.parametrize(
    ("endpoint", "body", "max_tokens"),
    [
        (Endpoint.RESPONSES, {"model": "m", "max_output_tokens": 4, "previous_response_id": "resp_1"}, 4),
        (Endpoint.MESSAGES, {"model": "m", "messages": "hello", "max_tokens": 5}, 5),
        (Endpoint.RERANK, {"model": "m", "query": "q", "documents": ["d"]}, None),
        (Endpoint.SCORE, {"model": "m", "text_1": "a", "text_2": "b"}, None),
        (Endpoint.TOKENIZE, {"prompt": "x"}, None),
        (Endpoint.DETOKENIZE, {"tokens": [1]}, None),
    ],
)
def test_endpoints_whose_tokens_are_not_known(endpoint: Endpoint, body: dict[str, Any], max_tokens: int | None) -> None:
    request = parse(body, endpoint)
    reasons = {Endpoint.RESPONSES: "session", Endpoint.MESSAGES: "malformed"}
    assert request.prompt == NoPrompt(reasons.get(endpoint, "endpoint"))
    assert request.max_tokens == max_tokens
    assert request.usage_asked


def test_session_comes_from_the_header_or_from_the_configured_field() -> None:
    body = {"model": "m", "messages": HELLO, "session_id": "body", "turn": 4, "flag": True, "long": "x" * 2000}
    assert parse(body).session is None
    assert parse(body, session="header").session == "header"
    assert parse(body, affinity_field="session_id").session == "body"
    assert parse(body, session="header", affinity_field="session_id").session == "header"
    assert parse(body, affinity_field="turn").session == "4"
    for unusable in ("missing", "flag", "long", "messages"):
        assert parse(body, affinity_field=unusable).session is None


def test_priority_of_the_body_wins() -> None:
    assert parse({"model": "m", "messages": HELLO}, priority=3).priority == 3
    assert parse({"model": "m", "messages": HELLO, "priority": 0}, priority=3).priority == 0


HEAD = b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":'


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (HEAD + b"[" + b"1," * 4_000_001 + b"1]}", "commas"),
        (HEAD + b"[" + b"[]," * 350_000 + b"1]}", "lists"),
        (HEAD + b"[" + b"{}," * 350_000 + b"1]}", "objects"),
        (HEAD + b"{" + b'"":1,' * 500_001 + b'"":1}}', "keys"),
        (b"[" * 2_000_000, "lists"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_millions_of_small_values_are_refused_before_they_are_decoded(body: bytes, what: str) -> None:
    error = refused(body)
    assert (error.code, error.status) == ("too_many_values", 400)
    assert what in error.message


def test_long_prompts_are_no_bombs() -> None:
    """A million token ids, and megabytes of JSON as a text."""
    assert isinstance(prompt_of(Endpoint.COMPLETIONS, prompt=list(range(1_000_000))), TokenPrompt)
    text = json.dumps([{"name": f"item {number}", "tags": ["a", "b"]} for number in range(60_000)])
    assert isinstance(prompt_of(Endpoint.COMPLETIONS, prompt=text), TextPrompt)


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.GENERATE], ids=str)
def test_the_key_that_keeps_prompts_apart(endpoint: Endpoint) -> None:
    def key(value: object, **more: object) -> str | None:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "text": "x"}
        raw = json.dumps(body | {"extra_key": value}).encode()
        return parse_request(endpoint, raw, request_id="r", **more).extra_key  # type: ignore[arg-type]

    assert key("a") == "a"
    assert key(None) is key(7) is None
    assert key("") == ("" if endpoint is Endpoint.GENERATE else None), "where the engine takes it for none"
    assert key(["a", "b"]) != key(["ab"]) is not None
    # The tenant's salt is written into it on the native path, and separates there already.
    assert key("a", tenant="t", salted=True) == (None if endpoint is Endpoint.GENERATE else "a")


@pytest.mark.parametrize(
    ("asked", "least", "counts", "taken"),
    [
        (-1, None, -1, False),  # no limit
        (-1, -5, -1, False),
        (-1, 0, 0, True),
        (-(1 << 70), 0, 0, True),
        (None, 0, 0, False),
        (3, 0, 3, False),
        (0, 1, 1, False),  # in our line only: the engine is told nothing better than usual
        (-1, 1, 1, True),
    ],
)
def test_a_priority_beyond_what_the_key_allows(asked: int | None, least: int | None, counts: int, taken: bool) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "}"}], "priority": asked}).encode() + b" "
    request = parse(body, least_priority=least)
    assert (request.priority, request.priority_taken) == (counts, taken)
    sent = ask_for_usual_priority(body, request)
    assert json.loads(sent) == json.loads(body) | ({"priority": 0} if taken else {})
    assert sent.startswith(body.rstrip()[:-1])
    assert taken or sent is body
