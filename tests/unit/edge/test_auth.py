"""API keys: whom a header stands for, and what is left of the rates."""

from __future__ import annotations

import hashlib
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.edge.auth import Access, Bucket, InvalidKey, Keys, RateLimited, Tenant, Visit
from gateway.edge.responses import error_headers
from gateway.errors import BadRequest, UnknownModel
from gateway.kv import KvIndex
from gateway.policy import make_policy
from gateway.pool import Fleet
from gateway.records import Endpoint, EngineKind, Outcome, Result, WorkerFacts, WorkerId, WorkerSpec
from gateway.router import Router

KEY = b"kvg-0123456789abcdefghij"


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def keys(**access: object) -> Keys:
    return Keys({digest(KEY): Access("a", **access)})  # type: ignore[arg-type]


# --------------------------------------------------------------------------- who


@pytest.mark.parametrize(
    "value", [b"Bearer " + KEY, b"bearer " + KEY, b"BEARER " + KEY, b"Bearer  " + KEY + b" "], ids=repr
)
def test_a_bearer_key_is_found(value: bytes) -> None:
    assert keys().find({b"authorization": value}, Endpoint.CHAT).access.tenant == "a"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer"},
        {b"authorization": b"Bearer "},
        {b"authorization": KEY},
        {b"authorization": b"Basic " + KEY},
        {b"authorization": b"Bearer " + KEY[:-1]},
        {b"authorization": b"Bearer " + KEY + b"x"},
        {b"authorization": b"Bearer " + KEY.upper()},
        {b"authorization": b"Bearer " + digest(KEY).hex().encode()},
        {b"authorization": b"Bearer " + KEY * 100},
        {b"x-api-key": KEY},
        {b"authorization": b"Bearer wrong", b"x-api-key": KEY},
    ],
    ids=repr,
)
def test_everything_else_is_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(InvalidKey):
        keys().find(fields, Endpoint.CHAT)


def test_anthropics_header_counts_where_its_clients_go() -> None:
    found = keys()
    assert found.find({b"x-api-key": KEY}, Endpoint.MESSAGES).access.tenant == "a"
    assert found.find({b"x-api-key": KEY}, None).access.tenant == "a"
    with pytest.raises(InvalidKey):
        found.find({b"x-api-key": b"wrong"}, Endpoint.MESSAGES)


@given(st.binary(max_size=600), st.sampled_from([Endpoint.CHAT, Endpoint.MESSAGES, None]))
def test_no_other_value_gets_in(value: bytes, endpoint: Endpoint | None) -> None:
    found = keys()
    for fields in ({b"authorization": value}, {b"authorization": b"Bearer " + value}, {b"x-api-key": value}):
        if KEY in value:
            continue
        with pytest.raises(InvalidKey) as caught:
            found.find(fields, endpoint)
        assert error_headers(caught.value) == {"www-authenticate": "Bearer"}


# --------------------------------------------------------------------------- rates


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    bucket = Bucket(60)
    for _ in range(60):
        assert bucket.wait_s(5.0) == 0
        bucket.take(1, 5.0)
    assert bucket.wait_s(5.0) == 1.0
    assert bucket.wait_s(5.5) == 0.5
    assert bucket.wait_s(6.0) == 0
    bucket.take(1, 6.0)
    assert bucket.wait_s(1000.0) == 0
    for _ in range(60):
        bucket.take(1, 1000.0)
    assert bucket.wait_s(1000.0) == 1.0


def test_what_was_taken_beyond_is_owed() -> None:
    bucket = Bucket(600)
    bucket.take(1200, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(60.1)
    bucket.take(-600, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(0.1)
    bucket.take(-10_000, 0.0)
    bucket.take(599, 0.0)
    assert bucket.wait_s(0.0) == 0


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5_000)), min_size=1, max_size=30),
)
def test_the_wait_is_true(per_minute: int, steps: list[tuple[float, int]]) -> None:
    """Just before the time told nothing may be taken, and then something may: with clocks that never go back."""
    bucket, now = Bucket(per_minute), 0.0
    for pause_s, amount in steps:
        now += pause_s
        wait_s = bucket.wait_s(now)
        if wait_s > 1e-3:
            assert bucket.wait_s(now + wait_s * 0.99) > 0
            now += wait_s * 0.99
        now += wait_s * 0.0101 + 1e-6
        assert bucket.wait_s(now) <= 1e-6
        bucket.take(amount, now)


def test_a_tenant_is_told_when_to_come_back_and_refusals_cost_nothing() -> None:
    tenant = Tenant(Access("a", requests_per_minute=2, tokens_per_minute=1000))
    tenant.take(10, 0.0)
    tenant.take(10, 0.0)
    for _ in range(5):
        with pytest.raises(RateLimited, match="2 requests a minute") as caught:
            tenant.take(10, 0.0)
        assert caught.value.retry_after_s == 30.0
        assert error_headers(caught.value) == {"retry-after": "30"}
    tenant.take(10, 30.0)


def test_tokens_are_put_right_when_the_worker_has_told() -> None:
    tenant = Tenant(Access("a", tokens_per_minute=1000))
    visit = Visit(tenant)
    visit.take(600, 0.0)
    visit.settle(outcome(prompt_tokens=500, completion_tokens=800))
    with pytest.raises(RateLimited) as caught:
        tenant.check(0.0)
    assert caught.value.retry_after_s == pytest.approx(301 * 60 / 1000)
    visit.settle(outcome(prompt_tokens=500, completion_tokens=800))
    assert tenant.tokens is not None
    assert tenant.tokens.wait_s(0.0) == pytest.approx(301 * 60 / 1000), "once"


@pytest.mark.parametrize(
    ("ending", "left"),
    [
        ({"worker": None, "result": Result.REFUSED}, 1000),
        ({"result": Result.WORKER_FAILED}, 1000),
        ({"result": Result.CLIENT_GONE}, 400),
        ({"result": Result.TIMED_OUT}, 400),
    ],
)
def test_what_nobody_worked_for_is_given_back(ending: dict[str, object], left: int) -> None:
    tenant = Tenant(Access("a", tokens_per_minute=1000))
    visit = Visit(tenant)
    visit.take(600, 0.0)
    visit.settle(outcome(**ending))
    assert tenant.tokens is not None
    tenant.tokens.take(left - 1, 0.0)
    assert tenant.tokens.wait_s(0.0) == 0
    tenant.tokens.take(1, 0.0)
    assert tenant.tokens.wait_s(0.0) > 0


def outcome(**more: object) -> Outcome:
    fields: dict[str, object] = {
        "request_id": "r",
        "endpoint": Endpoint.CHAT,
        "model": "m",
        "pool": "p",
        "worker": WorkerId("w"),
        "result": Result.COMPLETED,
        "status": 200,
        "stream": False,
        "started_at": 0.0,
        "ended_at": 0.0,
    }
    return Outcome(**fields | more)  # type: ignore[arg-type]


def test_a_reload_keeps_what_is_left_of_unchanged_rates() -> None:
    found = keys(requests_per_minute=1, tokens_per_minute=60)
    found.find({b"authorization": b"Bearer " + KEY}, None).take(1000, 0.0)
    found.replace({digest(KEY): Access("a", None, 1, 120), digest(b"other"): Access("b")})
    tenant = found.find({b"authorization": b"Bearer " + KEY}, None)
    assert tenant.requests is not None
    assert tenant.tokens is not None
    assert tenant.requests.wait_s(0.0) == 60
    assert tenant.tokens.wait_s(0.0) == 0
    found.replace({})
    assert len(found) == 0
    with pytest.raises(InvalidKey):
        found.find({b"authorization": b"Bearer " + KEY}, None)


def test_waits_are_finite_for_the_slowest_rate() -> None:
    bucket = Bucket(1)
    bucket.take(1 << 40, 0.0)
    assert math.isfinite(bucket.wait_s(1e9))


# --------------------------------------------------------------------------- models


def router(*models: str) -> Router:
    fleet = Fleet()
    for number, model in enumerate(models):
        spec = WorkerSpec(WorkerId(f"w{number}"), f"http://w{number}")
        fleet.add(spec, WorkerFacts(engine=EngineKind.VLLM, version="1", models=(model,)), 0.0)
    rng = Random(1)
    return Router(fleet, KvIndex(), make_policy("round_robin", rng=rng), rng=rng)


def visit(*models: str) -> Visit:
    return Visit(Tenant(Access("a", frozenset(models) if models else None)))


def test_a_key_without_a_list_is_good_for_all() -> None:
    assert visit().pool(router("m", "n"), "n", 0.0).name == "n"
    with pytest.raises(UnknownModel, match="there are m, n"):
        visit().pool(router("m", "n"), "x", 0.0)


@pytest.mark.parametrize("asked", ["n", "away", "x" * 1000, ""])
def test_models_of_others_are_unknown_and_not_named(asked: str) -> None:
    served = router("n") if not asked else router("m", "n")
    with pytest.raises(UnknownModel) as caught:
        visit("m", "away").pool(served, asked, 0.0)
    assert caught.value.message.endswith("is not served, or not to this key; there are away, m")
    assert len(caught.value.message) < 300


def test_the_only_model_needs_no_name_when_it_is_allowed() -> None:
    assert visit("m").pool(router("m"), "", 0.0).name == "m"
    with pytest.raises(BadRequest):
        visit("m").pool(router("m", "n"), "", 0.0)
