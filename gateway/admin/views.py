"""What the admin port needs of the process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from gateway.admin.state_answers import ConfigAnswer, Readiness
from gateway.admission import Admission
from gateway.pool import NoSecond
from gateway.prefix import PromptHasher
from gateway.records import InferenceRequest, WorkerId, WorkerSpec
from gateway.router import Choice, Router
from gateway.telemetry import Exposition, Readings


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """`affinity_header` (lower case) and `affinity_field` are where a session id is read. `own_names`: the port may be
    asked by address or as localhost only; `tenant_salt`: tenants have cache salts."""

    token: str | None = field(default=None, repr=False)
    own_names: bool = False
    tenant_salt: bool = False
    affinity_header: str = "x-session-id"
    affinity_field: str | None = None
    max_body_bytes: int = 67_108_864


@dataclass(frozen=True, slots=True)
class AdminViews:
    """What the admin port needs of the process.

    `hasher` gives a base model's hasher, None without one. `add_worker` probes and joins (raises WorkerTaken,
    ProbeFailed), `remove_worker` returns once no new request can go there. `resync` learns a worker's part of the
    index anew and returns how many of its feeds do so. `members` are the names in use, also of workers that have not
    joined yet. `late_after`: seconds after which a request placed by that choice would get a second worker, or why
    it would not. `config` is the configuration with secrets masked, `settings` those of this port that are in force.
    """

    router: Router
    admission: Admission
    readings: Readings
    exposition: Exposition
    hasher: Callable[[str], PromptHasher | None]
    add_worker: Callable[[WorkerSpec], Awaitable[None]]
    remove_worker: Callable[[WorkerId], Awaitable[None]]
    resync: Callable[[WorkerId], int]
    members: Callable[[], Collection[WorkerId]]
    late_after: Callable[[InferenceRequest, Choice], float | NoSecond]
    config: Callable[[], ConfigAnswer]
    ready: Callable[[], Readiness]
    clock: Callable[[], float]
    settings: Callable[[], AdminSettings]
