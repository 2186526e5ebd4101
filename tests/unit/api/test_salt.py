"""A cache salt of the tenant's own: in the request's record and, byte for byte beside everything else, in its body."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import ask_for_salt, parse_request
from gateway.records import Endpoint

BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi }"}]},
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Endpoint.RESPONSES: {"model": "m", "input": "hi"},
    Endpoint.EMBEDDINGS: {"model": "m", "input": "hi"},
    Endpoint.MESSAGES: {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
    Endpoint.GENERATE: {"text": "hi"},
    Endpoint.TOKENIZE: {"prompt": "hi"},
    Endpoint.DETOKENIZE: {"tokens": [1]},
    Endpoint.RERANK: {"model": "m", "query": "a", "documents": ["b"]},
    Endpoint.SCORE: {"model": "m", "text_1": "a", "text_2": "b"},
}
SALTED = {e for e in Endpoint} - {Endpoint.TOKENIZE, Endpoint.DETOKENIZE, Endpoint.RERANK, Endpoint.SCORE}


def salted(endpoint: Endpoint, body: bytes, tenant: str | None = "a") -> tuple[str | None, bytes]:
    request = parse_request(endpoint, body, request_id="r", tenant=tenant, salted=True)
    return request.cache_salt, ask_for_salt(body, request)


@pytest.mark.parametrize("endpoint", list(Endpoint), ids=str)
def test_where_a_salt_is_written(endpoint: Endpoint) -> None:
    body = json.dumps(BODIES[endpoint]).encode() + b" \n"
    salt, sent = salted(endpoint, body)
    if endpoint not in SALTED:
        assert (salt, sent) == (None, body)
        return
    assert salt is not None
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}", salt), "what vLLM takes"
    more = {"cache_salt": salt} | ({"extra_key": salt} if endpoint is Endpoint.GENERATE else {})
    assert json.loads(sent) == BODIES[endpoint] | more
    assert sent.startswith(body.rstrip()[:-1]), "nothing else has changed"


def test_nothing_is_written_without_a_tenant_or_unless_asked() -> None:
    body = json.dumps(BODIES[Endpoint.CHAT] | {"cache_salt": "mine"}).encode()
    assert salted(Endpoint.CHAT, body, tenant=None)[0] == "mine"
    request = parse_request(Endpoint.CHAT, body, request_id="r", tenant="a")
    assert (request.tenant, request.cache_salt) == ("a", "mine")


def test_an_empty_native_body_stays_json() -> None:
    request = parse_request(Endpoint.GENERATE, b'{"text":"x"}', request_id="r", tenant="a", salted=True)
    assert json.loads(ask_for_salt(b"{ }", request)).keys() == {"cache_salt", "extra_key"}


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "a.b"]), st.none() | st.text(max_size=50)),
        min_size=2,
        max_size=8,
        unique=True,
    )
)
def test_tenants_never_share_and_a_clients_own_salts_still_separate(pairs: list[tuple[str, str | None]]) -> None:
    """Whatever a client gives, even what another tenant's salt is."""
    salts = set()
    for tenant, own in pairs:
        body = json.dumps(BODIES[Endpoint.CHAT] | ({} if own is None else {"cache_salt": own})).encode()
        salt, sent = salted(Endpoint.CHAT, body, tenant)
        assert json.loads(sent)["cache_salt"] == salt
        salts.add(salt)
    assert len(salts) == len(pairs)


def test_a_salt_found_out_is_of_no_use_to_another_tenant() -> None:
    of_a, _ = salted(Endpoint.CHAT, json.dumps(BODIES[Endpoint.CHAT]).encode(), "a")
    stolen = json.dumps(BODIES[Endpoint.CHAT] | {"cache_salt": of_a}).encode()
    assert salted(Endpoint.CHAT, stolen, "b")[0] != of_a


@pytest.mark.parametrize("given", ["k", ["k", "l"], [1, {}], 5, None])
def test_sglangs_own_key_is_kept_apart(given: object) -> None:
    plain, _ = salted(Endpoint.GENERATE, b'{"text":"x"}')
    body = json.dumps({"text": "x", "extra_key": given}).encode()
    salt, sent = salted(Endpoint.GENERATE, body)
    assert json.loads(sent)["extra_key"] == salt
    assert (salt != plain) is isinstance(given, str | list)
