"""`kvgate engine`: one simulated worker behind real HTTP and real event sockets, in the manner of vLLM or SGLang.

Owns the HTTP port and what requests mean; `gateway.sim.ranks` owns engines, clocks and event feeds. A client that goes
away is taken out of its engine at once, and counted.

Beside the engine's paths: `GET /sim/state` and `GET /sim/body` (the newest inference body, as received) show what the
worker saw, `POST /sim/fault` makes it misbehave (`gateway.sim.faults`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable

import msgspec

from gateway.sim.exchange import Exchange, Line
from gateway.sim.faults import LYING_IN_WAIT, Fault, FaultKind, FaultQueue
from gateway.sim.host import EngineHost
from gateway.sim.http_server import HttpRequest, HttpServer, Reply
from gateway.sim.openai_answers import Answer, Answers
from gateway.sim.openai_asks import (
    ApiError,
    Ask,
    Body,
    Rules,
    chat_tokens,
    parse_chat,
    parse_completion,
    parse_json,
    text_tokens,
)
from gateway.sim.pages import (
    models_page,
    sglang_loads,
    sglang_metrics,
    sglang_model_info,
    sglang_old_loads,
    sglang_server_info,
    sources_page,
    vllm_metrics,
)
from gateway.sim.ranks import Ranks
from gateway.sim.releases import Dialect
from gateway.sim.settings import EngineSettings
from gateway.sim.sglang_http import GenerateAnswer, SglangAnswer, error_body, parse_generate, rank_of
from gateway.sim.speech import Speech

__all__ = ["Dialect", "EngineSettings", "Fault", "FaultKind", "SimulatedWorker", "Speech"]

_Routes = dict[tuple[str, str], Callable[[HttpRequest, Reply], None]]

_RESTART_DELAY_S = 0.01
"""A restart asked for over HTTP waits until its own answer is out."""


class _Session(msgspec.Struct):
    session_id: str


class SimulatedWorker:
    """`start` binds the ports and serves; `stop` drops every connection and frees them.

    `wall_clock` gives Unix seconds (time stamps on the wire only). Workers of one process may share `speech`.
    """

    def __init__(
        self, settings: EngineSettings, *, wall_clock: Callable[[], float], speech: Speech | None = None
    ) -> None:
        self.settings = settings
        self._wall_clock = wall_clock
        self._speech = speech if speech is not None else Speech.load(settings.tokenizer)
        self._sglang = settings.dialect is Dialect.SGLANG
        self._ranks = Ranks(settings, wall_clock=wall_clock)
        model = settings.engine_model()
        limit = min(settings.max_model_len, model.kv_tokens // settings.block_size * settings.block_size)
        names: dict[str, str | None] = {settings.model: None} | {name: name for name in settings.adapters}
        self._rules = Rules(names, limit, settings.default_output_tokens, lenient=self._sglang)
        self._http = HttpServer(self._handle)
        self._routes = self._common_routes() | (self._sglang_routes() if self._sglang else self._vllm_routes())
        self._paths = {path for _, path in self._routes}
        self._port = settings.port
        self._faults = FaultQueue()
        self._tickets = 0
        self._requests = 0
        self.aborted = 0
        self.received = 0
        self.closed_sessions: deque[str] = deque(maxlen=1000)
        self.bodies: deque[bytes] = deque(maxlen=max(1, settings.keep_bodies))

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Raises OSError or zmq.ZMQError when a port is taken."""
        self._ranks.boot()
        try:
            self._port = await self._http.start(self.settings.host, self.settings.port)
        except OSError:
            self._ranks.shut_down()
            raise

    async def stop(self) -> None:
        """Idempotent."""
        await self._http.stop()
        self._ranks.shut_down()

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return f"http://{self.settings.host}:{self._port}"

    @property
    def events_endpoint(self) -> str | None:
        """Where to subscribe to rank 0, None without events."""
        publisher = self._ranks.first.publisher
        return None if publisher is None else f"tcp://{self.settings.host}:{publisher.port}"

    @property
    def replay_endpoint(self) -> str | None:
        """Where to ask rank 0 for replays, None without."""
        publisher = self._ranks.first.publisher
        port = None if publisher is None else publisher.replay_port
        return None if port is None else f"tcp://{self.settings.host}:{port}"

    @property
    def load_endpoint(self) -> str | None:
        """Where rank 0 publishes its load, None where it does not."""
        publisher = self._ranks.first.load_publisher
        return None if publisher is None else f"tcp://{self.settings.host}:{publisher.port}"

    @property
    def connections(self) -> int:
        """Open HTTP connections."""
        return self._http.connections

    def state(self) -> dict[str, object]:
        """What `GET /sim/state` shows. Counts of the engine start at 0 again after a restart."""
        return {
            "name": self.settings.name,
            "dialect": self.settings.dialect,
            "version": self.settings.said_version(),
            "aborted": self.aborted,
            "connections": self.connections,
            "received": self.received,
            "last_body_sha256": hashlib.sha256(self.bodies[-1]).hexdigest() if self.bodies else None,
        } | self._ranks.state()

    # ---------------------------------------------------------------- routes

    def _common_routes(self) -> _Routes:
        return {
            ("POST", "/v1/chat/completions"): self._infer,
            ("POST", "/v1/completions"): self._infer,
            ("GET", "/health"): self._empty,
            ("GET", "/ping"): self._empty,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("GET", "/sim/state"): lambda _, reply: reply.send(200, _json(self.state())),
            ("GET", "/sim/body"): self._newest_body,
            ("POST", "/sim/fault"): self._take_fault,
        }

    def _vllm_routes(self) -> _Routes:
        version = _json({"version": self.settings.said_version()})
        return {
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): lambda _, reply: reply.send(
                200, _json({"success": self._ranks.reset_caches()})
            ),
            ("GET", "/version"): lambda _, reply: reply.send(200, version),
            ("GET", "/load"): lambda _, reply: reply.send(200, _json({"server_load": self._load()})),
            ("GET", "/kv_event_sources"): lambda _, reply: reply.send(200, sources_page(self._ranks.hosts)),
        }

    def _sglang_routes(self) -> _Routes:
        release = self.settings.release()
        routes: _Routes = {
            ("POST", "/generate"): self._infer,
            ("POST", "/flush_cache"): self._flush,
            ("GET", "/flush_cache"): self._flush,
            ("POST", "/close_session"): self._close_session,
            ("GET", "/health_generate"): self._empty,
            ("GET", "/get_model_info"): self._model_info,
            ("GET", "/get_server_info"): self._server_info,
        }
        if release >= (0, 5, 5):
            routes |= {("POST", path): self._tokenize for path in ("/tokenize", "/v1/tokenize")}
            routes |= {("POST", path): self._detokenize for path in ("/detokenize", "/v1/detokenize")}
        if release >= (0, 5, 8):
            routes |= {("GET", "/server_info"): self._server_info, ("GET", "/model_info"): self._model_info}
            routes |= {("GET", "/v1/loads"): self._loads}
        if (0, 5, 3) <= release < (0, 5, 21):
            routes |= {("GET", "/get_load"): lambda _, reply: reply.send(200, sglang_old_loads(self._ranks.hosts))}
        return routes

    def _handle(self, request: HttpRequest, reply: Reply) -> None:
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            known = request.path in self._paths
            reply.send(405 if known else 404, _json({"detail": "Method Not Allowed" if known else "Not Found"}))
            return
        try:
            handler(request, reply)
        except ApiError as error:
            if self._sglang:
                reply.send(error.status, error_body(error))
            else:
                reply.send(error.status, error.body, headers={"x-request-id": self._request_id(request)})

    # ---------------------------------------------------------------- inference

    def _infer(self, request: HttpRequest, reply: Reply) -> None:
        self.received += 1
        self.bodies.append(request.body)
        fault = self._faults.meet()
        if fault is not None:
            match fault.kind:
                case FaultKind.STATUS:
                    raise ApiError(fault.code, "simulated fault")
                case FaultKind.RESET:
                    reply.cut()
                    return
                case FaultKind.FREEZE:
                    reply.on_gone = self._count_abort
                    return
                case _:
                    pass
        if "json" not in request.headers.get("content-type", "application/json"):
            text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise ApiError(400, text, type_name="Bad Request")
        body = parse_json(request.body)
        parse = {"/v1/chat/completions": parse_chat, "/generate": parse_generate}.get(request.path, parse_completion)
        host = self._pick(body, request)
        self._begin(parse(body, self._rules, speech=self._speech), request, reply, fault, host)

    def _pick(self, body: Body, request: HttpRequest) -> EngineHost:
        """The rank the request goes to."""
        named: object = request.headers.get("x-data-parallel-rank")
        if self._sglang:
            native = request.path == "/generate"
            named = rank_of(body, request.headers, self.settings.release(), native=native)
        try:
            return self._ranks.pick(None if named is None else int(str(named)))
        except (ValueError, LookupError) as error:
            raise ApiError(400, str(error)) from error

    def _begin(self, ask: Ask, request: HttpRequest, reply: Reply, fault: Fault | None, host: EngineHost) -> None:
        settings = self.settings
        request_id = self._request_id(request)
        answer = self._answer(ask, request.path, request_id, host.rank)
        choices = ask.shape.choices
        lines = [
            self._line(ask, prompt, index * choices + choice, choice)
            for index, prompt in enumerate(ask.prompts)
            for choice in range(choices)
        ]
        exchange = Exchange(
            ask,
            answer,
            reply,
            lines,
            block_size=settings.block_size,
            headers={} if self._sglang else {"x-request-id": request_id},
            fault=fault,
        )
        exchange.begin()
        reply.on_gone = lambda: self._gone(exchange, host)
        host.submit(exchange)

    def _answer(self, ask: Ask, path: str, request_id: str, rank: int) -> Answers:
        settings, created = self.settings, int(self._wall_clock())
        details = settings.prompt_tokens_details
        if not self._sglang:
            answer_id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{request_id}"
            return Answer(ask, answer_id=answer_id, created=created, version=settings.said_version(), details=details)
        answer_id = hashlib.sha256(request_id.encode()).hexdigest()[:32]
        if path == "/generate":
            return GenerateAnswer(ask, answer_id=answer_id, rank=rank if settings.data_parallel_size > 1 else None)
        return SglangAnswer(ask, answer_id=answer_id, created=created, details=details)

    def _line(self, ask: Ask, prompt: list[int], index: int, choice: int) -> Line:
        self._tickets += 1
        if ask.tool_call is not None:
            output = self._speech.encode(ask.tool_call.arguments, special=False)
        else:
            output = self._speech.answer(prompt, ask.output_tokens, choice)
        return Line(self._tickets, index, prompt, output, self._speech.pieces(output))

    def _gone(self, exchange: Exchange, host: EngineHost) -> None:
        self._count_abort()
        host.drop(exchange)

    def _count_abort(self) -> None:
        self.aborted += 1

    def _request_id(self, request: HttpRequest) -> str:
        self._requests += 1
        made = hashlib.sha256(f"{self.settings.name} {self._ranks.first.boots} {self._requests}".encode()).hexdigest()[
            :16
        ]
        return request.headers.get("x-request-id") or made

    # ---------------------------------------------------------------- other pages

    def _empty(self, request: HttpRequest, reply: Reply) -> None:
        reply.send(200, content_type=None)

    def _load(self) -> int:
        return sum(host.load for host in self._ranks.hosts)

    def _close_session(self, request: HttpRequest, reply: Reply) -> None:
        self.closed_sessions.append(msgspec.json.decode(request.body, type=_Session).session_id)
        reply.send(200, b"")

    def _flush(self, request: HttpRequest, reply: Reply) -> None:
        if self._load() or not self._ranks.reset_caches():
            raise ApiError(400, "Flush cache failed: requests are running or waiting.")
        reply.send(200, b"Cache flushed.\n", content_type="text/plain; charset=utf-8")

    def _loads(self, request: HttpRequest, reply: Reply) -> None:
        page = sglang_loads(self._ranks.hosts, version=self.settings.said_version(), unix_s=self._wall_clock())
        reply.send(200, page)

    def _server_info(self, request: HttpRequest, reply: Reply) -> None:
        page = sglang_server_info(
            self._ranks.first, page_size=self.settings.block_size, max_model_len=self._rules.max_model_len
        )
        reply.send(200, page)

    def _model_info(self, request: HttpRequest, reply: Reply) -> None:
        page = sglang_model_info(model=self.settings.model, path=str(self.settings.tokenizer.resolve()))
        reply.send(200, page)

    def _tokenize(self, request: HttpRequest, reply: Reply) -> None:
        body = parse_json(request.body)
        if "messages" in body:
            tokens = chat_tokens(body, self._speech, self._rules)
        else:
            special = body.get("add_special_tokens") is not False
            tokens = text_tokens(str(body.get("prompt", "")), self._speech, special=special)
        limit = self._rules.max_model_len
        if self._sglang:
            reply.send(200, _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit}))
            return
        strings = self._speech.token_strings(tokens) if body.get("return_token_strs") else None
        reply.send(200, _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings}))

    def _detokenize(self, request: HttpRequest, reply: Reply) -> None:
        tokens = parse_json(request.body).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise ApiError(400, "tokens must be a list of token ids", param="tokens")
        reply.send(200, _json({"text" if self._sglang else "prompt": self._speech.decode(tokens)}))

    def _metrics(self, request: HttpRequest, reply: Reply) -> None:
        hosts, model = self._ranks.hosts, self.settings.model
        if self._sglang:
            page = sglang_metrics(hosts, model=model)
        else:
            page = vllm_metrics(hosts, model=model, unix_s=self._wall_clock())
        reply.send(200, page, content_type="text/plain; version=0.0.4; charset=utf-8")

    def _models(self, request: HttpRequest, reply: Reply) -> None:
        settings = self.settings
        page = models_page(
            self._rules.models,
            base=settings.model,
            root=settings.model if self._sglang else str(settings.tokenizer.resolve()),
            max_model_len=self._rules.max_model_len,
            created=int(self._ranks.first.start_time_unix),
            owner=settings.dialect,
        )
        reply.send(200, page)

    def _newest_body(self, request: HttpRequest, reply: Reply) -> None:
        reply.send(200, self.bodies[-1] if self.bodies else b"", content_type="application/octet-stream")

    # ---------------------------------------------------------------- faults

    def _take_fault(self, request: HttpRequest, reply: Reply) -> None:
        try:
            fault = msgspec.json.decode(request.body, type=Fault)
        except msgspec.MsgspecError as error:
            raise ApiError(400, str(error)) from error
        reply.send(200, b'{"ok":true}')
        if fault.kind is FaultKind.RESTART:
            asyncio.get_running_loop().call_later(_RESTART_DELAY_S, self.fault, fault)
        else:
            self.fault(fault)

    def fault(self, fault: Fault) -> None:
        """Misbehave; see `FaultKind`. Those for the event feed do nothing without one."""
        if fault.kind in LYING_IN_WAIT:
            self._faults.add(fault)
            return
        if fault.kind is FaultKind.RESTART:
            self._http.drop_connections()
            self._ranks.boot()
            return
        if fault.kind is FaultKind.HEAL:
            self._faults.heal()
        self._ranks.fault(fault)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
