"""What small requests notice of very long prompts beside them: one of 200,000 new tokens each second.

    python -m benchmarks.long_prompts [--seconds 6] [--rounds 3]

`kvgate serve` as shipped in front of a worker that answers at once. Small chats are sent by a timetable, 100 a second,
without and with the long ones in turns; what the long ones add to the p99 is the figure. From each time the time is
taken off that the gateway and the client were ready to run and had no core, as far as the kernel tells: that is the
machine's, and long prompts keep a second core busy by right.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from typing import NamedTuple

import uvloop

from benchmarks.process_cpu import loop_cpu_s, waited_s
from benchmarks.relay import free_port, started
from benchmarks.relay_load import Client

LONG_TOKENS = 200_000
MODES = ("exact", "turns", "approximate")
"""One message with a tokenizer, 4,000 messages with a tokenizer, one message without."""
_MODEL = Path(__file__).parents[1] / "gateway" / "sim" / "model"
_SMALL_EVERY_S = 0.01
_LONG_EVERY_S = 1.0
_TURNS = 4_000
_WORDS = re.findall(
    r"\w+", "a gateway that knows where a prompt was computed before can send it there again and save work"
)


def chat(*texts: str) -> bytes:
    """A chat request as bytes, a message a text."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body = json.dumps({"model": "fake", "max_tokens": 1, "messages": messages}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def long_text(rng: Random, tokens: int = LONG_TOKENS) -> str:
    """At least so many tokens of the demo's tokenizer, that nobody has seen before."""
    return " ".join(rng.choices(_WORDS, k=tokens))


def long_chat(rng: Random, mode: str) -> bytes:
    """A request of 200,000 tokens."""
    if mode == "turns":
        return chat(*(long_text(rng, LONG_TOKENS // _TURNS) for _ in range(_TURNS)))
    return chat(long_text(rng))


class Seen(NamedTuple):
    """Of the small requests of one run: seconds each took and what of them was waiting for a core; and the most CPU of
    the gateway's loop between two answers, which no other work on the machine can lengthen."""

    took: list[tuple[float, float]]
    longest_turn_s: float


async def sent(port: int, pids: Sequence[int], long_chats: Sequence[bytes], *, seconds: float) -> Seen:
    """Send the small requests, and the long ones one a second. `pids` begin with the gateway's."""
    loop = asyncio.get_running_loop()
    free: list[Client] = []
    clients: list[Client] = []
    took: list[tuple[float, float]] = []
    ran, longest = loop_cpu_s(pids[0]), 0.0

    async def connection() -> Client:
        if free:
            return free.pop()
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        clients.append(client)
        return client

    async def small(number: int) -> None:
        nonlocal ran, longest
        client = await connection()
        waited, began = waited_s(pids), perf_counter()
        await client.ask(chat(f"hi, this is number {number}"))
        took.append((perf_counter() - began, waited_s(pids) - waited))
        before, ran = ran, loop_cpu_s(pids[0])
        longest = max(longest, ran - before)
        free.append(client)

    async def long(request: bytes) -> None:
        client = await connection()
        await client.ask(request)
        free.append(client)

    running = []
    began = loop.time()
    longs = iter(long_chats)
    for number in range(int(seconds / _SMALL_EVERY_S)):
        await asyncio.sleep(max(0.0, began + number * _SMALL_EVERY_S - loop.time()))
        if number * _SMALL_EVERY_S % _LONG_EVERY_S < _SMALL_EVERY_S / 2 and (request := next(longs, None)) is not None:
            running.append(loop.create_task(long(request)))
        running.append(loop.create_task(small(number)))
    await asyncio.gather(*running)
    for client in clients:
        client.close()
    return Seen(took, longest)


def measure(mode: str, *, seconds: float = 6.0, rounds: int = 3) -> dict[str, float]:
    """Milliseconds, over all rounds. `mode` is one of `MODES`."""
    with contextlib.ExitStack() as stack:
        worker, port = free_port(), free_port()
        worker_pid = started(stack, [sys.executable, "-m", "benchmarks.relay_worker", "--port", str(worker)], worker)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = {"name": "fake", "tokenizer": str(_MODEL)} if mode != "approximate" else {"name": "fake"}
        config = {"workers": [{"url": f"http://127.0.0.1:{worker}", "kv_events": "off"}], "models": [model]}
        (folder / "kvgate.json").write_text(json.dumps(config))
        log = stack.enter_context((folder / "gateway.log").open("wb"))
        serve = [sys.executable, "-m", "gateway", "serve", "--config", str(folder / "kvgate.json")]
        pid = started(stack, [*serve, "--port", str(port), "--admin-port", "0"], port, log, path="/ready")
        pids = (pid, worker_pid, os.getpid())
        rng = Random(1)
        calm: list[tuple[float, float]] = []
        beside: list[tuple[float, float]] = []
        longest = 0.0
        for _ in range(rounds):
            longs = [long_chat(rng, mode) for _ in range(int(seconds / _LONG_EVERY_S))]
            calm += uvloop.run(sent(port, pids, (), seconds=seconds)).took
            seen = uvloop.run(sent(port, pids, longs, seconds=seconds))
            beside += seen.took
            longest = max(longest, seen.longest_turn_s)
    return {
        "calm_p99_ms": percentile([took for took, _ in calm], 0.99) * 1e3,
        "beside_p99_ms": percentile([took for took, _ in beside], 0.99) * 1e3,
        "added_p99_ms": added_p99_s(calm, beside) * 1e3,
        "longest_turn_ms": longest * 1e3,
    }


def added_p99_s(calm: Sequence[tuple[float, float]], beside: Sequence[tuple[float, float]]) -> float:
    """Seconds that the long ones added to the p99, without the waiting for a core."""
    slow, usual = (percentile([max(0.0, t - w) for t, w in each], 0.99) for each in (beside, calm))
    return slow - usual


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for one in MODES:
        print(one, json.dumps(measure(one, seconds=args.seconds, rounds=args.rounds)))
