"""Where the store is: a Redis server, a server found through Sentinels, or a Cluster; and how it is reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

_PORT = 6379
_SENTINEL_PORT = 26379


class StoreKind(StrEnum):
    """What answers at the address."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_SCHEMES = {
    "redis": (StoreKind.SERVER, False),
    "rediss": (StoreKind.SERVER, True),
    "redis+sentinel": (StoreKind.SENTINEL, False),
    "rediss+sentinel": (StoreKind.SENTINEL, True),
    "redis+cluster": (StoreKind.CLUSTER, False),
    "rediss+cluster": (StoreKind.CLUSTER, True),
}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Sentinels or nodes in `hosts`; `service` is the name Sentinels know the server by. `ca`, `cert` and `key` are PEM
    files. What takes longer than `timeout_s` has failed."""

    kind: StoreKind
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    service: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    timeout_s: float = 1.0

    def __str__(self) -> str:
        """For people: no secrets."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{self.kind.value} {hosts}" + (f"/{self.service}" if self.service else "")


def parse_store_url(url: str) -> StoreAddress:
    """`redis://[user:password@]host[:port][/db]`, the same with `rediss://` for TLS,
    `redis+sentinel://[user:password@]host[:port],...[:port]/service[/db]` and `redis+cluster://...host,...`.

    Raises ValueError, whose text never repeats the URL: it may have a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("expected a URL; write what is special in a password as %XX") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"expected a URL that begins with {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
    kind, tls = _SCHEMES[parts.scheme]
    if parts.query or parts.fragment:
        raise ValueError("expected nothing after the path; what is set there elsewhere has keys of its own here")
    login, _, places = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    hosts = _hosts(places, _SENTINEL_PORT if kind is StoreKind.SENTINEL else _PORT)
    if kind is StoreKind.SERVER and len(hosts) > 1:
        raise ValueError("expected one host; several are for redis+sentinel:// and redis+cluster://")
    service, db = _path(parts, kind)
    return StoreAddress(
        kind, hosts, tls, service, db, username=unquote(user) or None, password=unquote(password) or None
    )


def _hosts(places: str, usual_port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for place in places.split(","):
        try:
            one = urlsplit(f"//{place}")
            host, port = one.hostname, one.port
        except ValueError as error:
            raise ValueError("expected host or host:port, several with commas between them") from error
        if not host:
            raise ValueError("expected a host after ://")
        hosts.append((host, usual_port if port is None else port))
    return tuple(hosts)


def _path(parts: SplitResult, kind: StoreKind) -> tuple[str | None, int]:
    steps = [unquote(step) for step in parts.path.split("/") if step]
    service = None
    if kind is StoreKind.SENTINEL:
        if not steps:
            raise ValueError("expected the name of the service after the Sentinels: redis+sentinel://host/mymaster")
        service = steps.pop(0)
    if not steps:
        return service, 0
    if kind is StoreKind.CLUSTER or len(steps) > 1 or not steps[0].isdecimal():
        raise ValueError("expected the number of a database, or nothing, as the last part (a Cluster has only one)")
    return service, int(steps[0])
