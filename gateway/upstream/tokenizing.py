"""Token ids of prompts from the engines: asked in the background, used by the requests that follow.

A model whose prompts cannot be tokenised here (`models[].tokenize_at`) is still found exactly: when a worker has begun
to answer, the same prompt is sent to a render or tokenise endpoint, and what comes back is kept by its text
(`prefix.known`). No request ever waits for this.

Rules:
1. Asked is `POST /v1/chat/completions/render` or `/v1/completions/render` (vLLM from 0.16, and its render servers), and
   where there is none `POST /tokenize` (vLLM, SGLang from 0.5.5). The latter knows neither reasoning effort nor
   documents: prompts with these stay with their text there.
2. At most `concurrency` questions run and `queue_size` wait; a new one pushes the oldest out. Each has a deadline.
3. A server that fails `_FAILURES` times in a row is left alone for `_PAUSE_S`, and while none answers the model's
   prompts go by their text (`KnownPrompts.usable`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import structlog

from gateway import keys
from gateway.errors import UNREADABLE
from gateway.prefix import KnownPrompts
from gateway.records import ChatPrompt, InferenceRequest, PrefixBlocks, TextPrompt, WorkerSpec
from gateway.upstream.control import ControlClient, ProbeFailed

_FAILURES = 3
_PAUSE_S = 10.0
_MAX_SERVERS = 2048
"""Servers whose abilities are remembered: more than a fleet has workers."""
_MAX_BODY_BYTES = 2 << 20
"""Longer prompts are not asked for: half a million tokens."""


@dataclass(frozen=True, slots=True)
class TokenizingSettings:
    """`timeout_s` is for one question. An engine tokenises 100,000 tokens in some 0.2 s."""

    timeout_s: float = 2.0
    concurrency: int = 4
    queue_size: int = 256


class Untold(NamedTuple):
    """A prompt whose token ids are not known here. `text` are the blocks of its text, `adapter` and `block_size` those
    of its token keys."""

    request: InferenceRequest
    text: PrefixBlocks
    known: KnownPrompts
    adapter: str | None
    block_size: int


class _Question(NamedTuple):
    """`server` is the base URL that is asked."""

    untold: Untold
    server: str
    api_key: str | None


@dataclass(slots=True)
class _Server:
    """What is known of one server. `renders` is None until it was asked."""

    renders: bool | None = None
    failures: int = 0
    paused_until: float = 0.0


class _Tokens(msgspec.Struct):
    """An answer of `/tokenize`, or a rendered request."""

    tokens: list[int] | None = None
    token_ids: list[int] | None = None


@dataclass(slots=True)
class EngineTokenizing:
    """One for a process. `ask` is called from the request path and returns at once; `run` is one of `concurrency` tasks
    of the supervisor."""

    control: ControlClient
    clock: Callable[[], float]
    settings: TokenizingSettings = field(default_factory=TokenizingSettings)
    results: Counter[str] = field(default_factory=Counter)
    """Questions by result: `told`, `failed`, `pushed_out`, `skipped` (too long, or the server is being left alone)."""
    _waiting: deque[_Question] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _servers: dict[str, _Server] = field(default_factory=dict)

    def ask(self, untold: Untold, worker: WorkerSpec) -> None:
        """Learn a prompt's tokens, from `worker` (which has the request) unless a render server is configured."""
        if untold.request.body_bytes > _MAX_BODY_BYTES:
            self.results["skipped"] += 1
            return
        if len(self._waiting) >= self.settings.queue_size:
            self._waiting.popleft()
            self.results["pushed_out"] += 1
        server = untold.known.server
        self._waiting.append(
            _Question(untold, worker.url, worker.api_key) if server is None else _Question(untold, server, None)
        )
        self._wake.set()

    async def run(self) -> None:
        """Ask, one question after the other, for ever."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            await self._settle(self._waiting.popleft())

    # ------------------------------------------------------------------ inside

    async def _settle(self, question: _Question) -> None:
        request, text, known, adapter, block_size = question.untold
        server = self._server(question.server)
        if self.clock() < server.paused_until:
            self.results["skipped"] += 1
            return
        if not known.wants(text, block_size=block_size):
            return  # another one has told meanwhile
        try:
            ids = await self._ids(question, server)
        except (ProbeFailed, *UNREADABLE) as error:
            self._failed(question, server, str(error))
            return
        except UnicodeEncodeError:
            ids = None  # lone surrogates, which no engine can encode either
        if ids is None:
            self.results["skipped"] += 1
            return
        try:
            known.learn(text, keys.namespace(adapter, request.cache_salt), ids, block_size=block_size)
        except (ValueError, TypeError) as error:
            self._failed(question, server, f"{question.server} told token ids that are none: {error}")
            return
        self.results["told"] += 1
        server.failures = 0
        known.usable = True

    async def _ids(self, question: _Question, server: _Server) -> list[int] | None:
        """The token ids; None when this server cannot tell those of this prompt. Raises ProbeFailed, or what
        `UNREADABLE` names."""
        prompt = question.untold.request.prompt
        if server.renders is not False:
            chat = isinstance(prompt, ChatPrompt)
            answer = await self._post(question, "/v1/chat/completions/render" if chat else "/v1/completions/render")
            if answer is not None:
                server.renders = True
                if chat:
                    return _told(msgspec.json.decode(answer, type=_Tokens).token_ids)
                rendered = msgspec.json.decode(answer, type=list[_Tokens])  # one object a prompt
                return _told(rendered[0].token_ids if rendered else None)
            server.renders = False
        if isinstance(prompt, ChatPrompt) and (prompt.reasoning_effort is not None or prompt.documents):
            return None
        answer = await self._post(question, "/tokenize")
        if answer is None:
            raise ProbeFailed(f"{question.server} has no render and no tokenise endpoint")
        return _told(msgspec.json.decode(answer, type=_Tokens).tokens)

    async def _post(self, question: _Question, path: str) -> bytes | None:
        """The answer; None for a path that is not there."""
        answer = await self.control.post(
            question.server + path,
            msgspec.json.encode(_body(question.untold.request)),
            api_key=question.api_key,
            timeout_s=self.settings.timeout_s,
        )
        if answer.status in (404, 405, 501):
            return None
        if answer.status != 200:
            raise ProbeFailed(f"{question.server}{path} answered {answer.status}")
        return answer.body

    def _failed(self, question: _Question, server: _Server, reason: str) -> None:
        self.results["failed"] += 1
        server.failures += 1
        if server.failures >= _FAILURES:
            server.failures = 0
            server.paused_until = self.clock() + _PAUSE_S
            question.untold.known.usable = False
            structlog.get_logger("kvgate.tokenizing").warning(
                "token ids cannot be had: prompts go by their text", server=question.server, reason=reason
            )

    def _server(self, url: str) -> _Server:
        server = self._servers.get(url)
        if server is None:
            if len(self._servers) >= _MAX_SERVERS:
                del self._servers[next(iter(self._servers))]
            server = self._servers[url] = _Server()
        return server


def _told(ids: list[int] | None) -> list[int]:
    if ids is None:
        raise ProbeFailed("the answer has no token ids")
    return ids


def _body(request: InferenceRequest) -> dict[str, object]:
    """What of a request decides its tokens, under the names that chat, completions and tokenise endpoints share."""
    match request.prompt:
        case ChatPrompt() as chat:
            body: dict[str, object] = {
                "model": request.model,
                "messages": chat.messages,
                "add_generation_prompt": chat.add_generation_prompt,
                "continue_final_message": chat.continue_final_message,
                "add_special_tokens": chat.add_special_tokens,
            }
            given = {
                "tools": chat.tools,
                "tool_choice": chat.tool_choice,
                "chat_template_kwargs": chat.template_kwargs,
                "documents": chat.documents,
                "reasoning_effort": chat.reasoning_effort,
                "chat_template": chat.chat_template,
            }
            return body | {name: value for name, value in given.items() if value}
        case TextPrompt(texts) as text:
            return {"model": request.model, "prompt": texts[0], "add_special_tokens": text.add_special_tokens}
        case _:
            return {}
