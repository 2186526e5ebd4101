"""A request is cut while it waits for its turn, and in the moment in which it gets its worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.pool import FleetSettings
from gateway.records import Result
from tests.integration.relay_rig import Call, RelayRig, ask, both_loops, post, relay, until

OK = b'{"id":"1","choices":[]}'


def _lost(r: RelayRig) -> None:
    next(iter(r.edge.exchanges))._client.transport.abort()  # type: ignore[attr-defined]


def _left(r: RelayRig) -> None:
    next(iter(r.edge.exchanges)).client_gone()


def _shut_down(r: RelayRig) -> None:
    next(iter(r.edge.exchanges)).shut_down()


def _cancelled(r: RelayRig) -> None:
    task = next(iter(r.edge.exchanges))._task
    assert task is not None
    task.cancel()


@both_loops
@pytest.mark.parametrize("granted", [False, True], ids=["waiting", "granted"])
@pytest.mark.parametrize("cut", [_lost, _left, _shut_down, _cancelled])
async def test_cut_while_it_waits(cut: Callable[[RelayRig], None], granted: bool) -> None:
    """`granted`: its lease is made, and its task has not run since."""
    calls: list[Call] = []
    async with relay(calls.append) as r:
        r.fleet.apply(FleetSettings(max_inflight=1))
        admission = r.edge.turns.admission
        first = await r.client()
        first.send(post(ask()))
        await until(lambda: len(calls) == 1)
        second = await r.client()
        second.send(post(ask()))
        await until(lambda: admission.held == 1)
        holder = next(e for e in r.edge.exchanges if e._work.lease is not None)
        if granted:
            holder.client_gone()  # its worker is free
            admission.pump(r.edge.clock())
            assert admission.held == 0
            assert next(iter(r.edge.exchanges))._work.lease is not None
            cut(r)
        else:
            r.edge.exchanges.discard(holder)
            cut(r)
            r.edge.exchanges.add(holder)
            await until(lambda: admission.held == 0)
            calls[0].plain(OK)
            assert (await first.answer()).status == 200
        await until(lambda: len(r.outcomes) == 2)
        assert max(outcome.stages.queue_s for outcome in r.outcomes if outcome.result is not Result.COMPLETED) > 0.0
        await until(r.quiet)
        assert (r.router.open_leases, admission.held, r.edge.buffered_bytes) == (0, 0, 0)
