"""One gateway: every part made once, joined, run and taken down.

Rules:
1. Nothing is made at import; whoever starts a `Gateway` gives it settings, and gets two ports and a fleet.
2. Ready means: a worker may serve, every source of workers has told its list, and the indexes of these workers have
   caught up, or `server.ready_timeout_s` has passed. It is taken back first when the gateway ends.
3. The end: no new requests (503), open ones may finish within `server.drain_timeout_s`, then they are cut; then tasks,
   sockets and threads end, in that order.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from random import Random
from secrets import token_hex
from types import MappingProxyType
from typing import Any

import structlog
import zmq
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from starlette.types import ASGIApp

from gateway.admin.app import admin_app
from gateway.admin.state_answers import ConfigAnswer, Readiness
from gateway.admin.views import AdminViews
from gateway.config import Loaded, Sources
from gateway.discovery import CONFIG, Enrolment, Found, Roster
from gateway.edge import Edge, Shadows, client_app, client_protocol, late_after, request_id_maker
from gateway.errors import WorkerUnreachable
from gateway.kv import KvIndex
from gateway.pool import MAX_WORKERS, Fleet
from gateway.records import Outcome, WorkerId
from gateway.router import Router
from gateway.runtime import parts
from gateway.runtime.access import KeysInForce, key_table
from gateway.runtime.files import FileWatch
from gateway.runtime.health import HealthWatch
from gateway.runtime.interpreter import is_compiled
from gateway.runtime.models import Tokenizers
from gateway.runtime.readings import GatewayReadings
from gateway.runtime.refresh import Refresh
from gateway.runtime.reload import Prepared, Reload
from gateway.runtime.server import PortServer, listen, url_of
from gateway.runtime.sharing import share
from gateway.runtime.signed import Signed
from gateway.runtime.sources import sources_of
from gateway.runtime.supervisor import Supervisor
from gateway.runtime.tls import Certificate, server_context, worker_context
from gateway.runtime.tracing import open_traces
from gateway.settings import Settings
from gateway.telemetry import Exposition, RequestLog, RequestMetrics
from gateway.upstream.control import open_control_client
from gateway.upstream.deadlines import next_tick
from gateway.upstream.engine_sessions import EngineSessions
from gateway.upstream.http import Upstream
from gateway.upstream.membership import Membership
from gateway.upstream.tokenizing import EngineTokenizing

_EXPIRE_EVERY_S = 0.5
_FLUSH_EVERY_S = 0.2
"""How late a request's log line may be."""
_LOOK_S = 0.05
_TOKENIZE_THREADS = 2
"""Threads that tokenise new text; the tokenizer runs outside the interpreter lock."""
_EVENT_SOCKETS = 5 * MAX_WORKERS
"""A feed takes three (the subscription and both ends of its monitor), its replay and a load socket one each; the
library's own limit of 1,023 is reached at 204 ranks."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The addresses in force; both are base URLs."""

    url: str
    admin_url: str


class Gateway:
    """`start`, then `stop`. `requests_log` gets one line a request; None writes none."""

    def __init__(
        self,
        settings: Settings,
        *,
        sources: Sources | None = None,
        origins: Mapping[str, str] = MappingProxyType({}),
        requests_log: RequestLog | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,  # noqa: TID251  the one clock of the process
    ) -> None:
        self.reload = Reload(Loaded(settings, origins), sources, prepare=self._prepare, apply=self._apply)
        self.files = FileWatch()
        if (path := sources.path if sources is not None else None) is not None:
            # From now on, not from when it serves: loading tokenizers takes a while.
            self.files.add("configuration", lambda: [path], self.reload)
        self.clock = clock
        rng = rng or Random()
        self._log = structlog.get_logger("kvgate")
        self._own = token_hex(8)
        """What this run is called where it might meet itself."""
        self._stack = AsyncExitStack()
        self._started_at: float | None = None
        self._draining = False
        self._requests_log = requests_log
        self._rng = rng
        self.supervisor = Supervisor(clock)
        self.tokenizers = Tokenizers(settings.models, now=lambda: datetime.now().astimezone())
        self.fleet = Fleet(parts.fleet_settings(settings))
        self.index = KvIndex(
            max_bytes=settings.index.max_bytes,
            approximate=parts.approximate_settings(settings),
            offload_ttl_s=settings.index.offload_ttl_s,
        )
        self.router = Router(
            self.fleet, self.index, parts.policy(settings, rng=rng), rng=rng, settings=parts.router_settings(settings)
        )
        self.sharing = share(settings, self.router, self.index, clock=clock, rng=rng)
        self._certificates: list[Certificate] = []
        self._worker_tls = worker_context(settings.worker_tls, self._certificates)
        self.upstream = Upstream(clock=clock, tls=self._worker_tls, timeouts=parts.worker_timeouts(settings))
        self.traces = open_traces(settings.telemetry, rng=rng, clock=clock, wall=time.time)  # noqa: TID251
        self.metrics = RequestMetrics(self.fleet.pools.__contains__, is_worker=self.fleet.workers.__contains__)
        self.ports: Ports | None = None
        self.membership: Membership
        self.enrolment: Enrolment
        self.refresh: Refresh
        self.health: HealthWatch
        self.edge: Edge
        self.tokenizing: EngineTokenizing

    async def start(self) -> Ports:
        """Bind the ports, start serving and looking for workers. Returns at once; `ready` tells when traffic may come.

        Raises ConfigError for a tokenizer or a keys file that cannot be read, OSError for a port that cannot be bound.
        """
        await asyncio.to_thread(self.tokenizers.load_configured)
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> Ports:
        settings, stack = self.settings, self._stack
        server = settings.server
        client_socket = stack.enter_context(listen(server.host, server.port, keys="--port or server.port"))
        admin_keys = "--admin-port or server.admin_port"
        admin_socket = stack.enter_context(listen(server.admin_host, server.admin_port, keys=admin_keys))
        executor = stack.enter_context(ThreadPoolExecutor(_TOKENIZE_THREADS, thread_name_prefix="tokenise"))
        stack.callback(self.upstream.close)
        control = await stack.enter_async_context(open_control_client(tls=self._worker_tls, own=self._own))
        context: zmq.Context[Any] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, _EVENT_SOCKETS)
        stack.callback(context.destroy, linger=0)
        self.membership = Membership(
            fleet=self.fleet,
            index=self.index,
            control=control,
            tasks=self.supervisor,
            context=context,
            clock=self.clock,
            rng=self._rng,
            on_joining=self.tokenizers.prepare,
            on_left=self._forget,
            settings=parts.membership_settings(settings),
        )
        self.enrolment = Enrolment(Roster(), self.membership, clock=self.clock)
        self.refresh = Refresh(self.fleet, self.membership)
        self.health = HealthWatch(
            self.fleet, control=control, tasks=self.supervisor, clock=self.clock, trial_s=settings.health.probe_s
        )
        self.tokenizing = EngineTokenizing(control, self.clock)
        self.access = KeysInForce(settings.auth)
        self.files.add("keys", self.access.files, self.access.look)
        self.edge = Edge(
            router=self.router,
            hashers=self.tokenizers.find,
            upstream=self.upstream,
            executor=executor,
            clock=self.clock,
            on_outcome=self._record,
            on_retry=self._record_retry,
            on_copy_failed=self._look,
            ask_tokens=self.tokenizing.ask,
            request_ids=request_id_maker(self._rng),
            trace=self.traces.begin if self.traces is not None else None,
            settings=parts.edge_settings(settings, self.access.keys),
        )
        if self.traces is not None:
            stack.push_async_callback(asyncio.to_thread, self.traces.spans.close)
        if self._requests_log is not None:
            stack.callback(self._requests_log.flush)  # requests that were refused while the ports closed, too
        stack.push_async_callback(self.supervisor.close)
        self._ask_engines(settings)
        self._started_at = self.clock()
        self.supervisor.start("expire", self._expire)
        if self.sharing is not None:
            self.sharing.start(self.supervisor, self.membership)
            stack.push_async_callback(self.sharing.stop)
        if self._requests_log is not None:
            log = self._requests_log
            self.supervisor.start("log", lambda: self._flush_log(log))
        sessions = self.edge.engine_sessions = EngineSessions(
            control, self.clock, ttl_s=lambda: self.router.settings.session_ttl_s
        )
        self.supervisor.start("engine sessions", sessions.run)
        shadows = self.edge.shadows = Shadows(self.edge, rng=self._rng)
        for number in range(1, shadows.limits.concurrency + 1):
            self.supervisor.start(f"shadow {number}", shadows.run)
        app = client_app(
            lambda: self.router.settings.routes.models(self.fleet.models()),
            ready=lambda: self.readiness().ready,
            settings=lambda: self.edge.settings,
            started_unix=int(time.time()),  # noqa: TID251
        )
        tls = server_context(server.tls, self._certificates, section="server.tls")
        admin_tls = server_context(server.admin_tls, self._certificates, section="server.admin_tls")
        await self._serve(self._signed(app), client_socket, http=client_protocol(self.edge), tls=tls)
        admin = self._signed(admin_app(self._admin_views()))
        await self._serve(admin, admin_socket, http="httptools", tls=admin_tls)
        await self.enrolment.configured(settings.worker_specs())
        self.enrolment.begin(sources_of(settings, clock=self.clock, rng=self._rng), self.supervisor)
        for certificate in self._certificates:
            self.files.add(certificate.section, certificate.files, certificate.renew)
        self.supervisor.start("files", self.files.run)
        self.ports = Ports(
            url_of(client_socket, server.host, tls=tls is not None),
            url_of(admin_socket, server.admin_host, tls=admin_tls is not None),
        )
        self._log.info(
            "listening",
            url=self.ports.url,
            admin=self.ports.admin_url,
            policy=settings.routing.policy,
            compiled=is_compiled(),
        )
        return self.ports

    @property
    def settings(self) -> Settings:
        """What is in force."""
        return self.reload.settings

    async def stop(self) -> None:
        """Drain, then take everything down; see rule 3."""
        self._draining = True
        self.edge.accepting = False
        until = self.clock() + self.settings.server.drain_timeout_s
        if self.edge.open_exchanges:
            self._log.info("draining", open_requests=self.edge.open_exchanges)
        while self.edge.open_exchanges and self.clock() < until:  # noqa: ASYNC110  an event would cost every request
            await asyncio.sleep(_LOOK_S)
        if self.edge.open_exchanges:
            self._log.warning("drain limit passed: cutting", open_requests=self.edge.open_exchanges)
        self.edge.cut()
        await self._stack.aclose()
        self._log.info("stopped", open_leases=self.router.open_leases)

    def readiness(self) -> Readiness:
        """Whether clients should be sent here (rule 2)."""
        if self._draining or self._started_at is None:
            return Readiness(ready=False, reason="draining" if self._draining else "starting")
        if not any(pool.ready for pool in self.fleet.pools.values()):
            silent = sorted(name for name, member in self.membership.members.items() if member.error)
            # Names only: this is shown without the token. `/admin/workers` and the log say more.
            reason = f"no answer from {', '.join(silent)}" if silent else "no worker has joined yet"
            return Readiness(ready=False, reason=reason)
        if self.clock() - self._started_at < self.settings.server.ready_timeout_s:
            unheard = [source.name for source in self.enrolment.roster.sources() if source.listed_at is None]
            if unheard:
                return Readiness(ready=False, reason=f"workers are still looked for: {', '.join(unheard)}")
            behind = sorted(name for name, member in self.membership.members.items() if not member.caught_up)
            if behind:
                return Readiness(ready=False, reason=f"catching up: {', '.join(behind)}")
        return Readiness(ready=True)

    async def until_ready(self, within_s: float) -> None:
        """Wait until every worker that was asked for has joined and traffic may come. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while not (self.readiness().ready and all(m.caught_up for m in self.membership.members.values())):  # noqa: ASYNC110  once at start
                await asyncio.sleep(_LOOK_S)

    # ------------------------------------------------------------------ configuration

    def _prepare(self, settings: Settings) -> Prepared:
        """In a thread; changes nothing. Raises ConfigError."""
        return Prepared(
            self.tokenizers.load(settings.models),
            key_table(settings.auth),
            sources_of(settings, clock=self.clock, rng=self._rng),
        )

    def _apply(self, settings: Settings, prepared: Prepared) -> None:
        """Every part takes the new settings; nothing waits here. Fleet before members: block sizes follow from it."""
        before = self.settings
        self.tokenizers.apply(settings.models, prepared.hashers)
        self.fleet.apply(parts.fleet_settings(settings))
        self.index.apply_limits(
            max_bytes=settings.index.max_bytes,
            approximate=parts.approximate_settings(settings),
            offload_ttl_s=settings.index.offload_ttl_s,
        )
        same = before.routing == settings.routing
        policy = self.router.policy if same else parts.policy(settings, rng=self._rng)
        self.router.apply(policy, parts.router_settings(settings))
        if self.sharing is not None:
            self.sharing.apply(ttl_s=settings.routing.speculative_ttl_s)
        self.upstream.apply(parts.worker_timeouts(settings))
        self.access.apply(settings.auth, prepared.keys)
        self.edge.apply(parts.edge_settings(settings, self.access.keys))
        self.health.apply(trial_s=settings.health.probe_s)
        self.membership.apply(parts.membership_settings(settings), models=before.models != settings.models)
        self.enrolment.listed(CONFIG, map(Found, settings.worker_specs()))
        if before.discovery != settings.discovery:
            self.enrolment.follow(prepared.sources)
        self._ask_engines(settings)

    def _ask_engines(self, settings: Settings) -> None:
        """Where engines tell token ids, somebody has to ask them."""
        if any(model.tokenize_at != "here" for model in settings.models):
            for number in range(1, self.tokenizing.settings.concurrency + 1):
                name = f"tokenise {number}"
                if name not in self.supervisor.names:
                    self.supervisor.start(name, self.tokenizing.run)

    def _config_answer(self) -> ConfigAnswer:
        reload = self.reload
        return ConfigAnswer(
            settings=reload.settings.model_dump(mode="json"),
            origins=dict(reload.origins),
            needs_restart=list(reload.needs_restart),
            problems=list(reload.problems),
        )

    # ------------------------------------------------------------------ inside

    def _record_retry(self, attempt: Outcome) -> None:
        self.metrics.record_retry(attempt)
        self._look(attempt)

    def _look(self, outcome: Outcome) -> None:
        if outcome.error_code == WorkerUnreachable.code and outcome.worker is not None:
            self.membership.look(outcome.worker)

    def _record(self, outcome: Outcome) -> None:
        self._look(outcome)
        self.membership.answered(outcome)
        self.metrics.record(outcome)
        self.refresh.record(outcome, self.clock())
        if self._requests_log is not None:
            self._requests_log.record(outcome)
        if self.traces is not None:
            self.traces.spans.record(outcome)

    def _forget(self, worker: WorkerId) -> None:
        self.upstream.forget(worker)
        self.refresh.forget(worker)
        self.metrics.forget(worker)
        self.tokenizers.keep(self.fleet.pools)

    async def _flush_log(self, log: RequestLog) -> None:
        while True:
            await log.wait()
            await asyncio.sleep(_FLUSH_EVERY_S)
            log.flush()

    async def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # At the same moments as deadlines are looked at: waking an idle process is the most of it.
            await asyncio.sleep(next_tick(loop.time(), _EXPIRE_EVERY_S) - loop.time())
            now = self.clock()
            self.router.expire(now)
            if self.sharing is not None:
                self.sharing.tick(now)
            self.refresh.tick(now)
            self.health.tick(now)

    def _admin_views(self) -> AdminViews:
        readings = GatewayReadings(
            fleet=self.fleet,
            index=self.index,
            insight=self.router.insight,
            requests=self.metrics,
            membership=self.membership,
            enrolment=self.enrolment,
            upstream=self.upstream,
            edge=self.edge,
            tokenizing=self.tokenizing,
            supervisor=self.supervisor,
            sharing=self.sharing,
            reload=self.reload,
            clock=self.clock,
        )
        process = CollectorRegistry()
        ProcessCollector(registry=process)
        PlatformCollector(registry=process)
        GCCollector(registry=process)
        return AdminViews(
            router=self.router,
            admission=self.edge.turns.admission,
            readings=readings,
            exposition=Exposition(self.metrics, readings, process=process),
            hasher=self.tokenizers.find,
            add_worker=self.enrolment.add,
            remove_worker=self.enrolment.remove,
            resync=self.membership.resync,
            members=lambda: self.membership.members,
            late_after=lambda request, choice: late_after(self.edge.settings.hedges, request, choice),
            config=self._config_answer,
            ready=self.readiness,
            clock=self.clock,
            settings=lambda: parts.admin_settings(self.settings),
        )

    def _signed(self, app: ASGIApp) -> Signed:
        return Signed(app, lambda: [self._own, *self.membership.gateways()])

    async def _serve(self, app: Any, listener: socket.socket, *, http: Any, tls: ssl.SSLContext | None = None) -> None:
        server = PortServer(app, http=http, tls=tls, limits=self.settings.server)
        name = f"server {listener.getsockname()[1]}"
        self.supervisor.start(name, lambda: server.serve(sockets=[listener]))
        self._stack.push_async_callback(self._end_server, server, name)
        await server.serving.wait()

    async def _end_server(self, server: PortServer, name: str) -> None:
        # Draining is over by now: nothing is waited for.
        server.end()
        await self.supervisor.join(name)
