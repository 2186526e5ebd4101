"""The running gateway compares token ids with its workers: when one joins, and again when it has changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from gateway.records import WorkerId
from gateway.runtime import Gateway
from gateway.settings import Settings
from gateway.sim.speech import DEMO_MODEL
from tests.integration.lying import Worker, lying
from tests.integration.rig import PATIENCE_S, until


@asynccontextmanager
async def serving(worker: Worker) -> AsyncIterator[Gateway]:
    settings: dict[str, Any] = {
        "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_timeout_s": 1},
        "models": [{"name": "demo", "tokenizer": str(DEMO_MODEL)}],
        "workers": [{"url": worker.url, "name": "w1"}],
    }
    gateway = Gateway(Settings(**settings), rng=Random(1))
    await gateway.start()
    try:
        await gateway.until_ready(PATIENCE_S)
        yield gateway
    finally:
        await gateway.stop()


def codes(gateway: Gateway) -> set[str]:
    return {found.code for found in gateway.fleet.workers[WorkerId("w1")].facts.findings}


def compared(worker: Worker) -> int:
    return sum(path == "/tokenize" for path, _ in worker.asked)


def shifted(said: dict[str, Any]) -> dict[str, Any]:
    return said | {"tokens": [token + 1 for token in said["tokens"]]}


async def test_token_ids_are_compared_again_when_the_version_changes() -> None:
    async with lying() as worker, serving(worker) as gateway:
        member = gateway.membership.members[WorkerId("w1")]
        await until(lambda: member.compared)
        assert codes(gateway) == set()
        first = compared(worker)

        # The same worker once more: nothing has changed, nothing is compared.
        asked = len(worker.asked)
        gateway.membership.look(WorkerId("w1"))
        await until(lambda: len(worker.asked) >= asked + 5)
        assert compared(worker) == first

        worker.changes["/tokenize"] = shifted
        worker.changes["/version"] = lambda said: {"version": "0.33.0"}
        gateway.membership.look(WorkerId("w1"))
        await until(lambda: "tokenizer_differs" in codes(gateway))

        del worker.changes["/tokenize"]
        worker.changes["/version"] = lambda said: {"version": "0.33.1"}
        gateway.membership.look(WorkerId("w1"))
        await until(lambda: member.compared and "tokenizer_differs" not in codes(gateway))
        assert gateway.fleet.workers[WorkerId("w1")].facts.version == "0.33.1"


async def test_a_worker_too_busy_to_be_compared_is_asked_again() -> None:
    async with lying({"/tokenize": lambda said: (503, {})}) as worker, serving(worker) as gateway:
        member = gateway.membership.members[WorkerId("w1")]
        await until(lambda: member.not_compared is not None)
        assert (member.compared, codes(gateway)) == (False, set())
        worker.changes["/tokenize"] = shifted
        gateway.membership.look(WorkerId("w1"))
        await until(lambda: "tokenizer_differs" in codes(gateway))
        assert member.not_compared is None


async def test_a_worker_without_tokenize_is_compared_by_its_answers() -> None:
    async with lying({"/tokenize": lambda said: (404, {})}) as worker:

        def returning(said: dict[str, Any]) -> dict[str, Any]:
            return said | {"prompt_token_ids": [1, 2, 3]}

        worker.changes["/v1/completions"] = returning
        async with serving(worker) as gateway:
            await until(lambda: "tokenizer_differs" in codes(gateway))
        sent = [body for path, body in worker.asked if path == "/v1/completions"]
    assert [(body["max_tokens"], body["return_token_ids"]) for body in sent] == [(1, True)]
