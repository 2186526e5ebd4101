"""Messages between replicas may be lost, doubled and late: after a full state every view equals the truth."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pool import NOTHING_SENT
from gateway.records import Result
from tests.unit.replicas.site import SIZE, TTL_S, Site

PROMPTS = [[seed * 1000 + token for token in range(length * SIZE + 1)] for seed in range(3) for length in (2, 5, 9)]

steps = st.lists(
    st.tuples(
        st.sampled_from(("send", "send", "send", "first", "end", "fail", "news", "state")),
        st.integers(0, 1 << 16),
    ),
    max_size=40,
)
fates = st.sampled_from(("come", "come", "lost", "twice", "late"))


@pytest.mark.parametrize("announcing", [True, False])
@given(steps=steps, fate=st.lists(fates, min_size=1, max_size=40), seed=st.integers(0, 9))
def test_a_full_state_heals_everything(
    announcing: bool, steps: list[tuple[str, int]], fate: list[str], seed: int
) -> None:
    here, there = Site(1, announcing=announcing), Site(2, announcing=announcing, names="other")
    rng = Random(seed)
    now = 0.0
    late: list[bytes] = []
    count = 0
    pending = []

    def deliver(messages: list[bytes]) -> None:
        nonlocal count, late
        for message in messages:
            count += 1
            match fate[count % len(fate)]:
                case "come":
                    there.hear([message], now)
                case "twice":
                    there.hear([message, message], now)
                case "late":
                    late.append(message)
                    continue
                case _:
                    continue
            if late and rng.random() < 0.5:
                there.hear([late.pop(rng.randrange(len(late)))], now)

    for what, number in steps:
        now += 0.01
        if what == "send":
            prompt = PROMPTS[number % len(PROMPTS)]
            pending.append((here.send(prompt, now), prompt))
        elif what == "first" and pending:
            pending.pop(number % len(pending))[0].first_byte(now)
        elif what in ("end", "fail") and here.leases:
            lease = here.leases[number % len(here.leases)]
            pending = [entry for entry in pending if entry[0] is not lease]
            here.end(lease, now, Result.COMPLETED if what == "end" else Result.WORKER_FAILED)
        elif what == "news":
            deliver(here.news(now))
        elif what == "state":
            deliver(here.state(now, again=number % 2 == 0))

    there.hear(here.state(now), now)
    for at in range(2):
        sent, known = here.worker(at).sent(now), there.worker(at).others
        assert known.requests == sent.requests
        assert known.pending_s == pytest.approx(sent.pending_s)
        assert (known.tokens, known.kv_tokens, known.queued_kv) == (sent.tokens, sent.kv_tokens, sent.queued_kv)
        if sent.pending_s:
            assert known.head_since == pytest.approx(sent.head_since)
    for lease, prompt in pending:
        at = lease.worker.slot
        assert there.held(prompt, at) == here.held(prompt, at)
    (peer,) = there.peers.peers.values()
    assert len(peer.open) == len(pending) == here.journal.open

    there.hear(late, now)  # what comes after it and is older changes nothing
    for at in range(2):
        assert there.worker(at).others.requests == here.worker(at).sent(now).requests
    assert len(peer.open) == len(pending)

    there.peers.tick(now + 3.1)
    there.peers.tick(now + 3.1 + TTL_S)
    assert not there.peers.peers
    assert all(worker.others == NOTHING_SENT for worker in there.fleet.workers.values())
    assert there.index.stats().speculative == 0
    assert all((w.foreign_requests, w.kv_tokens, w.pending_s) == (0, 0, 0.0) for w in there.fleet.workers.values())
