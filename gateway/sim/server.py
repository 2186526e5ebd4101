"""`kvgate engine`: one simulated worker behind real HTTP and real event sockets, in the manner of vLLM 0.32.

Owns the HTTP port and what requests mean; `gateway.sim.host` owns engine, clock and event feed. A client that goes
away is taken out of the engine at once, and counted.

Beside vLLM's paths: `GET /sim/state` and `GET /sim/body` (the newest inference body, as received) show what the
worker saw, `POST /sim/fault` makes it misbehave (`gateway.sim.faults`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from gateway.sim.exchange import Exchange, Line
from gateway.sim.faults import LYING_IN_WAIT, Fault, FaultKind, FaultQueue
from gateway.sim.host import EngineHost, EngineSettings
from gateway.sim.http_server import HttpRequest, HttpServer, Reply
from gateway.sim.openai_answers import Answer
from gateway.sim.openai_asks import (
    ApiError,
    Ask,
    Rules,
    chat_tokens,
    parse_chat,
    parse_completion,
    parse_json,
    text_tokens,
)
from gateway.sim.pages import metrics_page, models_page, sources_page
from gateway.sim.speech import Speech

__all__ = ["EngineSettings", "Fault", "FaultKind", "SimulatedWorker", "Speech"]

_RESTART_DELAY_S = 0.01
"""A restart asked for over HTTP waits until its own answer is out."""


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
        self._host = EngineHost(settings, wall_clock=wall_clock)
        limit = min(settings.max_model_len, self._host.model.kv_tokens // settings.block_size * settings.block_size)
        names: dict[str, str | None] = {settings.model: None} | {name: name for name in settings.adapters}
        self._rules = Rules(names, limit, settings.default_output_tokens)
        self._http = HttpServer(self._handle)
        self._routes = self._all_routes()
        self._paths = {path for _, path in self._routes}
        self._port = settings.port
        self._faults = FaultQueue()
        self._tickets = 0
        self._requests = 0
        self.aborted = 0
        self.received = 0
        self.bodies: deque[bytes] = deque(maxlen=max(1, settings.keep_bodies))

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Raises OSError or zmq.ZMQError when a port is taken."""
        self._host.boot()
        try:
            self._port = await self._http.start(self.settings.host, self.settings.port)
        except OSError:
            self._host.shut_down()
            raise

    async def stop(self) -> None:
        """Idempotent."""
        await self._http.stop()
        self._host.shut_down()

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return f"http://{self.settings.host}:{self._port}"

    @property
    def events_endpoint(self) -> str | None:
        """Where to subscribe, None without events."""
        publisher = self._host.publisher
        return None if publisher is None else f"tcp://{self.settings.host}:{publisher.port}"

    @property
    def replay_endpoint(self) -> str | None:
        """Where to ask for replays, None without."""
        publisher = self._host.publisher
        port = None if publisher is None else publisher.replay_port
        return None if port is None else f"tcp://{self.settings.host}:{port}"

    def state(self) -> dict[str, object]:
        """What `GET /sim/state` shows. Counts of the engine start at 0 again after a restart."""
        host, publisher = self._host, self._host.publisher
        engine, counters = host.engine, host.engine.counters
        return {
            "name": self.settings.name,
            "boots": host.boots,
            "running": engine.running,
            "waiting": engine.waiting,
            "finished": counters.finished,
            "aborted": self.aborted,
            "connections": self._http.connections,
            "received": self.received,
            "last_body_sha256": hashlib.sha256(self.bodies[-1]).hexdigest() if self.bodies else None,
            "kv_usage": engine.kv_usage,
            "resident_blocks": engine.resident_blocks,
            "in_use_blocks": engine.in_use_blocks,
            "capacity_blocks": engine.capacity_blocks,
            "evicted_blocks": counters.evicted_blocks,
            "queried_tokens": counters.queried_tokens,
            "hit_tokens": counters.hit_tokens,
            "prefill_busy_s": counters.prefill_busy_s,
            "event_sequence": None if publisher is None else publisher.sequence,
            "replays": None if publisher is None else publisher.replays,
        }

    # ---------------------------------------------------------------- routes

    def _all_routes(self) -> Mapping[tuple[str, str], Callable[[HttpRequest, Reply], None]]:
        return {
            ("POST", "/v1/chat/completions"): self._infer,
            ("POST", "/v1/completions"): self._infer,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/reset_prefix_cache"): lambda _, reply: reply.send(
                200, _json({"success": self._host.reset_cache()})
            ),
            ("GET", "/health"): lambda _, reply: reply.send(200, content_type=None),
            ("GET", "/ping"): lambda _, reply: reply.send(200, content_type=None),
            ("GET", "/version"): lambda _, reply: reply.send(200, _json({"version": self.settings.version})),
            ("GET", "/load"): lambda _, reply: reply.send(200, _json({"server_load": self._host.load})),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("GET", "/kv_event_sources"): self._sources,
            ("GET", "/sim/state"): lambda _, reply: reply.send(200, _json(self.state())),
            ("GET", "/sim/body"): self._newest_body,
            ("POST", "/sim/fault"): self._take_fault,
        }

    def _handle(self, request: HttpRequest, reply: Reply) -> None:
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            known = request.path in self._paths
            reply.send(405 if known else 404, _json({"detail": "Method Not Allowed" if known else "Not Found"}))
            return
        try:
            handler(request, reply)
        except ApiError as error:
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
        parse = parse_chat if request.path == "/v1/chat/completions" else parse_completion
        self._begin(parse(body, self._rules, speech=self._speech), request, reply, fault)

    def _begin(self, ask: Ask, request: HttpRequest, reply: Reply, fault: Fault | None) -> None:
        settings = self.settings
        request_id = self._request_id(request)
        answer = Answer(
            ask,
            answer_id=f"{'chatcmpl' if ask.chat else 'cmpl'}-{request_id}",
            created=int(self._wall_clock()),
            version=settings.version,
            details=settings.prompt_tokens_details,
        )
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
            headers={"x-request-id": request_id},
            fault=fault,
        )
        exchange.begin()
        reply.on_gone = lambda: self._gone(exchange)
        self._host.submit(exchange)

    def _line(self, ask: Ask, prompt: list[int], index: int, choice: int) -> Line:
        self._tickets += 1
        if ask.tool_call is not None:
            output = self._speech.encode(ask.tool_call.arguments, special=False)
        else:
            output = self._speech.answer(prompt, ask.output_tokens, choice)
        return Line(self._tickets, index, prompt, output, self._speech.pieces(output))

    def _gone(self, exchange: Exchange) -> None:
        self._count_abort()
        self._host.drop(exchange)

    def _count_abort(self) -> None:
        self.aborted += 1

    def _request_id(self, request: HttpRequest) -> str:
        self._requests += 1
        made = hashlib.sha256(f"{self.settings.name} {self._host.boots} {self._requests}".encode()).hexdigest()[:16]
        return request.headers.get("x-request-id") or made

    # ---------------------------------------------------------------- other pages

    def _tokenize(self, request: HttpRequest, reply: Reply) -> None:
        body = parse_json(request.body)
        if "messages" in body:
            tokens = chat_tokens(body, self._speech)
        else:
            special = body.get("add_special_tokens") is not False
            tokens = text_tokens(str(body.get("prompt", "")), self._speech, special=special)
        page = {
            "count": len(tokens),
            "max_model_len": self._rules.max_model_len,
            "tokens": tokens,
            "token_strs": self._speech.token_strings(tokens) if body.get("return_token_strs") else None,
        }
        reply.send(200, _json(page))

    def _detokenize(self, request: HttpRequest, reply: Reply) -> None:
        tokens = parse_json(request.body).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise ApiError(400, "tokens must be a list of token ids", param="tokens")
        reply.send(200, _json({"prompt": self._speech.decode(tokens)}))

    def _metrics(self, request: HttpRequest, reply: Reply) -> None:
        host = self._host
        page = metrics_page(
            host.engine,
            model=self.settings.model,
            start_time_unix=host.start_time_unix,
            prompt_tokens=host.prompt_tokens,
            generation_tokens=host.generated_tokens,
        )
        reply.send(200, page, content_type="text/plain; version=0.0.4; charset=utf-8")

    def _models(self, request: HttpRequest, reply: Reply) -> None:
        page = models_page(
            self._rules.models,
            base=self.settings.model,
            root=str(self.settings.tokenizer.resolve()),
            max_model_len=self._rules.max_model_len,
            created=int(self._host.start_time_unix),
        )
        reply.send(200, page)

    def _sources(self, request: HttpRequest, reply: Reply) -> None:
        publisher, settings = self._host.publisher, self.settings
        if publisher is None:
            reply.send(200, b"{}")
            return
        page = sources_page(
            port=publisher.port,
            replay_port=publisher.replay_port,
            topic=settings.topic,
            buffer_steps=settings.buffer_steps,
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
        host, publisher = self._host, self._host.publisher
        match fault.kind:
            case kind if kind in LYING_IN_WAIT:
                self._faults.add(fault)
            case FaultKind.RESTART:
                self._http.drop_connections()
                host.boot()
            case FaultKind.CLEAR:
                host.clear_cache(silent=fault.silent)
            case FaultKind.SLOW:
                host.set_speed(self.settings.speed * fault.factor)
            case FaultKind.HEAL:
                self._faults.heal()
                if publisher is not None:
                    publisher.release()
            case FaultKind.DROP if publisher is not None:
                publisher.lose(fault.count)
            case FaultKind.HOLD if publisher is not None:
                publisher.hold()
            case FaultKind.RELEASE if publisher is not None:
                publisher.release()
            case FaultKind.TRIM if publisher is not None:
                publisher.trim()
            case _:
                pass


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
