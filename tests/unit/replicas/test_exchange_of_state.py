"""What one replica tells and another does with it, message by message."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from gateway import keys
from gateway.pool import session_digest
from gateway.records import (
    BlockKey,
    Chain,
    Endpoint,
    InferenceRequest,
    NoPrompt,
    PrefixBlocks,
    Rank,
    Result,
    WorkerId,
    WorkerSpec,
)
from gateway.replicas.journal import Journal
from gateway.replicas.messages import (
    MAX_BYTES,
    MAX_CHAINS,
    MAX_KEYS,
    ChainEnd,
    Keys,
    LoadEntry,
    Message,
    Placement,
    Refused,
    decode,
    encode,
    pack_keys,
    unpack_keys,
    worker_key,
)
from gateway.replicas.peers import MAX_PEERS
from tests.unit.replicas.site import SIZE, TTL_S, Site

PROMPT = list(range(5 * SIZE + 1))


# ---------------------------------------------------------------- bytes


def test_a_message_comes_back_as_it_was() -> None:
    some = [BlockKey(0), BlockKey(2**64 - 1), BlockKey(7)]
    message = Message(
        2**63,
        9,
        full=True,
        loads=[LoadEntry(2**64 - 1, 3, 1.5, 0.5, 0.25, 10, 20, 5, 6, 7.5)],
        placed=[Placement(1, 5, True, [Keys(False, 16, 48, [ChainEnd(2, 48, pack_keys(some))])])],
        pins=[(1, 2)],
        open=[1],
    )
    assert decode(encode(message)) == message
    assert unpack_keys(message.placed[0].blocks[0].chains[0].keys) == some


def _changed(**fields: object) -> bytes:
    message = msgspec.to_builtins(Message(1, 1, loads=[LoadEntry(1)]))
    for at, value in fields.items():
        message[int(at[1:])] = value
    return b"\x01" + msgspec.msgpack.encode(message)


def _placement(blocks: int, packed: bytes | None = None) -> list[object]:
    return [1, 5, False, [[False, 16, 16, [[0, 16, bytes(8 * blocks) if packed is None else packed]]]]]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "malformed"),
        (b"\x02anything", "version"),
        (b"\x01", "malformed"),
        (b"\x01\xc0", "malformed"),
        (bytes(MAX_BYTES + 1), "size"),
        (_changed(_1=-1), "malformed"),
        (_changed(_5=[[1, -1]]), "malformed"),
        (_changed(_5=[[1, 1, float("nan")]]), "malformed"),
        (_changed(_5=[[1, 1, float("inf")]]), "malformed"),
        (_changed(_5=[[1]] * 5000), "malformed"),
        (_changed(_6=[_placement(0, b"1234567")]), "malformed"),
        (_changed(_6=[_placement(MAX_KEYS + 1)]), "malformed"),
        (_changed(_6=[_placement(MAX_KEYS), _placement(1)]), "size"),
        (_changed(_9=[[1, 2, 3]]), "malformed"),
    ],
)
def test_what_breaks_a_bound_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        decode(payload)
    assert refused.value.reason == reason


def test_fields_of_a_later_release_are_left_out() -> None:
    message = msgspec.to_builtins(Message(1, 1, loads=[LoadEntry(1, 2)]))
    message[5][0].append("later")
    message.append({"later": 1})
    assert decode(b"\x01" + msgspec.msgpack.encode(message)).loads[0].requests == 2


def test_a_worker_goes_by_its_address() -> None:
    one = WorkerSpec(WorkerId("a"), "http://w:80")
    assert worker_key(one) == worker_key(WorkerSpec(WorkerId("b"), "http://w"))
    ranks = [WorkerSpec(WorkerId("a"), "http://w", rank=Rank(WorkerId("a"), n, n)) for n in (0, 1)]
    assert len({worker_key(spec) for spec in (one, *ranks)}) == 3


# ---------------------------------------------------------------- load


def test_the_wait_is_over_what_everybody_sent_and_runs_off_once() -> None:
    here, there = Site(1, workers=1), Site(2, workers=1)
    here.send(PROMPT, 10.0)
    there.send([9, *PROMPT], 10.005)
    mine, theirs = there.worker(0).sent(10.005).pending_s, here.worker(0).sent(10.005).pending_s
    there.hear(here.news(10.005), 10.005)
    worker = there.worker(0)
    assert worker.pending_s == worker.wait_s(10.005) == pytest.approx(mine + theirs)
    assert worker.head_since == pytest.approx(10.005)  # the last time a prefill began that anybody knows of
    assert worker.head_s == pytest.approx(max(mine, theirs))
    assert (worker.inflight_requests, worker.foreign_requests) == (1, 1)
    there.leases[0].first_byte(10.01)
    assert worker.wait_s(10.01) == pytest.approx(theirs - 0.01)
    here.leases[0].first_byte(10.02)
    there.hear(here.news(10.02), 10.02)
    assert worker.wait_s(10.02) == 0.0
    assert worker.others.requests == 1  # it decodes


def test_what_others_have_queued_runs_out_and_is_late_as_far_as_they_said() -> None:
    """The end of a prefill is told some hundredths of a second later, and not at all once the store is down."""
    here, there = Site(1, workers=1), Site(2, workers=1)
    here.send(PROMPT, 10.0)
    own_s = here.worker(0).sent(10.0).pending_s
    there.hear(here.news(10.0), 10.0)
    worker = there.worker(0)
    waits = [worker.wait_s(10.0 + after_s) for after_s in (0.0, own_s / 2, own_s, 2 * own_s, 1.0)]
    assert waits == pytest.approx([own_s, own_s / 2, 0.0, 0.0, 0.0])
    there.hear(here.state(11.0), 11.0)  # it has taken a second so far, so it is expected to take another
    assert worker.wait_s(11.0) == pytest.approx(here.worker(0).wait_s(11.0)) == pytest.approx(1.0 - own_s)
    assert worker.wait_s(11.5) == pytest.approx(0.5 - own_s)
    assert there.send([9, *PROMPT], 13.0).worker is worker
    assert worker.wait_s(13.0) < 1.0  # nor does it come back with a request of our own


def test_a_worker_is_idle_when_nobody_has_anything_there() -> None:
    here, there = Site(1, workers=1), Site(2, workers=1)
    lease = here.send(PROMPT, 10.0)
    there.hear(here.news(10.0), 10.0)
    worker = there.worker(0)
    worker.rates.waited_s = 3.0
    assert there.router.explain(*there.ask([9, *PROMPT]), 10.0).candidates[0].terms.idle_s == 0.0
    here.end(lease, 10.1)
    there.hear(here.news(10.1), 10.1)
    assert worker.idle_since_s == 3.0  # what was waited for before is nothing it could have helped with
    worker.rates.waited_s = 5.0
    assert there.router.explain(*there.ask([9, *PROMPT]), 10.2).candidates[0].terms.idle_s == pytest.approx(2.0)


def test_two_that_hear_each_other_score_alike() -> None:
    sites = Site(1), Site(2)
    for at, site in enumerate(sites):
        for number in range(3 + at):
            site.send([number, at, *PROMPT], 1.0 + 0.1 * number)
    for one, other in (sites, sites[::-1]):
        other.hear(one.state(2.0), 2.0)
    for at in range(2):
        mine, theirs = sites[0].worker(at), sites[1].worker(at)
        assert mine.pending_s == pytest.approx(theirs.pending_s)
        assert mine.head_since == pytest.approx(theirs.head_since)
        assert mine.kv_tokens == theirs.kv_tokens
        assert mine.unindexed_tokens == theirs.unindexed_tokens
        both = mine.inflight_requests + mine.foreign_requests
        assert both == theirs.inflight_requests + theirs.foreign_requests > 0


def test_several_peers_add_up_and_each_goes_alone() -> None:
    there = Site(9, workers=1)
    others = [Site(number, workers=1) for number in (1, 2, 3)]
    for site in others:
        site.send(PROMPT, 0.0)
        there.hear(site.news(0.0), 0.0)
    assert there.worker(0).others.requests == 3
    there.hear([encode(others[0].journal.farewell())], 1.0)
    assert there.worker(0).others.requests == 2
    there.hear(others[1].state(2.9), 2.9)
    there.peers.tick(3.1)
    assert there.worker(0).others.requests == 1
    there.peers.tick(6.0)
    assert (there.worker(0).others.requests, there.worker(0).foreign_requests) == (0, 0)


def test_its_own_messages_and_too_many_peers_are_left_out() -> None:
    there = Site(1)
    there.send(PROMPT, 0.0)
    there.hear(there.news(0.0), 0.0)
    assert not there.peers.peers
    for number in range(MAX_PEERS + 3):
        there.peers.hear(Message(100 + number, 1), 0.0)
    assert len(there.peers.peers) == MAX_PEERS
    assert there.peers.ignored["peers"] == 3


# ---------------------------------------------------------------- placements


def test_only_what_is_new_is_told_of_workers_with_events() -> None:
    here, there = Site(1, workers=1), Site(2, workers=1)
    first = here.send(PROMPT, 0.0)
    (message,) = here.journal.news(0.0)[:1]
    assert [chain.first for chain in message.placed[0].blocks[0].chains] == [0]
    longer = [*PROMPT[: 5 * SIZE], *range(900, 900 + 3 * SIZE)]
    there.hear([encode(message)], 0.0)
    assert there.held([*longer, 1], 0) == 5 * SIZE
    here.send([*longer, 1], 0.1)
    there.hear(here.news(0.1), 0.1)
    assert there.held([*longer, 1], 0) == 8 * SIZE
    first.first_byte(0.2)
    there.hear(here.news(0.2), 0.2)
    there.peers.tick(0.2 + TTL_S + 0.1)
    assert there.held([*longer, 1], 0) == 8 * SIZE  # the second stands on the first one's blocks
    here.end(here.leases[1], 3.0, Result.WORKER_FAILED)
    there.hear(here.news(3.0), 3.0)
    assert there.held([*longer, 1], 0) == 0


def test_of_workers_without_events_it_is_learned() -> None:
    here, there = Site(1, workers=1, announcing=False), Site(2, workers=1, announcing=False)
    lease = here.send(PROMPT, 0.0)
    lease.first_byte(0.5)
    here.end(lease, 1.0)
    there.hear(here.news(1.0), 1.0)
    there.peers.tick(1.0 + 2 * TTL_S)
    assert there.held(PROMPT, 0) == here.held(PROMPT, 0) == 5 * SIZE
    assert there.index.learned(there.worker(0).slot) == 5


def test_a_worker_that_is_not_here_is_skipped_until_it_is() -> None:
    here, there = Site(1, workers=2), Site(2, workers=1)
    leases = [here.send([at, *PROMPT], 0.0) for at in range(2)]
    assert {lease.worker.id for lease in leases} == {"w0", "w1"}
    there.hear(here.news(0.0), 0.0)
    assert there.peers.ignored["worker"] == 1
    assert there.worker(0).others.requests == 1
    there.join(1)
    there.hear(here.state(1.0), 1.0)
    assert there.worker(1).others.requests == 1
    (peer,) = there.peers.peers.values()
    assert len(peer.open) == 2


def test_blocks_of_another_size_match_nothing_and_are_left_out() -> None:
    here, there = Site(1, workers=1), Site(2, workers=0)
    there.join(0, size=2 * SIZE)
    here.send(PROMPT, 0.0)
    there.hear(here.news(0.0), 0.0)
    assert there.peers.ignored["block_size"] == 1
    assert there.worker(0).others.requests == 1
    assert there.index.stats().speculative == 0


def test_who_missed_a_message_asks_and_is_told_again() -> None:
    here, there = Site(1), Site(2)
    here.send(PROMPT, 0.0)
    there.hear(here.news(0.0), 0.0)
    here.send([7, *PROMPT], 0.1)
    here.news(0.1)  # lost
    there.hear(here.state(1.0, again=False), 1.0)
    (peer,) = there.peers.peers.values()
    assert (peer.lost > 0, there.peers.wanting, len(peer.open)) == (True, True, 1)
    there.peers.wanting = False
    assert there.peers.hear(Message(3, 1, ask=True), 1.0)
    there.hear(here.state(1.1, again=True), 1.1)
    assert (there.peers.wanting, len(peer.open)) == (False, 2)


def test_sessions_go_with_the_later_word() -> None:
    here, there = Site(1), Site(2, names="other")
    lease = here.send(PROMPT, 1.0, session="chat")
    there.hear(here.news(1.0), 1.0)
    sessions = there.router.sessions
    told = WorkerId(f"other{lease.worker.slot}")
    assert sessions.find("chat", 1.0) == told
    sessions.keep("chat", WorkerId("own"), 2.0)
    assert sessions.find("chat", 2.0) == "own"
    sessions.told(session_digest("chat"), told, 3.0)
    assert sessions.find("chat", 3.0) == told
    newcomer = Site(5, names="third")
    newcomer.hear(here.state(4.0, again=True), 4.0)
    assert newcomer.router.sessions.find("chat", 4.0) == f"third{lease.worker.slot}"
    assert sessions.forget("chat")
    assert sessions.find("chat", 3.0) is None
    assert sessions.expire(1e9) == 0


# ---------------------------------------------------------------- bounds of the journal


def test_news_wake_once_and_what_ended_unseen_is_not_told() -> None:
    here = Site(1)
    lease = here.send(PROMPT, 0.0)
    here.send([1, *PROMPT], 0.0)
    assert here.woken == 1
    here.end(lease, 0.0, Result.CLIENT_GONE)
    messages = here.journal.news(0.0)
    assert [placement.number for message in messages for placement in message.placed] == [2]
    assert not any(message.ended for message in messages)
    assert here.journal.news(0.1) == []
    here.send([2, *PROMPT], 0.2)
    assert here.woken == 2


def test_messages_stay_within_their_bounds_and_a_giant_is_not_told() -> None:
    here, there = Site(1, workers=1), Site(2, workers=1)
    for number in range(6):
        here.send([number * 10_000 + at for at in range(2_000 * SIZE)], 0.0)
    here.send(list(range(SIZE * (MAX_KEYS + 2))), 0.0)
    assert (here.journal.untold, here.journal.open) == (1, 6)
    for messages in (here.journal.news(0.0), here.journal.state(0.1, again=True)):
        assert len(messages) == 2
        there.hear([encode(message) for message in messages], 0.1)
    (peer,) = there.peers.peers.values()
    assert (len(peer.open), peer.lost) == (6, 0)
    assert there.worker(0).others.requests == 7


def test_more_prompts_at_once_than_a_message_holds_are_not_told_but_their_load_is() -> None:
    here, there = Site(1, workers=1), Site(2, workers=1)
    chain = Chain(keys.chain(keys.namespace(), list(range(SIZE)), SIZE), SIZE)
    blocks = PrefixBlocks((chain,) * (MAX_CHAINS + 1), SIZE * (MAX_CHAINS + 1), SIZE)
    here.router.route(InferenceRequest(Endpoint.EMBEDDINGS, "r", "m", NoPrompt("test")), blocks, 0.0)
    there.hear(here.news(0.0), 0.0)
    assert (here.journal.untold, there.worker(0).others.requests) == (1, 1)


def test_news_that_nobody_takes_give_way_to_a_full_state() -> None:
    here, there = Site(1), Site(2)
    here.journal = Journal(1, here.fleet, here.index, on_change=here.wake, most_news=2)
    here.router.watch(here.journal)
    for number in range(4):
        here.send([number, *PROMPT], 0.0)
    lost = [here.journal.overflown]
    there.hear(here.state(0.1, again=False), 0.1)
    lost.append(here.journal.overflown)
    assert lost == [True, False]
    (peer,) = there.peers.peers.values()
    assert len(peer.open) == 4


# ---------------------------------------------------------------- what a message may cost


def ends(count: int, first: Callable[[int], int]) -> tuple[Site, Message]:
    """Placements of one block each, which are told from block `first` on."""
    there = Site(2, workers=1)
    worker = worker_key(there.worker(0).spec)
    told = [[ChainEnd(first(at), 48, pack_keys([BlockKey(at + 10)]))] for at in range(count)]
    return there, Message(7, 1, placed=[Placement(at, worker, False, [Keys(False, SIZE, 48, told[at])])
                                        for at in range(count)])  # fmt: skip


def test_what_lies_before_the_blocks_that_are_told_takes_no_room() -> None:
    there, message = ends(200, lambda _: 1 << 20)
    tracemalloc.start()
    try:
        there.peers.hear(message, 1.0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert there.index.stats().speculative == 200
    assert most < 1 << 20


@pytest.mark.source_only
@pytest.mark.parametrize("first", [lambda at: 1 + at, lambda at: 5000 - at, lambda at: 1 + at // 300])
def test_a_placement_costs_the_same_however_many_there_are(first: Callable[[int], int]) -> None:
    def lines(count: int) -> int:
        there, message = ends(count, first)
        ran = 0

        def count_line(_frame: FrameType, event: str, _what: object) -> Any:
            nonlocal ran
            ran += event == "line"
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            there.peers.hear(message, 1.0)
        finally:
            sys.settrace(before)
        return ran

    assert lines(600) < 2.5 * lines(300)


def test_a_chain_that_is_not_one_is_forgotten_like_any_other() -> None:
    there = Site(2, workers=1, announcing=False)
    worker = worker_key(there.worker(0).spec)
    doubled = [Keys(False, SIZE, 48, [ChainEnd(0, 48, pack_keys([BlockKey(7)] * 3))])]
    crossed = [Keys(False, SIZE, 48, [ChainEnd(0, 48, pack_keys([BlockKey(8), BlockKey(7)]))])]
    placed = [Placement(at, worker, True, blocks) for at, blocks in enumerate((doubled, crossed, doubled))]
    there.peers.hear(Message(7, 1, placed=placed, prefilled=[0, 1, 2]), 1.0)
    there.index.expire(1e6)
    assert there.index.learned(there.worker(0).slot) == 0
    assert [there.index.holders(BlockKey(key)) for key in (7, 8)] == [0, 0]


def test_what_is_nested_without_end_is_malformed() -> None:
    later = bytes([0x9C, 7, 1, 0xC2, 0xC2, 0xC2, *[0x90] * 6]) + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(Refused, match="malformed"):
        decode(encode(Message(7, 1))[:1] + later)
