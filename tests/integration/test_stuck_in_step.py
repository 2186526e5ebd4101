"""Beside requests that nobody answers and a client that does not read, a stream goes on chunk by chunk.

The worker sends a chunk when the client has the one before, however long that takes. How long the thread of the gateway
*slept* meanwhile is counted, and it must not: the loop is kept busy, so all that could put it to sleep is a call that
blocks. A thread that waits for a core does not sleep, so a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from gateway.records import WorkerId
from tests.integration.relay_rig import PATIENCE_S, Call, ask, both_loops, post, relay, silent, until

STUCK = 40
CHUNKS = 200
SLEPT_A_CHUNK_S = 0.005
"""What the kernel rounds, and pages that are not there; a call that blocks for as long at each chunk is found."""

FIRST = b"data: first\n\n"
_UNREAD = b"data: " + b"x" * 65_000 + b"\n\n"
_MORE_THAN_SOCKETS_HOLD = 600
"""Some 40 MB: the kernel lets a socket grow to 4 MB for what is sent and 6 for what came, and there are two hops."""


class Busy:
    """Keeps the loop from waiting; how long the thread slept all the same."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._going = True
        self._began = time.perf_counter()
        self._used = _used_s()
        self._again()

    def _again(self) -> None:
        if self._going:
            self._loop.call_soon(self._again)

    def slept_s(self) -> float:
        """Until now; the end of it."""
        self._going = False
        return time.perf_counter() - self._began - (_used_s() - self._used)


def _used_s() -> float:
    """Seconds in which this thread ran, or was ready to and had no core."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


@both_loops
async def test_a_stream_goes_on_beside_what_is_stuck() -> None:
    def streams(call: Call) -> None:
        if b'"unread"' in call.body:
            call.begin_stream(*([_UNREAD] * _MORE_THAN_SOCKETS_HOLD))
        elif b'"in_step"' in call.body:
            call.begin_stream(FIRST)  # the head is passed on with the first event
        else:
            call.plain(b"{}")

    async with relay(silent, streams) as r, asyncio.timeout(10 * PATIENCE_S):
        stuck, moving = r.workers
        for number in range(STUCK):  # in turns: one to the stuck worker, one to the other
            client = await r.client()
            client.send(post(ask()))
            await stuck.call(number)
            if number < STUCK - 2:
                assert (await r.ask(post(ask()))).status == 200
            elif number == STUCK - 2:
                unread = await r.client(limit=1024)
                unread.send(post(ask(stream=True, more=b',"unread":1')))
                await until(lambda: moving.calls[-1].write_backlog() > 0)
        client = await r.client()
        client.send(post(ask(stream=True, more=b',"in_step":1')))
        await until(lambda: b'"in_step"' in moving.calls[-1].body)
        call = moving.calls[-1]
        assert (await client.head())[0] == 200
        assert await client.chunk() == FIRST
        busy = Busy()
        for number in range(CHUNKS):
            event = b"data: %d\n\n" % number
            call.events(event)
            assert await client.chunk() == event
        slept_s = busy.slept_s()
        assert slept_s < CHUNKS * SLEPT_A_CHUNK_S, f"{slept_s:.3f} s"
        # All the others are where they were.
        assert len(stuck.calls) == STUCK == r.fleet.workers[WorkerId("w1")].inflight_requests
        assert r.upstream.open_streams() == STUCK + 2
        assert not r.retried
        for each in r.clients:
            each.abort()
        await until(r.quiet)
