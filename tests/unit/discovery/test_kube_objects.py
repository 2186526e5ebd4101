"""What pods and EndpointSlices say of workers."""

from __future__ import annotations

import json

import pytest

from gateway.discovery import Found, KubeTraits, Pods, Slices
from gateway.discovery.kube_objects import Kind, KubeView
from gateway.records import EngineKind, RankChoice, Role, WorkerId, WorkerSpec
from gateway.sim.kube_api import Json, endpoint, endpoint_slice, pod, terminating

LIKE = WorkerSpec(WorkerId(""), "", pool="main", api_key="key")


def seen(
    *things: Json, kind: Kind | None = None, traits: KubeTraits | None = None
) -> tuple[dict[str, Found], list[str]]:
    body = json.dumps({"metadata": {"resourceVersion": "7"}, "items": things}).encode()
    view = KubeView(traits or KubeTraits(LIKE))
    view.replace((kind or Pods()).page(body).objects)
    found, problems = view.found()
    return {one.spec.name: one for one in found}, problems


def slices(*things: Json) -> dict[str, Found]:
    return seen(*things, kind=Slices())[0]


def test_a_ready_pod_is_a_worker() -> None:
    found, problems = seen(pod("a", "10.0.0.1", listens=8080), pod("b", "fd00::1"))
    assert [one.spec.url for one in found.values()] == ["http://10.0.0.1:8080", "http://[fd00::1]:8000"]
    assert {(one.spec.pool, one.spec.api_key, one.draining) for one in found.values()} == {("main", "key", None)}
    assert problems == []


@pytest.mark.parametrize("status", [{}, {"podIP": ""}, {"podIP": "10.0.0.1", "phase": "Failed"}, {"phase": "Pending"}])
def test_no_address_or_no_life_is_no_worker(status: Json) -> None:
    thing = pod("a", "10.0.0.1") | {"status": status}
    assert seen(thing)[0] == {}


def test_not_ready_and_terminating_pods_get_nothing_new() -> None:
    found, _ = seen(pod("a", "10.0.0.1", ready=False), terminating(pod("b", "10.0.0.2")))
    assert {name: one.draining for name, one in found.items()} == {"a": "not_ready", "b": "terminating"}


def test_annotations_say_more_of_a_worker() -> None:
    found, problems = seen(
        pod(
            "a",
            "10.0.0.1",
            engine="sglang",
            pool="canary",
            role="prefill",
            models="llama, llama-lora,",
            weight="2.5",
            port="9000",
            scheme="https",
            kv_events="tcp://*:5557",
            kv_replay="off",
            kv_blocks="100",
            block_size="32",
            data_parallel_size="2",
            ranks="one",
        )
    )
    assert found["a"].spec == WorkerSpec(
        WorkerId("a"),
        "https://10.0.0.1:9000",
        engine=EngineKind.SGLANG,
        pool="canary",
        role=Role.PREFILL,
        kv_events="tcp://*:5557",
        kv_replay="",
        api_key="key",
        weight=2.5,
        models=("llama", "llama-lora"),
        block_size=32,
        kv_blocks=100,
        data_parallel_size=2,
        ranks=RankChoice.ONE,
    )
    assert problems == []


def test_what_cannot_be_read_is_told_and_left_out() -> None:
    found, problems = seen(pod("a", "10.0.0.1", role="both?", port="http", weight="0", kv_events="udp://x"))
    assert found["a"].spec == WorkerSpec(WorkerId("a"), "http://10.0.0.1:8000", pool="main", api_key="key")
    assert problems == [
        "a: kvgate.io/kv-events is 'udp://x'",
        "a: kvgate.io/port is 'http'",
        "a: kvgate.io/role is 'both?'",
        "a: kvgate.io/weight is '0'",
    ]


def test_a_pod_may_be_left_out() -> None:
    assert seen(pod("a", "10.0.0.1", ignore="true"))[0] == {}


@pytest.mark.parametrize(
    ("wanted", "ports", "port"),
    [
        (None, [{"containerPort": 9}, {"name": "http", "containerPort": 8080}], 8080),
        (None, [{"name": "api", "containerPort": 9000}], 9000),
        (None, None, 8000),
        ("api", [{"name": "http", "containerPort": 1}, {"name": "api", "containerPort": 2}], 2),
        (7000, [{"name": "http", "containerPort": 1}], 7000),
    ],
)
def test_the_port_of_a_pod(wanted: int | str | None, ports: list[Json] | None, port: int) -> None:
    thing = pod("a", "10.0.0.1") | {"spec": {"containers": [{"name": "side"}, {"ports": ports}]}}
    found, _ = seen(thing, traits=KubeTraits(LIKE, port=wanted))
    assert found["a"].spec.url == f"http://10.0.0.1:{port}"


def test_a_long_name_becomes_a_name() -> None:
    one, other = seen(pod("p" * 70 + "a", "10.0.0.1"), pod("p" * 70 + "b", "10.0.0.2"))[0]
    assert (len(one), len(other), one != other) == (64, 64, True)


def test_endpoints_of_slices_are_workers() -> None:
    """With the labels of the Service; a condition that is not said means ready."""
    ends = [
        endpoint("a", "10.0.0.1"),
        endpoint("b", "10.0.0.2", ready=None),
        endpoint("c", "10.0.0.3", ready=False),
        endpoint("d", "10.0.0.4", ready=False, terminating=True),
        endpoint("e", ""),
    ]
    found = slices(endpoint_slice("vllm-1", ends, port=8001), endpoint_slice("vllm-2", None))
    assert {name: one.draining for name, one in found.items()} == {
        "a": None,
        "b": None,
        "c": "not_ready",
        "d": "terminating",
    }
    assert (found["a"].spec.url, found["a"].spec.pool) == ("http://10.0.0.1:8001", "gold")


def test_a_pod_in_two_slices_is_one_worker() -> None:
    """Both address families; and a move between slices shows it twice for a moment."""
    four = endpoint_slice("four", [endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2", ready=False)])
    six = endpoint_slice("six", [endpoint("a", "fd00::1")], family="IPv6")
    late = endpoint_slice("late", [endpoint("b", "10.0.0.2")])
    found = slices(six, four, late)
    assert [(one.spec.url, one.draining) for one in found.values()] == [
        ("http://10.0.0.1:8000", None),
        ("http://10.0.0.2:8000", None),
    ]


def test_an_endpoint_without_a_pod_hides_its_address() -> None:
    (name,) = slices(endpoint_slice("manual", [{"addresses": ["10.0.0.9"]}]))
    assert name.startswith("w-")
    assert "10.0.0.9" not in name


def line(kind: str, thing: Json) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode()


def test_events_change_the_view_and_only_what_changes_is_told() -> None:
    view, kind = KubeView(KubeTraits(LIKE)), Pods()
    assert view.happened(kind.event(line("ADDED", pod("a", "10.0.0.1"))))
    assert not view.happened(kind.event(line("MODIFIED", pod("a", "10.0.0.1"))))
    assert view.happened(kind.event(line("MODIFIED", pod("a", None))))
    assert view.found()[0] == []
    assert view.happened(kind.event(line("MODIFIED", pod("a", "10.0.0.2"))))
    bookmark = kind.event(line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "9"}}))
    assert (view.happened(bookmark), bookmark.version) == (False, "9")
    assert view.happened(kind.event(line("DELETED", pod("a", "10.0.0.2"))))
    assert not view.happened(kind.event(line("DELETED", pod("a", "10.0.0.2"))))
    error = kind.event(line("ERROR", {"kind": "Status", "code": 410, "message": "too old"}))
    assert error.status is not None
    assert error.status.code == 410
