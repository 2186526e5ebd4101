"""Sections of the gateway's own ports: `server`, `auth`, `telemetry`."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from gateway.credentials import KeySettings, ServerTls
from gateway.settings.section import BearerToken, Port, Seconds, Section, why

_ANY = ("0.0.0.0", "::")
"""Bound, every address of the machine; connected to, the machine itself."""


class ServerSettings(Section):
    """The two ports and the limits of the client port."""

    host: str = Field("0.0.0.0", description="Address the client port binds.")
    port: Port = Field(
        8000,
        description="Client port; 0 takes a free one.",
        json_schema_extra=why("8000 is where OpenAI-compatible servers usually are"),
    )
    admin_host: str = Field("127.0.0.1", description="Address the admin port binds; loopback by default.")
    admin_port: Port = Field(8001, description="Admin port; 0 takes a free one.")
    drain_timeout_s: Seconds = Field(
        30,
        description="How long open requests may finish after SIGTERM.",
        json_schema_extra=why("what Kubernetes waits before it kills (terminationGracePeriodSeconds)"),
    )
    header_timeout_s: Seconds = Field(
        10,
        description="A client must have sent its request header by then.",
        json_schema_extra=why("a head is a packet or two; what takes longer is broken or hostile"),
    )
    body_timeout_s: Seconds = Field(
        60,
        description="A client must have sent its request body by then.",
        json_schema_extra=why("a prompt of a megabyte over a slow mobile line"),
    )
    idle_timeout_s: Seconds = Field(
        75,
        description="A client's connection may wait this long for its next request.",
        json_schema_extra=why(
            "above the 60 s after which load balancers close idle connections, so that they close first"
        ),
    )
    max_body_bytes: int = Field(
        67_108_864,
        ge=1024,
        le=1 << 31,
        description="Largest request body.",
        json_schema_extra=why("room for a handful of images as base64"),
    )
    max_header_bytes: int = Field(
        65_536,
        ge=1024,
        le=1 << 24,
        description="Largest request header.",
        json_schema_extra=why("far above what cookies and tokens take"),
    )
    max_buffered_bytes: int = Field(
        1_073_741_824,
        ge=1024,
        le=1 << 40,
        description="Request bodies in memory, all together; what comes beyond is refused with 503.",
        json_schema_extra=why("sixteen of the largest bodies, or a hundred thousand usual ones"),
    )
    max_connections: int = Field(
        16_384,
        ge=1,
        le=1_000_000,
        description="Open connections of clients; one more is refused with 503.",
        json_schema_extra=why("with the workers' side it stays below 65,536 file descriptors"),
    )
    tls: ServerTls = ServerTls()
    admin_tls: ServerTls = ServerTls()
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose web pages may use the client port, such as https://chat.example.com; `*`: all."
    )
    receipts: bool = Field(True, description="Send x-kvgate-* headers with each answer.")
    ready_timeout_s: Seconds = Field(
        30,
        description="Report ready after this long even when an index is still catching up.",
        json_schema_extra=why("a replay takes seconds; a feed that never catches up must not keep traffic out"),
    )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if value != "*" and not re.fullmatch(r"https?://[^/\s?#@*]+", value):
                raise ValueError(f"{value!r} is no origin; expected one like https://chat.example.com, or `*`")
        return values


class AuthSettings(Section):
    """Who may use the two ports. With `keys_file` or `keys` every request to a model needs an API key."""

    keys_file: Path | None = Field(
        None,
        description="YAML file with API keys, hashed; read again when it changes. One list, `keys`, whose entries have "
        "`hash`, `tenant`, `best_class` and, if limited, `models`, `requests_per_minute`, `tokens_per_minute`.",
    )
    keys: tuple[KeySettings, ...] = Field(
        (), description="The same entries, beside the file; here `key`, the key itself, may stand for `hash`."
    )
    tenant_salt: bool = Field(
        False, description="Give each tenant a cache salt of its own: no tenant can time what another has asked."
    )
    admin_token: BearerToken | None = Field(
        None, description="Bearer token of the admin port; none: no check, and only for the machine itself."
    )
    admin_open: bool = Field(
        False, description="Let the admin port be reached from elsewhere without a token: the network is trusted."
    )

    @field_validator("admin_token")
    @classmethod
    def _not_empty(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value():
            raise ValueError("is empty; give a token, or leave the key out to have no check")
        return value

    @property
    def checks_keys(self) -> bool:
        """Requests to models need an API key."""
        return self.keys_file is not None or bool(self.keys)

    @model_validator(mode="after")
    def _salt_needs_tenants(self) -> AuthSettings:
        if self.tenant_salt and not self.checks_keys:
            raise ValueError("tenant_salt: without `keys_file` or `keys` there are no tenants")
        return self


class TelemetrySettings(Section):
    """Logs and traces."""

    log: Literal["json", "console"] = Field("json", description="Form of the log on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level written.")
    otlp_endpoint: str | None = Field(
        None,
        description="Collector of OpenTelemetry that takes OTLP over HTTP, such as http://collector:4318; none: no "
        "traces. Needs the extra `kvgate[tracing]`.",
    )
    sample_ratio: float = Field(
        0.01, ge=0, le=1, description="Share of the traces that begin here and are recorded; callers decide for theirs."
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _base_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s@]+", value):
            # Not repeated: it may have a password.
            raise ValueError(
                "expected a URL such as http://collector:4318, without a user: a token goes into the variable "
                "OTEL_EXPORTER_OTLP_HEADERS"
            )
        return value


def answers_at(host: str, port: int, url: str) -> bool:
    """Whether what is bound to `host` and `port` is what `url` leads to, as far as that can be told without asking."""
    parts = urlsplit(url)
    there = parts.hostname or ""
    if (parts.port or (443 if parts.scheme == "https" else 80)) != port:
        return False
    if there in _ANY:
        return host in _ANY or is_loopback(host)
    if host in _ANY:
        return is_loopback(there)
    return there == host or ("localhost" in (there, host) and is_loopback(there) and is_loopback(host))


def is_loopback(host: str) -> bool:
    """Whether only the machine itself can reach what binds `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
