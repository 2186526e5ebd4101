"""What can be known of a configuration before it runs: files that cannot be used, and values that look wrong.

`mistakes` would stop the start, or a reload. `doubts` are valid and may be meant; each is one line that begins with the
path of its key. It opens no port and asks no worker: that is what `kvgate doctor` does.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random

from gateway.config import ConfigError, Loaded
from gateway.runtime.access import KeysInForce
from gateway.runtime.models import Tokenizers
from gateway.runtime.sources import sources_of
from gateway.runtime.tls import Certificate, server_context, worker_context
from gateway.settings import Settings, is_loopback, value_of


def mistakes(settings: Settings) -> list[str]:
    """What the start would stop at, ports apart; tokenizers are really loaded, which takes up to seconds."""
    found = []
    certificates: list[Certificate] = []
    for check in (
        Tokenizers(settings.models, now=lambda: datetime.now().astimezone()).load_configured,
        lambda: KeysInForce(settings.auth),
        lambda: server_context(settings.server.tls, certificates, section="server.tls"),
        lambda: server_context(settings.server.admin_tls, certificates, section="server.admin_tls"),
        lambda: worker_context(settings.worker_tls, certificates),
        lambda: sources_of(settings, clock=lambda: 0.0, rng=Random(0)),
    ):
        try:
            check()
        except ConfigError as error:
            found += error.problems
    return found


def doubts(loaded: Loaded, path: Path | None) -> list[str]:
    """What is valid and looks wrong. `path` is the file the configuration came from."""
    settings = loaded.settings
    return [*_lists(loaded), *_access(settings), *_secrets(loaded, path), *_workers(settings), *_limits(settings)]


def _lists(loaded: Loaded) -> Iterator[str]:
    """A list of a later source does not add to an earlier one's."""
    for key, source in loaded.replaced.items():
        if isinstance(value_of(loaded.settings, key), tuple):
            yield f"{key}: the list of {source} is not used, {loaded.origins[key]} has another"


def _access(settings: Settings) -> Iterator[str]:
    auth, server = settings.auth, settings.server
    if auth.admin_open and not is_loopback(server.admin_host):
        yield f"auth.admin_open: whoever reaches {server.admin_host}:{server.admin_port} may change the fleet"
    elif auth.admin_open:
        yield f"auth.admin_open: has no effect while server.admin_host is {server.admin_host}"
    if "*" in server.cors_origins and len(server.cors_origins) > 1:
        yield "server.cors_origins: `*` lets every page in; the other entries change nothing"


def _secrets(loaded: Loaded, path: Path | None) -> Iterator[str]:
    """Files that everybody can read and nobody should."""
    settings = loaded.settings
    server, worker_tls, redis = settings.server, settings.worker_tls, settings.redis
    private = {
        "auth.keys_file": settings.auth.keys_file,
        "server.tls.key": server.tls.key or server.tls.cert,
        "server.admin_tls.key": server.admin_tls.key or server.admin_tls.cert,
        "worker_tls.key": worker_tls.key or worker_tls.cert,
        "redis.key": redis.key or redis.cert,
    }
    for key, file in private.items():
        if file is not None and _open_to_all(file):
            yield f"{key}: {file} can be read by every user of the machine; chmod o-r"
    if path is not None and _open_to_all(path):
        for given, key in _kept(settings):
            if loaded.origins.get(given) == path.name:
                yield f"{key}: stands in {path}, which every user of the machine can read; chmod o-r"
                return


def _kept(settings: Settings) -> Iterator[tuple[str, str]]:
    """Secrets of the configuration: the key whose origin is known (a list is one), and the secret's own."""
    redis = settings.redis
    store = redis.model_copy(update={"password": None}).address()
    if settings.auth.admin_token is not None:
        yield "auth.admin_token", "auth.admin_token"
    if store is not None and store.password is not None:
        yield "redis.url", "redis.url"
    for name, secret in (("password", redis.password), ("sentinel_password", redis.sentinel_password)):
        if secret is not None:
            yield f"redis.{name}", f"redis.{name}"
    for number, entry in enumerate(settings.auth.keys):
        if entry.key is not None:
            yield "auth.keys", f"auth.keys.{number}.key"
    for number, worker in enumerate(settings.workers):
        if worker.api_key is not None:
            yield "workers", f"workers.{number}.api_key"
    for number, lookup in enumerate(settings.discovery.dns):
        if lookup.api_key is not None:
            yield "discovery.dns", f"discovery.dns.{number}.api_key"
    if settings.discovery.kubernetes is not None and settings.discovery.kubernetes.api_key is not None:
        yield "discovery.kubernetes.api_key", "discovery.kubernetes.api_key"


def _open_to_all(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False  # told elsewhere: it cannot be used


def _workers(settings: Settings) -> Iterator[str]:
    routing = settings.routing
    for number, worker in enumerate(settings.workers):
        host = worker.url.split("://")[1].rpartition(":")[0] or worker.url.split("://")[1]
        if worker.api_key is not None and worker.url.startswith("http://") and not is_loopback(host):
            yield f"workers.{number}.api_key: goes to {worker.url} unencrypted; use https unless the network is yours"
        if worker.weight != 1 and routing.policy in ("seconds", "round_robin"):
            yield f"workers.{number}.weight: has no effect under the policy {routing.policy}"
    if routing.policy != "seconds":
        for name, weight in (("alpha", routing.alpha), ("beta", routing.beta), ("gamma", routing.gamma)):
            if weight != "auto":
                yield f"routing.{name}: has no effect under the policy {routing.policy}"


def _limits(settings: Settings) -> Iterator[str]:
    timeouts = settings.timeouts
    for name in ("connect_s", "send_s", "first_byte_s", "idle_s"):
        if getattr(timeouts, name) > timeouts.total_s:
            yield f"timeouts.{name}: is never reached, timeouts.total_s is {timeouts.total_s:g}"
    if settings.server.max_body_bytes > settings.server.max_buffered_bytes:
        yield "server.max_body_bytes: is never reached, server.max_buffered_bytes is smaller"
