"""URLs of stores."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.settings import RedisSettings, Settings
from gateway.store_address import StoreKind, parse_store_url


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "tls", "rest"),
    [
        ("redis://store", StoreKind.SERVER, [("store", 6379)], False, (None, 0, None, None)),
        ("rediss://u:p%40s@[::1]:7000/3", StoreKind.SERVER, [("::1", 7000)], True, (None, 3, "u", "p@s")),
        ("redis://:only@store", StoreKind.SERVER, [("store", 6379)], False, (None, 0, None, "only")),
        (
            "redis+sentinel://:p@a,b:26380/main/2",
            StoreKind.SENTINEL,
            [("a", 26379), ("b", 26380)],
            False,
            ("main", 2, None, "p"),
        ),
        ("rediss+cluster://a:1,b:2", StoreKind.CLUSTER, [("a", 1), ("b", 2)], True, (None, 0, None, None)),
    ],
)
def test_good_ones(
    url: str, kind: StoreKind, hosts: list[tuple[str, int]], tls: bool, rest: tuple[object, ...]
) -> None:
    address = parse_store_url(url)
    assert (address.kind, list(address.hosts), address.tls) == (kind, hosts, tls)
    assert (address.service, address.db, address.username, address.password) == rest
    assert "p@s" not in repr(address) + str(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://store",
        "store:6379",
        "redis://",
        "redis://a,b",
        "redis://:secret@a:port",
        "redis://a/x",
        "redis://a/1/2",
        "redis://a?db=1",
        "redis+sentinel://:secret@a",
        "redis+cluster://a/1",
        "redis://:secret\u2100@a",
        "redis://:secret[@a",
    ],
)
def test_bad_ones_are_told_without_their_password(url: str) -> None:
    with pytest.raises(ValueError, match="expected") as refused:
        parse_store_url(url)
    assert "secret" not in str(refused.value)
    with pytest.raises(ValidationError):
        RedisSettings.model_validate({"url": url})


def test_keys_of_their_own_win_and_nothing_shows_secrets() -> None:
    settings = Settings.model_validate(
        {"redis": {"url": "redis://u:hidden@store", "password": "hidden2", "sentinel_password": "hidden3"}}
    )
    address = settings.redis.address()
    assert address is not None
    assert (address.username, address.password, address.sentinel_password) == ("u", "hidden2", "hidden3")
    shown = f"{settings!r} {settings.model_dump_json()} {address!r} {address}"
    assert "hidden" not in shown
    assert Settings().redis.address() is None


def test_a_registry_needs_a_store() -> None:
    with pytest.raises(ValidationError, match="set redis"):
        Settings.model_validate({"discovery": {"registry": {}}})
