"""The client of the store, whatever kind it is; made anew after a failure, since what it knew may be wrong by then."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.store_address import StoreAddress, StoreKind

STORE_ERRORS: Final = (RedisError, OSError, TimeoutError)
"""What a call of the store may raise because of the store."""

Client = Redis | RedisCluster


@asynccontextmanager
async def open_store(address: StoreAddress) -> AsyncIterator[Client]:
    """A client, closed with the context. Connects with its first command; fails at once rather than try again, since
    its caller knows better when to. Raises what `STORE_ERRORS` names, OSError for certificates that cannot be read."""
    client, others = _make(address)
    try:
        if address.kind is StoreKind.CLUSTER:
            await client.initialize()  # a subscription must know which node to ask
        yield client
    finally:
        for one in (client, *others):
            await one.aclose()


def _make(address: StoreAddress) -> tuple[Client, list[Redis]]:
    options: dict[str, Any] = {
        "socket_timeout": address.timeout_s,
        "socket_connect_timeout": address.timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "username": address.username,
        "password": address.password,
    }
    if address.tls:
        options |= {
            "ssl": True,
            "ssl_ca_certs": str(address.ca) if address.ca else None,
            "ssl_certfile": str(address.cert) if address.cert else None,
            "ssl_keyfile": str(address.key or address.cert) if address.cert else None,
        }
    match address.kind:
        case StoreKind.SERVER:
            ((host, port),) = address.hosts
            return Redis(host=host, port=port, db=address.db, **options), []
        case StoreKind.SENTINEL:
            asked = options | {"username": None, "password": address.sentinel_password}
            sentinel = Sentinel(  # type: ignore[no-untyped-call]
                address.hosts, sentinel_kwargs=asked, db=address.db, **options
            )
            return sentinel.master_for(address.service or ""), sentinel.sentinels
        case StoreKind.CLUSTER:
            nodes = [ClusterNode(host, port) for host, port in address.hosts]
            return RedisCluster(startup_nodes=nodes, **options), []
