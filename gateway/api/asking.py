"""Changes to a request body: written into its text, all other bytes as they were.

Rules:
1. `body` is the one that the `InferenceRequest` was parsed from. What is not to be changed is returned as it is.
2. A member is written before the last brace. Of two equal keys the engines take the last, which is this one.
"""

from __future__ import annotations

import base64
import hashlib
import json

from gateway.records import Endpoint, InferenceRequest

_ASK = b',"stream_options":{"include_usage":true}'

SALTED = frozenset(
    {
        Endpoint.CHAT,
        Endpoint.COMPLETIONS,
        Endpoint.RESPONSES,
        Endpoint.EMBEDDINGS,
        Endpoint.MESSAGES,
        Endpoint.GENERATE,
    }
)
"""Endpoints whose prompt enters the prefix cache. Engines ignore fields they do not know; a `cache_salt` on
`/v1/messages` is one of these up to vLLM 0.33."""


def ask_for_usage(body: bytes, request: InferenceRequest) -> bytes:
    """The body with `stream_options.include_usage` true, all other bytes as they were.

    A second `stream_options` is written before the last brace: engines take the last of two equal keys. It keeps the
    client's other members of the object. The body itself is returned when the request is no stream, has asked
    already, or gets its usage anyway. `body` must be the one `request` was parsed from.
    """
    if request.usage_asked or not request.stream:
        return body
    end = body.rindex(b"}")
    if not request.stream_options:
        return b"".join((body[:end], _ASK, body[end:]))
    options = {**request.stream_options, "include_usage": True}
    return b"".join((body[:end], b',"stream_options":', json.dumps(options).encode(), body[end:]))


def ask_for_model(body: bytes, model: str) -> bytes:
    """The body with another model's name, all other bytes as they were; `body` names one. Of two equal keys the engines
    take the last, which is this one."""
    end = body.rindex(b"}")
    return b"".join((body[:end], b',"model":', json.dumps(model).encode(), body[end:]))


def ask_for_session(body: bytes, name: str) -> bytes:
    """The body with a session for SGLang, all other bytes as they were; `body` names none, and is not empty."""
    end = body.rindex(b"}")
    return b'%b,"session_id":"%b"%b' % (body[:end], name.encode(), body[end:])


def ask_for_rank(body: bytes, rank: int) -> bytes:
    """The body of SGLang's native `/generate` with its data-parallel rank, all other bytes as they were. That path
    takes no header for it; of two equal keys the engine takes the last, which is this one."""
    end = body.rindex(b"}")
    comma = b"," if body[:end].strip() != b"{" else b""
    return b'%b%b"routed_dp_rank":%d%b' % (body[:end], comma, rank, body[end:])


def ask_for_usual_priority(body: bytes, request: InferenceRequest) -> bytes:
    """The body with priority 0 where it asks for a better one than its key allows, all other bytes as they were: the
    engine's own queue must not be passed by it either. Of two equal keys the engines take the last, which is this
    one; any other number than 0 is refused by engines that do not schedule by priority."""
    if not request.priority_taken:
        return body
    end = body.rindex(b"}")
    return b'%b,"priority":0%b' % (body[:end], body[end:])


def ask_for_salt(body: bytes, request: InferenceRequest) -> bytes:
    """The body with the request's cache salt, which `parse_request` made of its tenant's and the client's own; all
    other bytes as they were. Of two equal keys the engines take the last, which is this one.

    SGLang's own `/generate` took only `extra_key` before it took `cache_salt`, so both are written there.
    """
    if request.endpoint not in SALTED or request.cache_salt is None:
        return body
    salt = request.cache_salt.encode()
    end = body.rindex(b"}")
    # Only the native paths know a body without any field.
    comma = b"," if request.model or body[:end].strip() != b"{" else b""
    also = b',"extra_key":"%b"' % salt if request.endpoint is Endpoint.GENERATE else b""
    return b'%b%b"cache_salt":"%b"%b%b' % (body[:end], comma, salt, also, body[end:])


def tenant_salt(tenant: str, *given: object) -> str:
    """43 characters that no other tenant can bring about, whatever salt it gives (letters, digits, dash, underscore:
    vLLM refuses some others). The client's own salts still separate its requests from each other."""
    text = json.dumps([tenant, *given])
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
