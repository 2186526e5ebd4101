"""A chat workload for demos and comparisons: conversations of several applications, and the client that holds them.

The plan is made first, from a seed: applications with long system prompts of their own, sessions that arrive at a
given rate whatever the servers do (open loop), each with some turns, think time between them, and a history that
grows with the answers really given. The same plan can be driven against several URLs at once.

Texts are made-up English; the sizes are what matters. Nothing here knows how requests are routed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import httpx
import msgspec

_TEXT = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people how too little state good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came right used take
three order account ticket refund invoice delivery customer answer policy rule step check system user request reply
question document table field value report date number open close
"""
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """Sizes in words (about two tokens each with the demo tokenizer), times in seconds, ranges inclusive."""

    seed: int = 1
    duration_s: float = 40.0
    sessions_per_s: float = 2.0
    applications: int = 20
    system_words: tuple[int, int] = (1600, 2400)
    user_words: tuple[int, int] = (15, 45)
    answer_tokens: tuple[int, int] = (20, 44)
    turns: tuple[int, int] = (3, 8)
    think_s: tuple[float, float] = (0.3, 2.5)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question: sent `think_s` after the answer before it; the answer has `answer_tokens` tokens."""

    user: str
    answer_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation with an application, `arrives_s` after the start."""

    name: str
    arrives_s: float
    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """How one request went. Times are seconds; `ttft_s` runs to the first text. `cached_tokens` is None when the
    server does not say. `error` is a short word, None for a complete answer. `worker` is who the gateway named."""

    session: str
    turn: int
    started_at: float
    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    worker: str | None = None
    error: str | None = None


def plan(settings: WorkloadSettings) -> list[Session]:
    """The sessions that arrive within the duration, in order of arrival. The same settings give the same plan."""
    chance = Random(settings.seed)
    systems = [
        f"You are assistant number {number} of {settings.applications}. {_text(chance, settings.system_words)}"
        for number in range(settings.applications)
    ]
    sessions: list[Session] = []
    deck: list[str] = []
    at = 0.0
    while (at := at + chance.expovariate(settings.sessions_per_s)) < settings.duration_s:
        turns = tuple(
            Turn(
                user=_text(chance, settings.user_words),
                answer_tokens=chance.randint(*settings.answer_tokens),
                think_s=chance.uniform(*settings.think_s),
            )
            for _ in range(chance.randint(*settings.turns))
        )
        if not deck:  # every application once before any comes again
            deck = chance.sample(systems, k=len(systems))
        sessions.append(Session(f"s{len(sessions)}", at, deck.pop(), turns))
    return sessions


class ChatDriver:
    """Drives a plan against one base URL. `clock` is monotonic seconds; `on_result` hears of every request.

    `open_requests` counts those under way. Requests that would start after `stop_after_s` are not sent.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        clock: Callable[[], float],
        on_result: Callable[[TurnResult], None],
        stop_after_s: float = float("inf"),
        session_header: str = "x-session-id",
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._clock = clock
        self._on_result = on_result
        self._stop_after_s = stop_after_s
        self._session_header = session_header
        self.open_requests = 0

    async def run(self, sessions: Sequence[Session]) -> None:
        """Returns when the last session is over. Errors of requests end their session and are results, not raised."""
        begin = self._clock()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(30.0, connect=10.0)
        async with (
            httpx.AsyncClient(base_url=self._base_url, limits=limits, timeout=timeout, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            for session in sessions:
                await asyncio.sleep(max(0.0, begin + session.arrives_s - self._clock()))
                group.create_task(self._hold(client, session, begin + self._stop_after_s))

    async def _hold(self, client: httpx.AsyncClient, session: Session, stop_at: float) -> None:
        messages = [{"role": "system", "content": session.system}]
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(turn.think_s)
            if self._clock() >= stop_at:
                return
            messages.append({"role": "user", "content": turn.user})
            self.open_requests += 1
            try:
                result, answer = await self._ask(client, session, number, messages)
            finally:
                self.open_requests -= 1
            self._on_result(result)
            if result.error is not None:
                return
            messages.append({"role": "assistant", "content": answer})

    async def _ask(
        self, client: httpx.AsyncClient, session: Session, number: int, messages: list[dict[str, str]]
    ) -> tuple[TurnResult, str]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": session.turns[number].answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        heard = _Heard(self._clock)
        worker = error = None
        try:
            request = client.build_request(
                "POST",
                "/v1/chat/completions",
                content=msgspec.json.encode(body),
                headers={"content-type": "application/json", self._session_header: session.name},
            )
            response = await client.send(request, stream=True)
            try:
                worker = response.headers.get("x-kvgate-worker")
                if response.status_code == 200:
                    async for line in response.aiter_lines():
                        heard.line(line)
                    error = None if heard.ended else "incomplete"
                else:
                    error = f"status_{response.status_code}"
            finally:
                await response.aclose()
        except httpx.TimeoutException:
            error = "timeout"
        except httpx.TransportError:
            error = "connection"
        except msgspec.DecodeError:
            error = "malformed"
        now, usage = self._clock(), heard.usage
        result = TurnResult(
            session=session.name,
            turn=number,
            started_at=heard.started_at,
            ttft_s=None if heard.first_at is None else heard.first_at - heard.started_at,
            total_s=now - heard.started_at,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=None if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens,
            worker=worker,
            error=error,
        )
        return result, "".join(heard.text)


# --------------------------------------------------------------------------- reading a stream


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None


@dataclass(slots=True)
class _Heard:
    """What a stream has said so far."""

    clock: Callable[[], float]
    started_at: float = field(init=False)
    first_at: float | None = None
    text: list[str] = field(default_factory=list)
    usage: _Usage = field(default_factory=_Usage)
    ended: bool = False

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def line(self, line: str) -> None:
        """Raises msgspec.DecodeError for an event that is no JSON."""
        if not line.startswith("data: "):
            return
        data = line[6:]
        if data == "[DONE]":
            self.ended = True
            return
        event = _EVENTS.decode(data)
        for choice in event.choices:
            if choice.delta.content:
                if self.first_at is None:
                    self.first_at = self.clock()
                self.text.append(choice.delta.content)
        if event.usage is not None:
            self.usage = event.usage


_EVENTS = msgspec.json.Decoder(_Event)


def _text(chance: Random, words: tuple[int, int]) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(*words))).capitalize() + "."
