"""Every key that is said to change while the process runs reaches the part that uses it.

One gateway, one file, one key after the other. A key of a section in `LIVE` without a line here fails the test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.api import parse_request
from gateway.credentials import key_hash
from gateway.policy import Seconds
from gateway.pool import HedgeRule
from gateway.records import Endpoint, WorkerId
from gateway.runtime import Gateway
from gateway.runtime.parts import admin_settings
from gateway.runtime.reload import Result, is_live
from gateway.settings import all_keys
from gateway.upstream.connections import Timeouts
from tests.integration.rig import rig, until

KEY = "kvg-some-key-0123456789"

Look = Callable[[Any], Any]
"""What the part of a gateway that uses a key has now."""

LINES: dict[str, tuple[Any, Any, Look]] = {
    "server.drain_timeout_s": (7, 7, lambda g: g.settings.server.drain_timeout_s),
    "server.header_timeout_s": (7, 7, lambda g: g.edge.settings.limits.header_timeout_s),
    "server.body_timeout_s": (7, 7, lambda g: g.edge.settings.limits.body_timeout_s),
    "server.idle_timeout_s": (7, 7, lambda g: g.edge.settings.limits.idle_timeout_s),
    "server.max_body_bytes": (2048, 2048, lambda g: g.edge.settings.limits.max_body_bytes),
    "server.max_header_bytes": (2048, 2048, lambda g: g.edge.settings.limits.max_header_bytes),
    "server.max_buffered_bytes": (4096, 4096, lambda g: g.edge.settings.limits.max_buffered_bytes),
    "server.max_connections": (70, 70, lambda g: g.edge.settings.limits.max_connections),
    "server.cors_origins": (
        ["http://a"],
        ("http://a",),
        lambda g: g.edge.settings.cors and g.edge.settings.cors.origins,
    ),
    "server.receipts": (False, False, lambda g: g.edge.settings.receipts),
    "server.ready_timeout_s": (7, 7, lambda g: g.settings.server.ready_timeout_s),
    "auth.keys": ([{"tenant": "a", "hash": key_hash(KEY)}], 1, lambda g: len(g.edge.settings.keys or ())),
    "auth.keys_file": ("KEYS", 2, lambda g: len(g.edge.settings.keys or ())),
    "auth.tenant_salt": (True, True, lambda g: g.edge.settings.tenant_salt),
    "auth.admin_token": ("hush", "hush", lambda g: admin_settings(g.settings).token),
    "auth.admin_open": (True, False, lambda g: admin_settings(g.settings).own_names),
    "models": ([{"name": "m", "block_size": 8}], {"m": 8}, lambda g: dict(g.fleet.settings.block_sizes)),
    "workers": ([{"url": "http://127.0.0.1:9", "name": "n"}], {"n"}, lambda g: set(g.membership.members)),
    "discovery.dns": ([{"name": "workers.test", "server": "127.0.0.1:9"}], {"dns"}, lambda g: _sources(g)),
    "discovery.kubernetes": (
        {"api_server": "http://127.0.0.1:9", "namespace": "n", "selector": "app=vllm"},
        {"kubernetes"},
        lambda g: _sources(g),
    ),
    "discovery.registry": ({}, {"registry"}, lambda g: _sources(g)),
    "routing.policy": ("p2c", "p2c", lambda g: g.router.policy.name),
    "routing.alpha": (3, 3, lambda g: _seconds(g).weights.alpha),
    "routing.beta": (3, 3, lambda g: _seconds(g).weights.beta),
    "routing.gamma": (3, 3, lambda g: _seconds(g).weights.gamma),
    "routing.speculative_ttl_s": (7, 7, lambda g: g.router.settings.speculative_ttl_s),
    "routing.affinity.header": ("X-Chat", b"x-chat", lambda g: g.edge.settings.session_header),
    "routing.affinity.body_field": ("chat", "chat", lambda g: g.edge.settings.session_field),
    "routing.affinity.ttl_s": (7, None, lambda g: _session(g, age_s=8)),
    "routing.affinity.max_sessions": (1, 1, lambda g: _kept(g)),
    "routing.affinity.credit_s": (7, 7, lambda g: _seconds(g)._prices.affinity_s),
    "routing.shards": (4, 4, lambda g: g.fleet.settings.sharding.shards),
    "routing.shard_workers": (7, 7, lambda g: g.fleet.settings.sharding.least_workers),
    "routing.hold_s": (7, 7, lambda g: g.edge.turns.admission.settings.hold_s),
    "admission.max_inflight": (7, 7, lambda g: g.fleet.settings.max_inflight),
    "admission.queue_size": (7, 7, lambda g: g.edge.turns.admission.settings.queue_size),
    "admission.queue_timeout_s": (7, 7, lambda g: g.edge.turns.admission.settings.queue_timeout_s),
    "routing.spill_margin_s": (7, 7, lambda g: g.router.settings.spill_margin_s),
    "index.max_bytes": (2_240_000, 10_000, lambda g: g.index._truncation.limit),
    "index.route_miss_threshold": (0.5, 0.5, lambda g: g.fleet.settings.miss_threshold),
    "index.approximate_ttl_s": (7, 7, lambda g: g.index._approximate.settings.ttl_s),
    "index.approximate_tokens": (7000, 7000, lambda g: g.index._approximate.settings.default_tokens),
    "index.offload_ttl_s": (7, 7, lambda g: g.index._placement.lifetime_s),
    "timeouts.connect_s": (7, 7, lambda g: g.upstream.timeouts.connect_s),
    "timeouts.send_s": (7, 7, lambda g: g.upstream.timeouts.send_s),
    "timeouts.first_byte_s": (7, 7, lambda g: _timeouts(g).first_byte_s),
    "timeouts.idle_s": (7, 7, lambda g: _timeouts(g).idle_s),
    "timeouts.total_s": (700, 700, lambda g: _timeouts(g).total_s),
    "timeouts.paths": ({"/v1/score": {"idle_s": 3}}, 3, lambda g: _timeouts(g, Endpoint.SCORE).idle_s),
    "timeouts.models": ({"m": {"idle_s": 4}}, 4, lambda g: _timeouts(g, Endpoint.CHAT, "m").idle_s),
    "retries.max": (7, 7, lambda g: g.edge.settings.limits.max_retries),
    "retries.budget_ratio": (0.7, 0.7, lambda g: g.fleet.settings.retry_ratio),
    "retries.hedge_percentile": (0.7, 0.7, lambda g: _late(g, "other").percentile),
    "retries.hedge_floor_s": (7, 7, lambda g: _late(g, "late").floor_s),
    "retries.paths": ({"/v1/completions": {"hedge_percentile": 0.8}}, 0.8, lambda g: _late(g, "other").percentile),
    "retries.models": ({"m": {"hedge_percentile": 0.9}}, 0.9, lambda g: _late(g, "m").percentile),
    "health.failures": (7, 7, lambda g: g.fleet.settings.health.failures),
    "health.open_s": (7, 7, lambda g: g.fleet.settings.health.open_s),
    "health.probe_s": (7, 7, lambda g: g.membership.settings.refresh_s),
    "health.panic_ratio": (0.7, 0.7, lambda g: g.fleet.settings.health.panic_ratio),
    "health.slow_start_s": (7, 7, lambda g: g.fleet.settings.health.slow_start_s),
    "load.poll_s": (7, 7, lambda g: g.membership.settings.poll_s),
    "load.sockets": (False, False, lambda g: g.membership.settings.load_sockets),
}
"""Key -> what the file says, what the part then has, how to see it."""


_LATER = frozenset({"workers", "discovery.dns", "discovery.kubernetes", "discovery.registry"})
"""What a task does as soon as it has its turn."""


def _seconds(g: Gateway) -> Seconds:
    policy: Any = g.router.policy
    assert policy.name == "seconds"
    seconds: Seconds = policy
    return seconds


def _sources(g: Gateway) -> set[str]:
    """Kinds of the sources that are followed, as tasks that run."""
    kinds = {state.name.partition(":")[0] for state in g.enrolment.roster.sources()} - {"config", "admin"}
    return {kind for kind in kinds if any(name.startswith(f"source {kind}") for name in g.supervisor.names)}


def _timeouts(g: Gateway, path: Endpoint = Endpoint.CHAT, model: str = "other") -> Timeouts:
    return g.edge.settings.timeouts.of(path, model)


def _late(g: Gateway, model: str) -> HedgeRule:
    """When a completion of this model gets a second worker; a percentile of 0: never."""
    body = msgspec.json.encode({"model": model, "prompt": "it"})
    request = parse_request(Endpoint.COMPLETIONS, body, request_id="r")
    rules = g.edge.settings.hedges
    return (rules and rules.of(request)) or HedgeRule(0.0, 0.0)


def _session(g: Gateway, age_s: float) -> WorkerId | None:
    """Where a session is that was seen so long ago."""
    g.router.sessions.keep("it", WorkerId("n"), 100.0)
    return g.router.sessions.find("it", 100.0 + age_s)


def _kept(g: Gateway) -> int:
    """How many of ten sessions are remembered."""
    for number in range(10):
        g.router.sessions.keep(f"s{number}", WorkerId("n"), 1.0)
    g.router.sessions.expire(1.0)
    return len(g.router.sessions)


def test_there_is_a_line_for_every_key_that_may_change() -> None:
    assert set(LINES) == {key for key in all_keys() if is_live(key)}


async def test_each_key_reaches_the_part_that_uses_it(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.yaml"
    keys_file.write_text(yaml.safe_dump({"keys": [{"tenant": "b", "hash": key_hash(f"{KEY}{n}")} for n in range(2)]}))
    file = tmp_path / "kvgate.yaml"
    base: dict[str, Any] = {
        "redis": {"url": "redis://127.0.0.1:9"},  # nobody is there; the registry needs one named
        "retries": {"models": {"late": {"hedge_percentile": 0.6}}},  # a floor is for those with a percentile
        "auth": {
            "keys_file": None,
            "keys": [{"tenant": "z", "key": KEY}, *({"tenant": "z", "key": f"{KEY}-{n}"} for n in range(3))],
        },
    }
    async with rig(0, settings=base, file=file, wait=False) as r:
        gateway = r.gateway
        start = file.read_text()
        for key, (value, wanted, look) in LINES.items():
            assert look(gateway) != wanted, f"{key}: the value of the start already"
            tree = yaml.safe_load(start)
            section = tree
            *path, name = key.split(".")
            for part in path:
                section = section.setdefault(part, {})
            section[name] = str(keys_file) if value == "KEYS" else value
            if key == "auth.keys_file":
                del section["keys"]
            file.write_text(yaml.safe_dump(tree))
            await gateway.reload()
            assert gateway.reload.problems == (), key
            assert gateway.reload.needs_restart == (), key
            if key in _LATER:
                await until(lambda: look(gateway) == wanted)  # noqa: B023  waited for here
            assert look(gateway) == wanted, key
            file.write_text(start)
            await gateway.reload()
            if key in _LATER:
                await until(lambda: look(gateway) != wanted)  # noqa: B023  waited for here
            assert look(gateway) != wanted, f"{key}: and back"
        assert gateway.reload.results[Result.APPLIED] == 2 * len(LINES)
