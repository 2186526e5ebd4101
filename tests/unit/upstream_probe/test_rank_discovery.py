"""How many data-parallel ranks are behind a URL, whether each can be asked for, and where their sockets are."""

from __future__ import annotations

import json

import pytest

from gateway.upstream.control import ProbeFailed
from tests.unit.upstream_probe.probing import Answers, answers_of, codes, probed, source, spec, with_sources


def sglang_ranks(size: int, *, version: str = "0.5.23", **events: object) -> Answers:
    answers = answers_of("sglang-0.5.23")
    info = json.loads(answers["/server_info"][1])
    info |= {
        "dp_size": size,
        "version": version,
        "decode_log_interval": 1,
        "kv_events": info["kv_events"] | {"dp_size": size} | events,
    }
    answers["/server_info"] = (200, json.dumps(info))
    return answers


async def test_ranks_are_counted_in_what_the_engine_says() -> None:
    one = await probed(answers_of("vllm-0.32.0"), spec())
    assert (one.ranks, one.rank_routing) == ((0,), False)
    two = await probed(
        with_sources({str(n): source(f"tcp://*:{5557 + n}", f"tcp://*:{5657 + n}") for n in (0, 1)}), spec()
    )
    assert (two.ranks, two.rank_routing) == ((0, 1), True)
    answers = answers_of("vllm-0.16.0")  # cannot say where its events are, but how many ranks it has
    line = next(line for line in answers["/metrics"][1].splitlines() if line.startswith("vllm:cache_config_info"))
    answers["/metrics"] = (200, answers["/metrics"][1] + line.replace('engine="0"', 'engine="1"') + "\n")
    assert (await probed(answers, spec())).ranks == (0, 1)
    four = await probed(sglang_ranks(4), spec())
    assert (four.ranks, four.rank_routing) == ((0, 1, 2, 3), True)


@pytest.mark.parametrize(
    ("version", "routed"), [("0.5.10", True), ("0.5.10.post1", True), ("0.5.9", False), ("0.6.0", True), ("", False)]
)
async def test_from_which_release_on_sglang_is_told_the_rank(version: str, routed: bool) -> None:
    facts = await probed(sglang_ranks(2, version=version), spec())
    assert facts.rank_routing is routed
    assert ("ranks_as_one" in codes(facts)) is not routed


async def test_a_configured_number_of_ranks_wins_and_a_wrong_one_is_told() -> None:
    facts = await probed(answers_of("vllm-0.16.0"), spec(data_parallel_size=2, kv_events="tcp://*:5557"))
    assert facts.ranks == (0, 1)
    assert [item.endpoint for item in facts.events] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    assert "rank_count_wrong" in codes(facts)
    right = await probed(sglang_ranks(2), spec(data_parallel_size=2))
    assert (right.ranks, codes(right)) == ((0, 1), [])


async def test_a_configured_address_is_that_of_the_first_rank_of_the_server() -> None:
    """The second server of a hybrid set-up has ranks 2 and 3; one with external balancing its own rank only."""
    for first, count in ((2, 2), (3, 1)):
        said = {str(n): source(f"tcp://*:{5557 + n}", f"tcp://*:{5657 + n}") for n in range(first, first + count)}
        answers = with_sources(said)
        answers["/metrics"] = (200, answers["/metrics"][1].replace('engine="0"', f'engine="{first}"'))
        configured = await probed(answers, spec(kv_events="tcp://*:7000", kv_replay="tcp://*:7100"))
        assert [(item.rank, item.endpoint, item.replay_endpoint) for item in configured.events] == [
            (first + n, f"tcp://127.0.0.1:{7000 + n}", f"tcp://127.0.0.1:{7100 + n}") for n in range(count)
        ]
        found = await probed(answers, spec())
        assert [item.endpoint for item in found.events] == [
            f"tcp://127.0.0.1:{5557 + n}" for n in range(first, first + count)
        ]


async def test_replay_ports_that_run_into_event_ports() -> None:
    """One of two sockets on a port cannot be there; asking an event socket for a replay would never be answered."""
    facts = await probed(sglang_ranks(3, endpoint_port_base=5557, replay_endpoint_port_base=5559), spec())
    assert [(item.endpoint[-4:], (item.replay_endpoint or "")[-4:]) for item in facts.events] == [
        ("5557", ""),
        ("5558", "5560"),
        ("5559", "5561"),
    ]
    assert codes(facts) == ["replay_overlaps"]
    assert "5559" in facts.findings[0].message
    apart = await probed(sglang_ranks(3, endpoint_port_base=5557, replay_endpoint_port_base=5560), spec())
    assert codes(apart) == []


async def test_two_ranks_at_one_address() -> None:
    said = {"0": source("tcp://*:5557", None), "1": source("tcp://*:5558", None), "2": source("tcp://*:5558", None)}
    facts = await probed(with_sources(said), spec())
    assert [item.rank for item in facts.events] == [0, 1]
    assert "rank_events_shared" in codes(facts)


@pytest.mark.parametrize("size", [0, -1, 1_000_000_000])
async def test_a_number_of_ranks_that_cannot_be_is_no_sglang(size: int) -> None:
    answers = sglang_ranks(size)
    facts = await probed(answers, spec())
    assert facts.ranks == (0,)
    many = with_sources({str(n): source(f"tcp://*:{n}") for n in range(2000)})
    with pytest.raises(ProbeFailed, match="2000 data-parallel ranks"):
        await probed(many, spec())


async def test_a_busy_server_keeps_its_ranks() -> None:
    answers = sglang_ranks(2)
    before = await probed(answers, spec())
    answers["/server_info"] = (503, "")
    with pytest.raises(ProbeFailed, match="/server_info"):
        await probed(answers, spec(), known=before)
    answers = with_sources({str(n): source(f"tcp://*:{5557 + n}", f"tcp://*:{5657 + n}") for n in (0, 1)})
    before = await probed(answers, spec())
    answers["/kv_event_sources"] = (500, "")
    after = await probed(answers, spec(), known=before)
    assert (after.ranks, after.rank_routing, after.events) == ((0, 1), True, before.events)
