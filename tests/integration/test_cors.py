"""Web pages: which may use the client port, and what their browsers are told."""

from __future__ import annotations

import httpx
import pytest

from gateway.edge import Cors
from tests.integration.relay_rig import CHAT, PATIENCE_S, answers, ask, both_loops, post, relay, streams

OK = b"{}"
PAGE = "https://chat.example.com"
HEADERS = ["access-control-allow-origin: *", "access-control-allow-credentials: true"]


@both_loops
async def test_an_allowed_page_may_read_every_answer() -> None:
    for script in (answers(OK, headers=HEADERS), streams(b"data: [DONE]\n\n")):
        async with relay(script, cors=Cors([PAGE, "http://localhost:3000"])) as r:
            for body, status in ((ask(stream=True), 200), (b"{", 400)):
                answer = await r.ask(post(body, headers=[f"origin: {PAGE}"]))
                assert answer.status == status
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert answer.headers["vary"] == "origin"
                assert "x-kvgate-worker" in answer.headers["access-control-expose-headers"]
                assert "access-control-allow-credentials" not in answer.headers


@both_loops
@pytest.mark.parametrize("cors", [None, Cors([PAGE])], ids=["off", "on"])
async def test_others_may_not_whatever_the_worker_says(cors: Cors | None) -> None:
    async with relay(answers(OK, headers=HEADERS), cors=cors, receipts=False) as r:
        for origin in ("https://evil.example", PAGE + ".evil.example", "null", PAGE.upper()):
            answer = await r.ask(post(ask(), headers=[f"origin: {origin}"]))
            assert answer.status == 200
            assert not [name for name in answer.headers if name.startswith("access-control")]


@both_loops
async def test_all_pages_may_where_a_star_says_so() -> None:
    async with relay(answers(OK), cors=Cors(["*"])) as r:
        answer = await r.ask(post(ask(), headers=["origin: https://any.example"]))
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-origin" not in (await r.ask(post(ask()))).headers


async def test_browsers_may_ask_first() -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    async with (
        relay(answers(OK), cors=Cors([PAGE])) as r,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{r.port}", timeout=PATIENCE_S) as http,
    ):
        for path in (CHAT, "/v1/messages", "/v1/models"):
            answer = await http.options(path, headers={"origin": PAGE, **asked})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert {"authorization", "content-type"} <= set(
                answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
            )
            evil = await http.options(path, headers={"origin": "https://evil.example", **asked})
            assert evil.status_code == 400
            assert "access-control-allow-origin" not in evil.headers
        listed = await http.get("/v1/models", headers={"origin": PAGE})
        assert listed.headers["access-control-allow-origin"] == PAGE
        assert not r.workers[0].calls
    async with (
        relay(answers(OK)) as r,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{r.port}", timeout=PATIENCE_S) as http,
    ):
        assert (await http.options(CHAT, headers={"origin": PAGE, **asked})).status_code == 405
