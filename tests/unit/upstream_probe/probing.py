"""Probes of workers that answer what engines were recorded to answer, changed as a test needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from gateway.records import WorkerFacts, WorkerId, WorkerSpec
from gateway.upstream.control import ControlClient
from gateway.upstream.discovery import probe

ENGINES = Path(__file__).parents[2] / "golden" / "engines"

Answers = dict[str, tuple[int, str]]


def answers_of(engine: str) -> Answers:
    recorded = json.loads((ENGINES / engine / "answers.json").read_text())
    answers = {path: (answer["status"], answer["body"]) for path, answer in recorded.items()}
    answers["/metrics"] = (200, (ENGINES / engine / "metrics.txt").read_text())
    return answers


def spec(url: str = "http://127.0.0.1:8000", **more: Any) -> WorkerSpec:
    return WorkerSpec(name=WorkerId("w1"), url=url, **more)


async def probed(
    answers: Answers,
    worker: WorkerSpec,
    seen: list[httpx.Request] | None = None,
    *,
    known: WorkerFacts | None = None,
) -> WorkerFacts:
    def handle(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append(request)
        status, body = answers.get(request.url.path, (404, '{"detail":"Not Found"}'))
        if status == 0:
            raise httpx.ReadError("cut")
        return httpx.Response(status, text=body)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http:
        return await probe(worker, ControlClient(http), known=known)


def with_sources(sources: object) -> Answers:
    answers = answers_of("vllm-0.32.0")
    answers["/kv_event_sources"] = (200, json.dumps(sources))
    return answers


def source(endpoint: str, replay: str | None = "tcp://*:5657", **more: object) -> dict[str, object]:
    common = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": ""}
    return {**common, "endpoint": endpoint, "replay_endpoint": replay, **more}


def codes(facts: WorkerFacts) -> list[str]:
    return [finding.code for finding in facts.findings]
