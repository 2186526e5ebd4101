"""Several sources, one list: who wins, who stays, what has to be done."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.discovery import Found, Roster
from gateway.discovery.roster import address_of
from gateway.records import EngineKind, Role, WorkerId, WorkerSpec

W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")


def spec(name: str, host: str = "", **stated: object) -> WorkerSpec:
    return replace(WorkerSpec(WorkerId(name), f"http://{host or name}:8000"), **stated)  # type: ignore[arg-type]


def found(*specs: WorkerSpec) -> list[Found]:
    return [Found(one) for one in specs]


def test_one_address_named_by_two_sources_is_one_worker() -> None:
    """The configuration names it and states its key; discovery fills in what the configuration leaves open."""
    roster = Roster()
    roster.listed("dns:x", found(spec("w-1234", "a", engine=EngineKind.SGLANG, weight=3.0)), 1.0)
    roster.listed("config", found(spec("w1", "a", api_key="secret", weight=2.0)), 1.0)
    (entry,) = roster.entries().values()
    assert entry.spec == spec("w1", "a", api_key="secret", weight=2.0, engine=EngineKind.SGLANG)
    assert entry.sources == ("config", "dns:x")


def test_ports_and_trailing_dots_are_compared_as_addresses() -> None:
    assert address_of(WorkerSpec(W1, "http://a")) == address_of(WorkerSpec(W2, "http://a.:80"))
    assert address_of(WorkerSpec(W1, "https://a")) != address_of(WorkerSpec(W1, "http://a"))


def test_it_stays_while_one_source_names_it() -> None:
    roster = Roster()
    roster.listed("config", found(spec("w1", "a")), 1.0)
    roster.listed("kubernetes", found(spec("pod", "a", role=Role.PREFILL)), 1.0)
    roster.listed("config", [], 2.0)
    assert dict(roster.entries()) == {"pod": (spec("pod", "a", role=Role.PREFILL), None, ("kubernetes",))}


def test_a_source_that_cannot_look_empties_nothing() -> None:
    roster = Roster()
    roster.listed("dns:x", found(spec("w1")), 1.0)
    roster.failed("dns:x", "no answer", 5.0)
    roster.failed("dns:x", "still no answer", 7.0)
    state = roster.source("dns:x")
    assert (state.workers, state.listed_at, state.error, state.failed_at) == (1, 1.0, "still no answer", 5.0)
    assert W1 in roster.entries()
    roster.listed("dns:x", found(spec("w1")), 9.0)
    assert roster.source("dns:x").error is None


def test_two_addresses_that_want_one_name() -> None:
    roster = Roster()
    roster.listed("registry", found(spec("w1", "b"), spec("w1", "c")), 1.0)
    roster.listed("config", found(spec("w1", "z")), 1.0)
    names = {entry.spec.url: name for name, entry in roster.entries().items()}
    assert names["http://z:8000"] == "w1"
    assert len(set(names.values())) == 3
    assert all(name.startswith("w1") and "b" not in name.partition("-")[0] for name in names.values())
    assert all(name == entry.spec.name for name, entry in roster.entries().items())


def test_a_long_name_that_is_taken_stays_a_name() -> None:
    roster = Roster()
    roster.listed("registry", found(spec("n" * 64, "b"), spec("n" * 64, "c")), 1.0)
    assert {len(name) for name in roster.entries()} == {64}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["w1", "w2"]), st.sampled_from("pqr"))))
def test_the_list_does_not_depend_on_the_order_of_events(events: list[tuple[str, str, str]]) -> None:
    """Replicas hear of things in their own order and must call a worker the same."""
    forward, backward = Roster(), Roster()
    by_source = {source: found(*(spec(n, h) for s, n, h in events if s == source)) for source in "abc"}
    for source, listing in by_source.items():
        forward.listed(source, listing, 1.0)
    for source, listing in reversed(by_source.items()):
        backward.listed(source, found(spec("old")), 1.0)
        backward.listed(source, listing, 2.0)
    assert forward.entries() == backward.entries()
    assert len({address_of(entry.spec) for entry in forward.entries().values()}) == len(forward.entries())


def test_what_has_to_be_done() -> None:
    roster = Roster()
    roster.listed("config", found(spec("w1"), spec("w2"), spec("w3")), 1.0)
    plan = roster.plan({})
    assert ([e.spec.name for e in plan.join], plan.leave, plan.change) == ([W1, W2, W3], (), ())
    present = {entry.spec.name: entry for entry in plan.join}
    roster.listed("config", found(spec("w1", weight=2.0), spec("w2", "elsewhere")), 2.0)
    plan = roster.plan(present)
    assert plan.leave == (W2, W3)
    assert [entry.spec for entry in plan.change] == [spec("w1", weight=2.0)]
    assert [entry.spec for entry in plan.join] == [spec("w2", "elsewhere")]


def test_one_that_drains_when_it_is_first_seen_does_not_join() -> None:
    roster = Roster()
    roster.listed("kubernetes", [Found(spec("w1"), draining="terminating")], 1.0)
    assert roster.plan({}).join == ()
    roster.listed("config", found(spec("w2")), 1.0)
    there = {entry.spec.name: entry for entry in roster.plan({}).join}
    roster.listed("kubernetes", [Found(spec("pod", "w2"), draining="terminating")], 2.0)
    (changed,) = roster.plan(there).change
    assert (changed.spec.name, changed.draining) == (W2, "terminating")


def test_what_an_operator_took_out_stays_out_until_nobody_names_it() -> None:
    roster = Roster()
    roster.listed("kubernetes", found(spec("w1")), 1.0)
    roster.withdraw(spec("w1"), 1.0, out=True)
    roster.listed("kubernetes", found(spec("w1")), 2.0)
    assert not roster.entries()
    roster.listed("kubernetes", [], 3.0)
    roster.listed("kubernetes", found(spec("w1")), 4.0)
    assert W1 in roster.entries()


def test_or_until_the_operator_adds_it_again() -> None:
    roster = Roster()
    roster.add(spec("w1"), 1.0)
    roster.withdraw(spec("w1"), 2.0, out=True)
    assert not roster.entries()
    roster.listed("config", found(spec("w1")), 3.0)
    roster.withdraw(spec("w1"), 3.0, out=True)
    roster.add(spec("again", "w1"), 4.0)
    assert list(roster.entries().values()) == [(spec("again", "w1"), None, ("admin",))]
    roster.withdraw(spec("again", "w1"), 5.0, out=False)
    assert not roster.entries()


def test_there_is_an_end_to_it() -> None:
    roster = Roster(most=3)
    roster.listed("dns:x", found(*(spec(f"d{n}") for n in range(5))), 1.0)
    roster.listed("config", found(spec("w1"), spec("w2")), 1.0)
    assert list(roster.entries()) == [W1, W2, "d0"]
    assert (roster.left_out, roster.source("dns:x").left_out) == (2, 2)
