"""The whole tree: every section once, and what must hold between them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.credentials import WorkerTls
from gateway.pool import MAX_WORKERS, Routes
from gateway.records import WorkerSpec
from gateway.settings.discovery import DiscoverySettings
from gateway.settings.fleet import HealthSettings, LoadSettings, ModelSettings, WorkerSettings
from gateway.settings.replicas import RedisSettings
from gateway.settings.requests import AdmissionSettings, IndexSettings, RetrySettings, RoutingSettings, TimeoutSettings
from gateway.settings.server import AuthSettings, ServerSettings, TelemetrySettings, answers_at, is_loopback

ENV_PREFIX = "KVGATE_"


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    models: tuple[ModelSettings, ...] = ()
    workers: tuple[WorkerSettings, ...] = Field((), max_length=MAX_WORKERS)
    discovery: DiscoverySettings = DiscoverySettings()
    worker_tls: WorkerTls = WorkerTls()
    routing: RoutingSettings = RoutingSettings()
    admission: AdmissionSettings = AdmissionSettings()
    index: IndexSettings = IndexSettings()
    timeouts: TimeoutSettings = TimeoutSettings()
    retries: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    load: LoadSettings = LoadSettings()
    redis: RedisSettings = RedisSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` merged: it reads the sources itself to keep their order and to name bad keys."""
        return (init_settings,)

    @model_validator(mode="after")
    def _names_once(self) -> Settings:
        names = [w.name for w in self.workers if w.name]
        for name in _repeated(names):
            raise ValueError(f"workers: the name {name!r} is used twice")
        for url in _repeated(w.url for w in self.workers):
            raise ValueError(f"workers: {url} is given twice")
        server = self.server
        own = ((server.host, server.port, "port"), (server.admin_host, server.admin_port, "admin_port"))
        for (host, port, key), worker in itertools.product(own, self.workers):
            if port and answers_at(host, port, worker.url):
                raise ValueError(
                    f"workers: {worker.url} is the gateway itself (server.{key}); give the engine's address, or the "
                    "gateway another port"
                )
        if server.port and server.port == server.admin_port:
            raise ValueError(f"server: port and admin_port are both {server.port}; choose another admin_port")
        auth = self.auth
        if auth.admin_token is None and not auth.admin_open and not is_loopback(server.admin_host):
            raise ValueError(
                f"server.admin_host: {server.admin_host} can be reached from elsewhere: set auth.admin_token, or "
                "auth.admin_open where the network is trusted"
            )
        if self.discovery.registry is not None and self.redis.url is None:
            raise ValueError("discovery.registry: the registry is in the store: set redis.url")
        served = [n for m in self.models for n in (m.name, *m.aliases)]
        for name in _repeated(served):
            raise ValueError(f"models: the name {name!r} is used twice")
        return self

    def routes(self) -> Routes:
        """What the names of models stand for."""
        return Routes({name: route for model in self.models for name, route in model.routes().items()})

    def worker_specs(self) -> list[WorkerSpec]:
        """The configured workers, each with a name of its own."""
        taken = {worker.name for worker in self.workers}
        free = (name for name in map("w{}".format, itertools.count(1)) if name not in taken)
        return [worker.as_spec(worker.name or next(free), worker.url) for worker in self.workers]


def _repeated(names: Iterable[str]) -> list[str]:
    """Those that are there more than once."""
    return [name for name, count in Counter(names).items() if count > 1]
