"""Decisions that were made, and the one that would be made for a request."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from gateway.admin.answer import ErrorAnswer
from gateway.admin.decision_answers import DecisionAnswer, DecisionList
from gateway.admin.rows import paced, written
from gateway.admin.views import AdminViews
from gateway.api import parse_request
from gateway.errors import BadRequest, PayloadTooLarge
from gateway.leases import Recent
from gateway.records import Endpoint, MissCause, PrefixBlocks, PrefixMode, Result

EXPLAIN_PATH = "/admin/explain"

MAX_DECISIONS = 256
"""Most decisions one answer holds."""

_DECISIONS_AT_ONCE = 4
"""With 64 workers each: about a millisecond."""

_BYTES_A_TOKEN = 4
"""As the client port estimates a prompt whose tokens are not known."""


_BODY = {
    "type": "object",
    "examples": [{"model": "llama", "messages": [{"role": "user", "content": "How do I fix a flat tyre?"}]}],
}
"""An inference body is what clients send; only that it is an object is said of it."""


def decision_routes(views: AdminViews) -> APIRouter:
    """`/admin/decisions` and `/admin/explain`."""
    routes = APIRouter(tags=["decisions"])

    @routes.get("/admin/decisions", response_model=DecisionList)
    async def list_decisions(
        limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS, description="Most of them.")] = 20,
        request_id: Annotated[str | None, Query(description="The x-request-id of an answer.")] = None,
        worker: Annotated[str | None, Query(description="Placed on this worker.")] = None,
        model: Annotated[str | None, Query(description="For this model.")] = None,
        miss_cause: Annotated[MissCause | None, Query(description="Missed for this cause.")] = None,
        missed: Annotated[bool | None, Query(description="A route miss, or none.")] = None,
        status: Annotated[int | None, Query(ge=100, le=599, description="Ended with this HTTP status.")] = None,
        result: Annotated[Result | None, Query(description="Ended like this.")] = None,
        since_s: Annotated[float | None, Query(ge=0, description="Not older than this many seconds.")] = None,
    ) -> Response:
        """Recent decisions, newest first; all filters given must hold. What asks for an ending leaves out requests that
        still run. The gateway keeps the last 256."""
        now = views.clock()

        def wanted(recent: Recent) -> bool:
            decision, outcome = recent.decision, recent.outcome
            if request_id not in (None, decision.request_id) or worker not in (None, decision.worker):
                return False
            if model not in (None, decision.model) or (since_s is not None and now - decision.decided_at > since_s):
                return False
            if outcome is None:
                return all(asked is None for asked in (miss_cause, missed, status, result))
            return (
                miss_cause in (None, outcome.miss_cause)
                and missed in (None, outcome.missed_tokens > 0)
                and status in (None, outcome.status)
                and result in (None, outcome.result)
            )

        found = islice(filter(wanted, views.router.recent()), limit)
        answers = [DecisionAnswer.of(recent, now) async for recent in paced(found, at_once=_DECISIONS_AT_ONCE)]
        return written(DecisionList(decisions=answers))

    @routes.post(
        EXPLAIN_PATH,
        openapi_extra={"requestBody": {"content": {"application/json": {"schema": _BODY}}}},
        responses={503: {"model": ErrorAnswer}},
    )
    async def explain(
        request: Request,
        path: Annotated[str, Query(description="Inference path the body is for.")] = Endpoint.CHAT.value,
        tenant: Annotated[
            str | None, Query(description="Whose request it is, where tenants have cache salts of their own.")
        ] = None,
    ) -> DecisionAnswer:
        """Where the inference body sent here would go, and every worker's terms. Nothing is run or reserved. The
        session is read from the header or body field that clients use."""
        try:
            endpoint = Endpoint(path)
        except ValueError as error:
            known = ", ".join(known.value for known in Endpoint)
            raise BadRequest(f"path {path!r} is no inference path; there are {known}", param="path") from error
        settings = views.settings()
        body = await _body(request, settings.max_body_bytes)
        parse = partial(
            parse_request,
            endpoint,
            body,
            request_id="explain",
            session=request.headers.get(settings.affinity_header),
            affinity_field=settings.affinity_field,
            tenant=tenant,
            salted=settings.tenant_salt,
        )
        asked = views.router.routed(await asyncio.to_thread(parse))  # a long body takes a while
        pool = views.router.pool(asked.model)
        hasher = views.hasher(pool.model)
        if hasher is None:
            blocks = PrefixBlocks((), len(body) // _BYTES_A_TOKEN, pool.block_size, PrefixMode.NONE, "no_tokenizer")
        else:
            work = hasher.begin(
                asked,
                block_size=pool.block_size,
                adapter=pool.adapter,
                bytes_a_token=pool.rates.bytes_a_token,
                reads_extra_key=pool.reads_extra_key,
            )
            if work.pending:
                await asyncio.to_thread(work.encode)
            blocks = work.blocks()
        now = views.clock()
        choice = views.router.consider(asked, blocks, now)
        return DecisionAnswer.of(
            Recent(choice.decision),
            now,
            would_wait=views.admission.waits_for(asked, choice),
            late_after=views.late_after(asked, choice),
        )

    return routes


async def _body(request: Request, limit: int) -> bytes:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > limit:
            raise PayloadTooLarge(f"the body is longer than {limit} bytes (server.max_body_bytes)")
    return bytes(parts)
