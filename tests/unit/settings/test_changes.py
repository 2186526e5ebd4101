"""What differs between two configurations, and what of one is taken into another."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.settings import Settings, all_keys, changed_keys, value_of, with_keys_of


def tree(**sections: Any) -> Settings:
    return Settings(**sections)


def test_equal_trees_differ_in_nothing() -> None:
    sections = {"workers": [{"url": "http://a:1", "api_key": "s"}], "timeouts": {"models": {"m": {"total_s": 1}}}}
    assert changed_keys(tree(**sections), tree(**sections)) == []


def test_keys_are_told_by_path_lists_and_tables_as_one() -> None:
    before = tree(workers=[{"url": "http://a:1", "api_key": "s"}], timeouts={"models": {"m": {"total_s": 1}}})
    now = tree(
        server={"tls": {"cert": "/c"}},
        workers=[{"url": "http://a:1", "api_key": "t"}],
        timeouts={"models": {"m": {"total_s": 2}}},
        routing={"affinity": {"ttl_s": 9}},
        auth={"admin_token": "x"},
    )
    assert changed_keys(before, now) == [
        "server.tls.cert",
        "auth.admin_token",
        "workers",
        "routing.affinity.ttl_s",
        "timeouts.models",
    ]


def test_a_section_that_may_be_missing_is_one_key() -> None:
    cluster = {"api_server": "http://a:1", "namespace": "n", "selector": "a=b"}
    without, one = tree(), tree(discovery={"kubernetes": cluster})
    other = tree(discovery={"kubernetes": cluster | {"namespace": "m"}})
    assert (
        changed_keys(without, one) == changed_keys(one, without) == changed_keys(one, other) == ["discovery.kubernetes"]
    )
    assert with_keys_of(one, without, ["discovery.kubernetes"]) == without


def test_keys_of_another_tree_are_taken_over_and_nothing_else() -> None:
    one = tree(server={"port": 1, "host": "a"}, routing={"affinity": {"ttl_s": 1}})
    other = tree(server={"port": 2, "host": "b"}, routing={"affinity": {"ttl_s": 2, "header": "h"}})
    mixed = with_keys_of(one, other, ["server.port", "routing.affinity.ttl_s"])
    assert changed_keys(one, mixed) == ["server.port", "routing.affinity.ttl_s"]
    assert (mixed.server.port, mixed.server.host, mixed.routing.affinity.header) == (2, "a", "x-session-id")
    assert one.server.port == 1


def test_every_key_has_a_value() -> None:
    keys = all_keys()
    assert len(keys) == len(set(keys)) > 50
    for key in keys:
        value_of(Settings(), key)
    with pytest.raises(KeyError):
        value_of(Settings(), "server.prot")
