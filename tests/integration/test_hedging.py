"""A late request gets a second worker: the first good answer is the client's, the other worker hears of its end."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

from gateway.edge import EdgeLimits, HedgeRules
from gateway.pool import Kind
from gateway.pool.silence import SILENT_S
from gateway.records import Hedged, Outcome, Result, WorkerId
from gateway.upstream.connections import Timeouts
from tests.integration.relay_rig import (
    PATIENCE_S,
    Call,
    RelayRig,
    answers,
    ask,
    both_loops,
    break_opening,
    post,
    relay,
    silent,
    streams,
    until,
)

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
OK = b'{"id":"1","choices":[]}'
RULES = HedgeRules(0.95, 0.02)
PATIENT = Timeouts(connect_s=PATIENCE_S)


def taught(r: RelayRig) -> None:
    """Answers of the pool began far sooner than expected: what takes longer than the floor is late."""
    for kind in Kind:
        for _ in range(50):
            r.fleet.pools["m"].hedging.began(kind, 1.0, 0.001)


def counted(r: RelayRig) -> tuple[dict[str, int], dict[str, int]]:
    """Second copies by what became of them, and refusals by reason."""
    hedging = r.fleet.pools["m"].hedging
    results = {str(kind): count for kind, count in hedging.results.items()}
    return results, {str(reason): count for reason, count in hedging.refused.items()}


def attempt(r: RelayRig, worker: str) -> Outcome:
    """The outcome of the only decision for a worker."""
    (recent,) = (recent for recent in r.router.recent() if recent.decision.worker == worker)
    assert recent.outcome is not None
    return recent.outcome


async def heard(call: Call) -> None:
    async with asyncio.timeout(20):
        await call.gone.wait()


@both_loops
@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_worker_answers_first(stream: bool) -> None:
    good = streams(TOKEN, TOKEN, DONE) if stream else answers(OK)
    async with relay(silent, good, hedges=HedgeRules(0.95, SILENT_S + 0.05), timeouts=PATIENT) as r:
        taught(r)
        answer = await r.ask(post(ask(stream=stream)))
        assert (answer.status, answer.body) == (200, TOKEN + TOKEN + DONE if stream else OK)
        assert (answer.headers["x-kvgate-worker"], answer.headers["x-kvgate-retries"]) == ("w2", "0")
        await heard(r.workers[0].calls[0])
        outcome = await r.outcome()
        assert (outcome.result, outcome.worker, outcome.hedged) == (Result.COMPLETED, "w2", Hedged.WON)
        assert r.workers[0].calls[0].body == r.workers[1].calls[0].body
        await until(r.quiet)
        assert counted(r) == ({Hedged.WON: 1}, {})
        lost = attempt(r, "w1")
        assert (lost.result, lost.delivered_tokens, lost.missed_tokens) == (Result.HEDGED, None, 0)
        second = next(recent.decision for recent in r.router.recent() if recent.decision.worker == "w2")
        assert second.beside == "w1"
        # To lose is no failure; to answer nobody all the while is one.
        assert (lost.error_code, [worker.health.failures for worker in r.fleet.workers.values()]) == (
            "overtaken",
            [1, 0],
        )
        assert not r.retried
        assert r.fleet.pools["m"].retries.retried == 1, "charged to the budget"


@both_loops
@pytest.mark.parametrize("other", ["stream", "4xx"])
async def test_a_worker_that_answers_others_meanwhile_is_not_silent(other: str) -> None:
    """Be it the middle of an answer that had begun before, or a word about the request."""
    async with relay(silent, silent, hedges=HedgeRules(0.95, SILENT_S + 0.05), timeouts=PATIENT) as r:
        writing = await r.client()
        writing.send(post(ask(stream=True)))
        before = await r.workers[0].call()
        if other == "stream":
            before.begin_stream(TOKEN)
            await writing.head()
            await writing.chunk()
        filler = await r.client()
        filler.send(post(ask()))  # in turn
        (await r.workers[1].call()).plain(OK)
        assert (await filler.answer()).status == 200
        taught(r)
        late = await r.client()
        late.send(post(ask()))
        await r.workers[0].call(1)
        second = await r.workers[1].call(1)
        if other == "stream":
            before.events(TOKEN)
            await writing.chunk()
        else:
            before.plain(b'{"error":{}}', status="400 Bad Request")
            assert (await writing.answer()).status == 400
        second.plain(OK)
        assert (await late.answer()).status == 200
        assert counted(r) == ({Hedged.WON: 1}, {})
        assert [worker.health.failures for worker in r.fleet.workers.values()] == [0, 0]


@both_loops
@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_worker_answers_first_after_all(stream: bool) -> None:
    async with relay(silent, silent, hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask(stream=stream)))
        first, second = await r.workers[0].call(), await r.workers[1].call()
        streams(TOKEN, DONE)(first) if stream else first.plain(OK)
        answer = await client.answer()
        assert (answer.headers["x-kvgate-worker"], answer.body) == ("w1", TOKEN + DONE if stream else OK)
        await heard(second)
        await until(r.quiet)
        assert r.outcomes[0].hedged is Hedged.LOST
        assert attempt(r, "w2").result is Result.HEDGED
        assert counted(r) == ({Hedged.LOST: 1}, {})
        kind = Kind.STREAM if stream else Kind.TEXT
        assert len(r.fleet.pools["m"].hedging._ratios[kind]) == 51, "what it took is learned from"


@both_loops
@pytest.mark.parametrize("rules", [None, HedgeRules(0.0, 0.02), HedgeRules(0.95, 0.02, models={"m": (0.0, None)})])
async def test_off_sends_one_request(rules: HedgeRules | None) -> None:
    async with relay(silent, answers(OK), hedges=rules) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask()))
        call = await r.workers[0].call()
        await asyncio.sleep(0.2)
        call.plain(OK)
        assert (await client.answer()).status == 200
        assert not r.workers[1].calls
        assert (r.outcomes[0].hedged, counted(r)) == (None, ({}, {}))


@both_loops
async def test_nothing_is_late_before_the_pool_has_been_seen() -> None:
    async with relay(answers(OK), answers(OK), hedges=RULES, timeouts=PATIENT) as r:
        for _ in range(25):
            assert (await r.ask(post(ask()))).status == 200
        pool = r.fleet.pools["m"]
        assert pool.hedging.due_s(Kind.TEXT, 1.0, RULES._base) is not None, "learned from answers"
        for worker in r.workers:
            worker.script = silent
        client = await r.client()
        client.send(post(ask(stream=True)))  # of these none has been seen
        await until(lambda: sum(len(worker.calls) for worker in r.workers) == 26)
        await asyncio.sleep(0.2)
        assert sum(len(worker.calls) for worker in r.workers) == 26


@both_loops
@pytest.mark.parametrize(
    "more",
    [b',"n":2', b',"session_id":"s"'],
    ids=["choices", "engine session"],
)
async def test_what_may_not_be_doubled_is_not(more: bytes) -> None:
    async with relay(silent, answers(OK), hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask(more=more)))
        call = await r.workers[0].call()
        await asyncio.sleep(0.2)
        call.plain(OK)
        assert (await client.answer()).status == 200
        assert not r.workers[1].calls


@both_loops
async def test_the_client_leaves_in_the_middle_of_both() -> None:
    async with relay(silent, silent, hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask(stream=True)))
        first, second = await r.workers[0].call(), await r.workers[1].call()
        client.abort()
        await heard(first)
        await heard(second)
        outcome = await r.outcome()
        assert (outcome.result, outcome.worker, outcome.hedged) == (Result.CLIENT_GONE, "w1", Hedged.ENDED)
        assert r.quiet()
        assert attempt(r, "w2").result is Result.HEDGED
        assert counted(r) == ({Hedged.ENDED: 1}, {})


@both_loops
async def test_the_first_fails_and_the_second_is_waited_for() -> None:
    async with relay(silent, silent, answers(OK), hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask()))
        first, second = await r.workers[0].call(), await r.workers[1].call()
        first.abort()
        await until(lambda: len(r.retried) == 1)
        second.plain(OK)
        answer = await client.answer()
        assert (answer.status, answer.headers["x-kvgate-worker"], answer.headers["x-kvgate-retries"]) == (
            200,
            "w2",
            "1",
        )
        assert (r.retried[0].worker, r.retried[0].result) == ("w1", Result.WORKER_FAILED)
        assert r.outcomes[0].hedged is Hedged.WON
        assert not r.workers[2].calls
        await until(r.quiet)
        assert [worker.health.failures for worker in r.fleet.workers.values()] == [1, 0, 0]


@both_loops
@pytest.mark.parametrize("status", ["500 Bad", "429 Busy", "400 Bad", None])
async def test_the_second_fails_and_the_first_is_waited_for(status: str | None) -> None:
    """Also where it refuses the request: that the first may say."""
    bad = answers(b"{}", status=status) if status is not None else lambda call: call.abort()
    async with relay(silent, bad, answers(OK), hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask()))
        first = await r.workers[0].call()
        await until(lambda: counted(r)[0] == {Hedged.FAILED: 1})
        assert r.upstream.open_streams() == 1
        assert [copy.worker for copy in r.failed_copies] == ["w2"], "told at once: whoever is gone is looked for"
        first.plain(OK)
        answer = await client.answer()
        assert (answer.status, answer.headers["x-kvgate-worker"], answer.headers["x-kvgate-retries"]) == (
            200,
            "w1",
            "0",
        )
        assert not r.retried
        assert r.outcomes[0].hedged is Hedged.FAILED
        await until(r.quiet)
        assert not r.workers[2].calls, "one second copy a request"
        failures = 1 if status in ("500 Bad", None) else 0
        assert [worker.health.failures for worker in r.fleet.workers.values()] == [0, failures, 0]


@both_loops
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_both_fail_and_a_third_is_tried(order: tuple[int, int]) -> None:
    async with relay(silent, silent, answers(OK), hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask()))
        calls = await r.workers[0].call(), await r.workers[1].call()
        calls[order[0]].abort()
        await until(lambda: r.upstream.open_streams() == 1)
        calls[order[1]].abort()
        answer = await client.answer()
        assert (answer.status, answer.headers["x-kvgate-worker"]) == (200, "w3")
        assert r.outcomes[0].hedged is Hedged.FAILED
        await until(r.quiet)
        assert [worker.health.failures for worker in r.fleet.workers.values()] == [1, 1, 0]


@both_loops
async def test_after_both_have_failed_nobody_is_doubled_again() -> None:
    async with relay(
        silent, silent, silent, silent, hedges=RULES, timeouts=PATIENT, limits=EdgeLimits(max_retries=5)
    ) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask()))
        calls = await r.workers[0].call(), await r.workers[1].call()
        for call in calls:
            call.abort()
        third = await r.workers[2].call()
        await asyncio.sleep(0.2)
        third.plain(OK)
        assert (await client.answer()).headers["x-kvgate-worker"] == "w3"
        assert not r.workers[3].calls


@both_loops
async def test_both_fail_and_no_more_may_be_tried() -> None:
    async with relay(
        silent, silent, answers(OK), hedges=RULES, timeouts=PATIENT, limits=EdgeLimits(max_retries=1)
    ) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask()))
        first, second = await r.workers[0].call(), await r.workers[1].call()
        first.abort()
        await until(lambda: r.upstream.open_streams() == 1)
        second.abort()
        assert (await client.answer()).status == 502
        assert (r.outcomes[0].result, r.outcomes[0].worker) == (Result.WORKER_FAILED, "w2")
        await until(r.quiet)
        assert not r.workers[2].calls


@both_loops
async def test_the_deadlines_hold_for_both() -> None:
    async with relay(silent, silent, hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask(), headers=["x-request-timeout-s: 3"]))
        calls = await r.workers[0].call(), await r.workers[1].call()
        answer = await client.answer()
        assert answer.status == 504
        assert b"deadline_exceeded" in answer.body
        for call in calls:
            await heard(call)
        await until(r.quiet)
        assert r.outcomes[0].hedged is Hedged.ENDED
    async with relay(silent, silent, hedges=RULES, timeouts=replace(PATIENT, first_byte_s=0.3)) as r:
        taught(r)
        answer = await r.ask(post(ask()))
        assert (answer.status, b"worker_timeout" in answer.body) == (504, True)
        await until(r.quiet)
        assert [worker.health.failures for worker in r.fleet.workers.values()] == [1, 1]


@both_loops
async def test_a_stream_that_breaks_after_its_first_byte_is_broken_as_always() -> None:
    async with relay(silent, silent, answers(OK), hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask(stream=True)))
        second = await r.workers[1].call()
        second.begin_stream(TOKEN)
        await client.head()
        assert await client.chunk() == TOKEN
        second.abort()
        assert b'"error"' in await client.chunk()
        await until(r.quiet)
        assert (r.outcomes[0].result, r.outcomes[0].hedged) == (Result.WORKER_FAILED, Hedged.WON)
        assert not r.workers[2].calls


@both_loops
async def test_no_second_copy_without_budget() -> None:
    async with relay(silent, answers(OK), hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        pool = r.fleet.pools["m"]
        while pool.retries.has_room(r.edge.clock()):
            pool.retries.retry(r.edge.clock())
        client = await r.client()
        client.send(post(ask()))
        call = await r.workers[0].call()
        await until(lambda: counted(r)[1].get("budget", 0) >= 2)  # and looked at again
        call.plain(OK)
        assert (await client.answer()).status == 200
        assert not r.workers[1].calls
        assert pool.retries.refused == 0, "no retry was refused"


@both_loops
async def test_no_second_copy_behind_the_same_address() -> None:
    async with relay(silent, hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        worker = next(iter(r.fleet.workers.values()))
        r.fleet.add(replace(worker.spec, name=WorkerId("w1-again")), worker.facts, r.edge.clock())
        client = await r.client()
        client.send(post(ask()))
        call = await r.workers[0].call()
        await until(lambda: counted(r)[1].get("no_worker", 0) >= 1)
        call.plain(OK)
        assert (await client.answer()).status == 200
        assert len(r.workers[0].calls) == 1


@both_loops
@pytest.mark.parametrize("winner", [0, 1])
async def test_a_session_goes_where_its_answer_came_from(winner: int) -> None:
    async with relay(silent, silent, hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        client = await r.client()
        client.send(post(ask(), headers=["x-session-id: s"]))
        calls = await r.workers[0].call(), await r.workers[1].call()
        first = r.router.sessions.find("s", r.edge.clock())
        assert first == next(iter(r.router.recent()[-1:])).decision.worker, "the second has not taken it over"
        calls[winner].plain(OK)
        assert (await client.answer()).status == 200
        assert r.router.sessions.find("s", r.edge.clock()) == r.workers[winner].name


@both_loops
async def test_no_request_is_left_for_the_collector() -> None:
    """Neither one that was overtaken nor one both of whose workers failed: a dropped connection alone is."""
    calls: list[Call] = []

    def script(call: Call) -> None:
        """Every second call is a second worker's: it answers, or fails with the first, in turns."""
        calls.append(call)
        if len(calls) % 4 == 2:
            call.plain(OK)
        elif len(calls) % 4 == 0:
            for each in calls[-2:]:
                each.plain(b"{}", status="500 Bad")

    limits = EdgeLimits(max_retries=1)
    async with relay(script, script, hedges=RULES, timeouts=PATIENT, limits=limits) as r:
        taught(r)
        r.fleet.pools["m"].retries.ratio = 100.0
        client = await r.client()

        async def some(count: int) -> None:
            for number in range(count):
                client.send(post(ask()))
                assert (await client.answer()).status == (500 if number % 2 else 200)
                await until(r.quiet)
                for worker in r.fleet.workers.values():
                    worker.health.reset(r.edge.clock())

        await some(4)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await some(10)
            gc.collect()
            left = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not left & {"Attempts", "Exchange", "Lease", "Race", "_Runner", "frame", "InferenceRequest"}


@pytest.mark.source_only
@both_loops
async def test_a_bug_in_beginning_the_second_copy_costs_no_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_opening(monkeypatch, "w2")
    async with relay(silent, silent, hedges=RULES, timeouts=PATIENT) as r:
        taught(r)
        answer = await r.ask(post(ask()))
        assert answer.status == 500
        await heard(r.workers[0].calls[0])
        await until(r.quiet)
    assert "seeded bug" in caplog.text
