"""What is made of load messages, and where they are looked for."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records import LoadEndpoint, LoadSample, LoadSource
from gateway.upstream.load_socket import FRESH_S, RankLoad, parse_load
from gateway.upstream.ranks import rank_facts, rank_specs
from tests.unit.upstream_probe.probing import Answers, answers_of, probed, spec


def message(sequence: int, *fields: object, tag: str = "LoadStat") -> list[bytes]:
    return [b"load", sequence.to_bytes(8, "big"), msgspec.msgpack.encode([tag, *fields])]


def load(sequence: int, running: int, rank: int | None = 1) -> list[bytes]:
    return message(sequence, running, 2, 500, 1000, rank)


def heard(rank: int = 1) -> RankLoad:
    return RankLoad(LoadEndpoint(rank, "tcp://h:5559", "load"))


def running(rank: RankLoad) -> float | None:
    return rank.sample.running if rank.sample is not None else None


def test_only_the_newest_message_of_a_drain_counts() -> None:
    rank = heard()
    assert rank.take([load(4, 1), load(5, 2), load(6, 3)], 10.0)
    assert rank.sample == LoadSample(3, 2, 0.5, source=LoadSource.SOCKET)
    assert (rank.messages, rank.errors, rank.restarts, rank.heard_at) == (3, 0, 0, 10.0)


def test_what_cannot_be_read_hides_no_older_message_and_keeps_nothing_fresh() -> None:
    rank = heard()
    assert rank.take([load(4, 1), [b"load"], message(6, tag="Other")], 10.0)
    assert (running(rank), rank.errors) == (1, 2)
    assert not rank.take([message(7, "many", 2, 3, 4)], 11.0)
    assert (running(rank), rank.errors, rank.heard_at) == (1, 3, 10.0)
    assert rank.fresh(10.0 + FRESH_S)
    assert not rank.fresh(10.1 + FRESH_S)


def test_a_rank_that_was_never_heard_is_not_fresh() -> None:
    rank = heard()
    assert not rank.take([], 0.0)
    assert not rank.fresh(0.0)


def test_a_sequence_that_goes_back_is_a_restart_and_counts() -> None:
    rank = heard()
    rank.take([load(900, 1)], 1.0)
    rank.take([load(901, 1)], 2.0)
    assert rank.restarts == 0
    assert rank.take([load(902, 7), load(0, 0)], 3.0)
    assert (rank.restarts, running(rank)) == (1, 0)
    rank.take([load(1, 2)], 4.0)
    assert rank.restarts == 1


def test_the_load_of_another_rank_is_not_this_ones() -> None:
    rank = heard(1)
    assert not rank.take([load(1, 9, rank=0)], 1.0)
    assert (rank.errors, rank.sample) == (1, None)
    assert rank.take([load(2, 3, rank=None)], 1.0), "a rank need not be named"


def test_without_a_capacity_the_tokens_are_told() -> None:
    assert parse_load(message(1, 1, 1, 700, 0, 0), 0)[1].kv_tokens == 700
    later = parse_load(message(1, 1, 1, 700, 0, 0, 100, 900, 256, 1, 1, "something new"), 0)[1]
    assert (later.kv_usage, later.kv_tokens) == (None, 900)
    full = parse_load(message(1, 1, 1, 700, 600, 0), 0)[1]
    assert (full.kv_usage, full.kv_tokens) == (1.0, None)


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (1, 2, 3),
        (-1, 2, 3, 4),
        (1.5, 2, 3, 4),
        (True, 2, 3, 4),
        (None, 2, 3, 4),
        (1 << 60, 2, 3, 4),
        (1, 2, 3, 4, "x"),
    ],
)
def test_numbers_that_cannot_be_a_load(fields: tuple[object, ...]) -> None:
    with pytest.raises(msgspec.ValidationError):
        parse_load(message(1, *fields), 0)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_a_load_or_a_value_error(frames: list[bytes]) -> None:
    rank = heard()
    rank.take([frames], 1.0)
    assert (rank.sample is None) == (rank.errors == 1)


def test_nesting_without_end_is_no_load() -> None:
    rank = heard()
    deep = b"\x9b\xa8LoadStat" + b"\x01" * 5 + b"\x91" * 4000
    rank.take([[b"load", bytes(8), deep]], 1.0)
    assert rank.errors == 1


# --------------------------------------------------------------------------- where


def sglang(size: int = 2, **events: object) -> Answers:
    answers = answers_of("sglang-0.5.23")
    info = json.loads(answers["/server_info"][1])
    info |= {"dp_size": size, "kv_events": info["kv_events"] | {"dp_size": size} | events}
    answers["/server_info"] = (200, json.dumps(info))
    return answers


async def test_the_sockets_of_all_ranks_are_at_the_workers_own_host() -> None:
    answers = sglang(load_endpoint_port_base=6000, load_topic="load", endpoint_host="10.9.9.9")
    worker = spec("http://10.0.0.1:8000")
    facts = await probed(answers, worker)
    assert facts.loads == (
        LoadEndpoint(0, "tcp://10.0.0.1:6000", "load"),
        LoadEndpoint(1, "tcp://10.0.0.1:6001", "load"),
    )
    second = rank_specs(worker, facts)[list(rank_specs(worker, facts))[1]]
    assert rank_facts(second, facts).loads == facts.loads[1:]
    v6 = await probed(answers, spec("http://[::1]:8000"))
    assert v6.loads[0].endpoint == "tcp://[::1]:6000"


@pytest.mark.parametrize("base", [None, 0, -1, 65_535, 70_000])
async def test_no_socket_where_none_is_announced_or_can_be(base: int | None) -> None:
    facts = await probed(sglang(load_endpoint_port_base=base), spec())
    assert facts.loads == ()
    assert facts.rank_routing, "all else was read"


async def test_events_that_are_turned_off_here_leave_the_load() -> None:
    facts = await probed(sglang(load_endpoint_port_base=6000), spec(kv_events=""))
    assert (facts.events, len(facts.loads)) == ((), 2)
