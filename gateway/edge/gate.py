"""What all client connections share: the parts behind the edge, its limits, and the count of what is open.

The composition root makes one `Edge` and passes it to `protocol.client_protocol`. Gauges read `open_exchanges` and
`upstream.open_streams`; draining sets `accepting` to False, waits for `open_exchanges` to be 0, then calls `cut`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gateway.admission import AdmissionSettings
from gateway.edge.auth import Keys
from gateway.edge.hedge import HedgeRules
from gateway.edge.locate import Hasher
from gateway.edge.responses import Cors
from gateway.edge.turns import Turns
from gateway.errors import BadRequest
from gateway.records import Endpoint, Outcome, Trace, WorkerSpec
from gateway.router import Router
from gateway.upstream.connections import Timeouts
from gateway.upstream.deadlines import Deadlines
from gateway.upstream.engine_sessions import EngineSessions
from gateway.upstream.http import Upstream
from gateway.upstream.tokenizing import Untold

if TYPE_CHECKING:
    # An exchange holds the edge, and the edge the open exchanges.
    from gateway.edge.exchange import Exchange
    from gateway.edge.shadow import Shadows


TIMEOUT_HEADER = b"x-request-timeout-s"
"""A client's own limit for its whole request, in seconds from when the gateway has read it."""


def asked_seconds(value: bytes) -> float:
    """The value of that header. Raises BadRequest."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest(f"{TIMEOUT_HEADER.decode()} must be a number of seconds above 0, such as 30 or 2.5")
    return seconds


class PhaseTimeouts:
    """The limits of a request's phases by its path and model.

    `paths` and `models` (served names) hold what differs from `base`, by field name of `Timeouts`; where both have a
    word, the model's counts.
    """

    def __init__(
        self,
        base: Timeouts | None = None,
        *,
        paths: Mapping[Endpoint, Mapping[str, float]] | None = None,
        models: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        base = base or Timeouts()
        self._base = base
        self._paths = {path: replace(base, **changes) for path, changes in (paths or {}).items()}
        self._models = {
            (path, model): replace(self._paths.get(path, base), **changes)
            for model, changes in (models or {}).items()
            for path in Endpoint
        }

    def of(self, endpoint: Endpoint, model: str) -> Timeouts:
        """Those of one request."""
        if self._models and (found := self._models.get((endpoint, model))) is not None:
            return found
        return self._paths.get(endpoint, self._base) if self._paths else self._base


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Limits of the client's side; seconds and bytes."""

    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    """From the end of the head to the end of the body."""
    linger_s: float = 2.0
    """How long a refused upload is read on after the answer, so that the client can see why."""
    idle_timeout_s: float = 75.0
    """How long a connection may wait for its next request."""
    max_header_bytes: int = 65_536
    max_body_bytes: int = 67_108_864
    max_buffered_bytes: int = 1_073_741_824
    """Bodies in memory, of all requests together."""
    max_connections: int = 16_384
    max_pipelined_bytes: int = 65_536
    """Requests sent ahead of their turn that wait unparsed; beyond this reading pauses."""
    inline_parse_bytes: int = 262_144
    """Bodies above this are parsed in the executor: 256 KB of JSON take about a millisecond."""
    max_exchanges: int = 20_000
    max_retries: int = 2
    """Further workers tried for one request before the first byte of its answer."""


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """What an operator says of the client port; each request lives under those in force when its head was read.

    With `keys` every request needs one of them; `tenant_salt` gives each tenant's prompts a cache salt; `cors` lets
    web pages in; `receipts` are the `x-kvgate-*` headers. A session id is read from `session_header` (lower case), else
    from the body's `session_field`. Who sends `debug_token` may see decisions; empty: nobody.
    """

    limits: EdgeLimits = EdgeLimits()
    timeouts: PhaseTimeouts = field(default_factory=PhaseTimeouts)
    keys: Keys | None = None
    tenant_salt: bool = False
    cors: Cors | None = None
    receipts: bool = True
    ask_usage: bool = True
    session_header: bytes = b"x-session-id"
    session_field: str | None = None
    debug_token: bytes = field(default=b"", repr=False)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    hedges: HedgeRules | None = None
    """When a late request gets a second worker; None: never."""


class Edge:
    """The client port's side of the process."""

    def __init__(
        self,
        *,
        router: Router,
        hashers: Callable[[str], Hasher | None],
        upstream: Upstream,
        executor: Executor,
        clock: Callable[[], float],
        on_outcome: Callable[[Outcome], None],
        request_ids: Callable[[], str],
        on_retry: Callable[[Outcome], None] | None = None,
        on_copy_failed: Callable[[Outcome], None] | None = None,
        ask_tokens: Callable[[Untold, WorkerSpec], None] | None = None,
        trace: Callable[[bytes | None], Trace] | None = None,
        settings: EdgeSettings | None = None,
        tick_s: float = 0.25,
    ) -> None:
        """`hashers` gives the hasher of a base model. `on_outcome` gets one record for every request, `on_retry` one
        for every attempt that was followed by another, `on_copy_failed` one for every second copy that failed while the
        first worker is waited for, `ask_tokens` each prompt whose tokens an engine is to tell, with
        the worker that has begun to answer it. `request_ids` makes an id for a client that sent none,
        `trace` the request's place in a trace from its header `traceparent`.
        `tick_s` is the precision of the client's timeouts."""
        self.router = router
        self.hashers = hashers
        self.upstream = upstream
        self.executor = executor
        self.clock = clock
        self.on_outcome = on_outcome
        self.on_retry = on_retry
        self.on_copy_failed = on_copy_failed
        self.ask_tokens = ask_tokens
        self.trace = trace
        self.request_ids = request_ids
        self.settings = settings or EdgeSettings(timeouts=PhaseTimeouts(upstream.timeouts))
        self.engine_sessions: EngineSessions | None = None
        """Told of sessions that engines keep."""
        self.shadows: Shadows | None = None
        """Gets copies of requests where a model has a shadow."""
        self.turns = Turns(router, clock, self.settings.admission)
        self.deadlines = Deadlines(clock, tick_s=tick_s)
        self.exchanges: set[Exchange] = set()
        self.connections = 0
        self.turned_away = 0
        """Connections and bodies, because there were too many."""
        self.buffered_bytes = 0
        """Bodies in memory: from their arrival to the head of the answer."""
        self.accepting = True
        """False: new requests are refused with `shutting_down`."""

    @property
    def open_exchanges(self) -> int:
        """Requests whose head has been read and whose answer is not finished."""
        return len(self.exchanges)

    def apply(self, settings: EdgeSettings) -> None:
        """From the next request on; those that have begun keep what they began with."""
        self.settings = settings
        self.turns.admission.apply(settings.admission)

    def cut(self) -> None:
        """The drain limit has passed: end every open request now."""
        for exchange in list(self.exchanges):
            exchange.shut_down()


def request_id_maker(rng: random.Random) -> Callable[[], str]:
    """Ids that are unique over processes: 64 random bits for the process, then a count."""
    process = f"{rng.getrandbits(64):016x}"
    count = 0

    def make() -> str:
        nonlocal count
        count += 1
        return f"{process}{count:08x}"

    return make
