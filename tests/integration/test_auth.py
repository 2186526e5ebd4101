"""API keys over real sockets: who gets in, what reaches a worker, and what tenants see of each other."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.config import ConfigError
from gateway.credentials import key_hash
from gateway.edge import Access, Keys
from gateway.edge.auth import InvalidKey
from gateway.records import Result
from gateway.runtime.access import KeysInForce
from gateway.runtime.files import FileWatch
from gateway.settings import AuthSettings
from gateway.sim.releases import Dialect
from tests.integration.relay_rig import PATIENCE_S, RelayRig, answers, ask, both_loops, post, relay, silent, until
from tests.integration.rig import Rig, fast, rig
from tests.integration.test_gateway import chat

KEY = "kvg-0123456789abcdefghij"
OTHER = "kvg-jihgfedcba9876543210"
OK = b'{"usage":{"prompt_tokens":10,"completion_tokens":90}}'
BEARER = f"authorization: Bearer {KEY}"


def keys(**access: Any) -> Keys:
    return Keys({hashlib.sha256(KEY.encode()).digest(): Access("team-a", **access)})


# --------------------------------------------------------------------------- who gets in


@both_loops
async def test_a_key_is_asked_for_and_goes_no_further() -> None:
    async with relay(answers(OK), keys=keys()) as rig:
        headers = [BEARER, "x-api-key: mine", "api-key: mine", "x-kvgate-tenant: root", "x-other: stays"]
        answer = await rig.ask(post(ask(), headers=headers))
        assert answer.status == 200
        sent = rig.workers[0].calls[0].headers
        assert not sent.keys() & {"authorization", "x-api-key", "api-key", "x-kvgate-tenant"}
        assert sent["x-other"] == "stays"
        for wrong in ([], ["authorization: Bearer nope"], [f"authorization: Basic {KEY}"], [f"x-api-key: {KEY}"]):
            answer = await rig.ask(post(ask(), headers=wrong))
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert len(rig.workers[0].calls) == 1
        assert [o.error_code for o in rig.outcomes] == [None] + ["invalid_api_key"] * 4
        assert rig.quiet()


@both_loops
async def test_anthropics_clients_send_theirs_in_a_header_of_its_own() -> None:
    async with relay(answers(OK), keys=keys()) as rig:
        body = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}'
        good = await rig.ask(post(body, path="/v1/messages", headers=[f"x-api-key: {KEY}"]))
        assert good.status == 200
        assert "x-api-key" not in rig.workers[0].calls[0].headers
        bad = await rig.ask(post(body, path="/v1/messages", headers=["x-api-key: nope"]))
        assert bad.status == 401
        assert json.loads(bad.body)["error"]["type"] == "authentication_error"


@both_loops
async def test_without_a_key_no_body_is_read() -> None:
    """The answer comes before the 50 MB do, and what comes all the same is not kept."""
    async with relay(answers(OK), keys=keys()) as rig:
        client = await rig.client()
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 50000000\r\n\r\n")
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        client.send(b"x" * 1_000_000)
        assert (await rig.outcome()).result is Result.REFUSED
        assert rig.quiet()


@both_loops
async def test_a_request_without_a_key_waits_for_its_turn() -> None:
    """Behind one that is served on the same connection."""
    async with relay(silent, keys=keys()) as rig:
        client = await rig.client()
        client.send(post(ask(), headers=[BEARER]) + post(ask()) + post(ask(), headers=[BEARER]))
        (await rig.workers[0].call()).plain(OK)
        assert (await client.answer()).body == OK
        assert (await client.answer()).status == 401
        assert await client.rest() == b""
        assert len(rig.workers[0].calls) == 1
        await until(rig.quiet)


async def test_models_are_shown_to_whom_they_are_allowed() -> None:
    for allowed, shown in ((None, ["m"]), (["m"], ["m"]), (["other"], [])):
        models = frozenset(allowed) if allowed is not None else None
        async with relay(answers(OK), keys=keys(models=models)) as rig:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{rig.port}", timeout=PATIENCE_S) as http:
                assert (await http.get("/v1/models")).status_code == 401
                assert (await http.get("/v1/models/m")).status_code == 401
                assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200
                auth = {"authorization": f"Bearer {KEY}"}
                listed = (await http.get("/v1/models", headers=auth)).json()["data"]
                assert [model["id"] for model in listed] == shown
                assert (await http.get("/v1/models", headers={"x-api-key": KEY})).status_code == 200
                one = await http.get("/v1/models/m", headers=auth)
                assert one.status_code == (200 if shown else 404)
            answer = await rig.ask(post(ask(), headers=[BEARER]))
            assert answer.status == (200 if shown else 404)
            if not shown:
                error = json.loads(answer.body)["error"]
                assert (error["code"], error["param"]) == ("model_not_found", "model")


def with_adapter(lora_path: object) -> bytes:
    return ask(more=b',"lora_path":' + json.dumps(lora_path).encode())


async def test_an_adapter_named_beside_the_model_must_be_allowed_too() -> None:
    for allowed in ({"m", "poet"}, {"m", "m:poet"}):
        async with relay(answers(OK), keys=keys(models=frozenset(allowed))) as rig:
            for lora_path, status in ((None, 200), ("poet", 200), (["poet", None], 200), ("lawyer", 404)):
                answer = await rig.ask(post(with_adapter(lora_path), headers=[BEARER]))
                assert answer.status == status
            refused = await rig.ask(post(with_adapter(["poet", "lawyer"]), headers=[BEARER]))
            error = json.loads(refused.body)["error"]
            assert (refused.status, error["code"]) == (404, "model_not_found")
            assert "'lawyer' is not served, or not to this key" in error["message"]
            assert len(rig.workers[0].calls) == 3


# --------------------------------------------------------------------------- rates


@both_loops
async def test_requests_beyond_the_rate_are_told_when_to_come_back() -> None:
    async with relay(answers(OK), keys=keys(requests_per_minute=3)) as rig:
        client = await rig.client()
        statuses = []
        for _ in range(5):
            client.send(post(ask(), headers=[BEARER]))
            answer = await client.answer()
            statuses.append(answer.status)
        assert statuses == [200, 200, 200, 429, 429]
        assert json.loads(answer.body)["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert "connection" not in answer.headers
        assert len(rig.workers[0].calls) == 3
        assert rig.quiet()


@both_loops
async def test_tokens_are_counted_as_the_worker_reports_them() -> None:
    async with relay(answers(OK), keys=keys(tokens_per_minute=150)) as rig:
        assert [(await rig.ask(post(ask(), headers=[BEARER]))).status for _ in range(3)] == [200, 200, 429]
        refused = await rig.ask(post(ask(), headers=[BEARER]))
        # 200 used of 150: 51 to come back at 2.5 a second.
        assert 15 <= int(refused.headers["retry-after"]) <= 21


async def test_a_burst_gets_no_more_than_its_rate() -> None:
    async with relay(answers(OK), keys=keys(requests_per_minute=7)) as rig:
        got = await asyncio.gather(*(rig.ask(post(ask(), headers=[BEARER])) for _ in range(30)))
        assert sorted(answer.status for answer in got) == [200] * 7 + [429] * 23
        await until(rig.quiet)


# --------------------------------------------------------------------------- fuzz


async def _fuzz(rig: RelayRig, lines: list[bytes]) -> None:
    client = await rig.client()
    head = b"".join(line + b"\r\n" for line in lines)
    client.send(b"POST /v1/messages HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n" + head + b"\r\n{}")
    status, _ = await client.head()
    assert status in (400, 401)
    client.abort()


_VALUES = st.binary(max_size=80) | st.sampled_from([b"Bearer", b"Bearer ", b"Bearer \t", b"bearer x", KEY.encode()])
_NAMES = st.sampled_from([b"authorization", b"Authorization", b"x-api-key", b"AUTHORIZATION "])


@settings(max_examples=150)
@given(st.lists(st.tuples(_NAMES, _VALUES), min_size=1, max_size=4))
def test_whatever_stands_in_the_header_nobody_gets_in(pairs: list[tuple[bytes, bytes]]) -> None:
    good = KEY.encode()
    lines = [name + b": " + value for name, value in pairs if good not in value]

    async def run() -> None:
        async with relay(answers(OK), keys=keys()) as rig:
            await asyncio.wait_for(_fuzz(rig, lines), PATIENCE_S)
            assert rig.workers[0].calls == []
            await until(rig.quiet)

    asyncio.run(run())


# --------------------------------------------------------------------------- the file


def write(path: Path, *entries: dict[str, Any]) -> None:
    """As operators replace files: whole, by a rename."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"keys": list(entries)}))
    os.replace(new, path)


def entry(key: str, tenant: str, **more: Any) -> dict[str, Any]:
    return {"hash": key_hash(key), "tenant": tenant, **more}


async def test_the_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write(path, entry(KEY, "a"))
    force = KeysInForce(AuthSettings(keys_file=path))
    files = FileWatch()
    files.add("keys", force.files, force.look)

    async def look() -> None:
        for _ in range(3):
            await files.look()

    assert force.keys is not None
    header = {b"authorization": f"Bearer {OTHER}".encode()}
    with pytest.raises(InvalidKey):
        force.keys.find(header, None)
    write(path, entry(KEY, "a"), entry(OTHER, "b"))
    await look()
    assert force.keys.find(header, None).access.tenant == "b"
    broken = {
        "keys: [": "no valid YAML",
        f"keys: [{{tenant: a, hash: {key_hash(KEY)}, modells: []}}]": "keys.0.modells: unknown key",
        f"keys: [{{tenant: a, hash: {key_hash(KEY)}9}}]": "keys.0.hash: expected the SHA-256",
        f"keys: [{{tenant: a, key: {KEY}}}]": "keys.0.key: give the key's `hash`",
        f"keys: [{{tenant: a, hash: {key_hash(KEY)}}}, {{tenant: b, hash: {key_hash(KEY)}}}]": "keys.1.hash: this key",
    }
    for text, said in broken.items():
        path.write_text(text)
        with capture_logs() as logs:
            await look()
        assert len(logs) == 1, "once"
        assert said in str(logs), text
        assert key_hash(KEY)[:16] not in str(logs)
        assert KEY not in str(logs)
        assert force.keys.find(header, None).access.tenant == "b"
    path.unlink()
    with capture_logs() as logs:
        await look()
    assert "cannot be read" in str(logs)
    assert len(force.keys) == 2
    write(path, entry(OTHER, "b"))
    await look()
    assert len(force.keys) == 1


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeysInForce(AuthSettings(keys_file=tmp_path / "none"))


async def test_a_key_given_and_taken_away_while_running(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write(path)
    async with rig(1, settings={"auth": {"keys_file": str(path)}}) as r:
        assert (await _chat(r, KEY)).status_code == 401
        write(path, entry(KEY, "a"))
        await _until_status(r, 200)
        write(path)
        await _until_status(r, 401)


async def _until_status(r: Rig, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await _chat(r, KEY)).status_code != status:  # noqa: ASYNC110  the condition is asked for, not told
            await asyncio.sleep(0.05)


async def _chat(r: Rig, key: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return await r.http.post(
        "/v1/chat/completions", json=body or chat("hi"), headers={"authorization": f"Bearer {key}"}
    )


# --------------------------------------------------------------------------- tenants


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_tenants_share_no_cache_and_predictions_stay_exact(dialect: str) -> None:
    entries = [{"key": KEY, "tenant": "a"}, {"key": OTHER, "tenant": "b"}]
    auth = {"keys": entries, "tenant_salt": True}
    async with rig(1, engine=fast(dialect=Dialect(dialect)), settings={"auth": auth}) as r:
        first = await _chat(r, KEY)
        usage = first.json()["usage"]
        assert _cached(first) == (0, 0)
        await until(lambda: r.announced > 0 and r.gateway.index.stats().speculative == 0)
        again = await _chat(r, KEY)
        predicted, delivered = _cached(again)
        assert predicted == delivered > usage["prompt_tokens"] - 64
        assert _cached(await _chat(r, OTHER)) == (0, 0), "another tenant finds nothing"
        for tenant, overlap in (("a", predicted), ("nobody", 0), (None, 0)):
            params = {} if tenant is None else {"tenant": tenant}
            shown = await r.http.post(r.ports.admin_url + "/admin/explain", params=params, json=chat("hi"))
            assert shown.json()["available_tokens"] == overlap
        own = chat("hi", cache_salt="mine")
        assert _cached(await _chat(r, KEY, own)) == (0, 0), "a client's own salt still separates"
        await until(lambda: r.gateway.index.stats().speculative == 0)
        predicted, delivered = _cached(await _chat(r, KEY, own))
        assert predicted == delivered > 0


def _cached(answer: httpx.Response) -> tuple[int, int]:
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(answer.headers["x-kvgate-predicted-tokens"]), details.get("cached_tokens") or 0
