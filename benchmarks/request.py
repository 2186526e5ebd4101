"""What a whole request costs the gateway: `kvgate serve` as shipped, in front of a simulated engine.

    python -m benchmarks.request [--requests 600] [--approximate]

A chat of 14 KB in 8 turns, not streamed, in exact mode: rendered, found in the segment cache, hashed, looked up in an
index that the engine's own events filled, scored, relayed, counted and logged. CPU is what the kernel charged to the
gateway's process for each request, user and system; the stages are the gateway's own wall-clock figures
(`kvgate_overhead_seconds`), relay and the rest is what remains. `small` is the same with a prompt of one word.
With `--approximate` the gateway has no tokenizer, the worker no events, and the system prompt 8 KB: the text is hashed,
and what the worker holds is learned from routing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path

import uvloop

from benchmarks.chats import model_apart
from benchmarks.process_cpu import cpu_s
from benchmarks.relay import free_port, started
from benchmarks.relay_load import Client

_CONVERSATIONS = 20
_CONNECTIONS = 4
_TURNS = 8
_WORDS = "a gateway that knows where a prompt was computed before can send it there again and save the work "


def _chat(number: int, *, system_bytes: int = 3600) -> bytes:
    system = f"You are the assistant of shop {number}. {_WORDS * 90}"
    messages = [{"role": "system", "content": system[:system_bytes]}]
    for turn in range(_TURNS):
        messages.append({"role": "user", "content": f"Question {turn} of {number}: {_WORDS * 6}"[:560]})
        messages.append({"role": "assistant", "content": f"Answer {turn} to {number}: {_WORDS * 7}"[:640]})
    messages.append({"role": "user", "content": "And now?"})
    return _post({"model": "demo", "max_tokens": 1, "messages": messages})


def _post(body: dict[str, object]) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk-none\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
    )


def measure(*, requests: int = 600, rounds: int = 5, approximate: bool = False) -> dict[str, float]:
    """Microseconds a request, medians over the rounds. `hit` is the share of prompt tokens predicted as cached."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine, port, admin = free_port(), free_port(), free_port()
        kvgate = [sys.executable, "-m", "gateway"]
        with (folder / "log").open("wb") as log:
            simulated = [*kvgate, "engine", "--port", str(engine), "--speed", "1000", "--kv-tokens", "400000"]
            if approximate:
                with model_apart(folder) as model:
                    started(stack, [*simulated, "--tokenizer", str(model)], engine, log)
            else:
                started(stack, simulated, engine, log)
            worker = f"http://127.0.0.1:{engine}"
            config = folder / "kvgate.yaml"
            events = "off" if approximate else "auto"
            config.write_text(f"workers: [{{url: '{worker}', kv_events: {events!r}}}]\n")
            ports = ["--port", str(port), "--admin-port", str(admin)]
            serve = [*kvgate, "serve", "--config", str(config), *ports]
            pid = started(stack, serve, port, log, path="/ready")
        chats = [_chat(number, system_bytes=8192 if approximate else 3600) for number in range(_CONVERSATIONS)]
        return uvloop.run(_measure(chats, port, admin, pid, requests, rounds))


async def _measure(chats: list[bytes], port: int, admin: int, pid: int, requests: int, rounds: int) -> dict[str, float]:
    small = [_post({"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]})]
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(_CONNECTIONS)]
    await asyncio.sleep(1)
    for _ in range(2):
        await _run(clients, chats, 2 * _CONVERSATIONS)
        await asyncio.sleep(0.5)
    whole: list[float] = []
    little: list[float] = []
    before = _overhead(admin)
    for _ in range(rounds):
        whole.append(await _cpu_us(clients, chats, requests, pid))
    after = _overhead(admin)
    for _ in range(rounds):
        little.append(await _cpu_us(clients, small, requests, pid))
    for client in clients:
        client.close()
    stages = {
        stage: (after[f"sum {stage}"] - before[f"sum {stage}"]) / (requests * rounds) * 1e6
        for stage in ("parse", "prefix", "route")
    }
    cpu = statistics.median(whole)
    return {
        "body_bytes": float(len(chats[0])),
        "hit": (after["predicted"] - before["predicted"]) / (after["prompt"] - before["prompt"]),
        "cpu_us": cpu,
        "parse_us": stages["parse"],
        "render_tokenise_hash_us": stages["prefix"],
        "lookup_score_reserve_us": stages["route"],
        "relay_and_rest_us": cpu - sum(stages.values()),
        "small_cpu_us": statistics.median(little),
    }


async def _cpu_us(clients: list[Client], bodies: list[bytes], requests: int, pid: int) -> float:
    before = cpu_s(pid)
    await _run(clients, bodies, requests)
    return (cpu_s(pid) - before) / requests * 1e6


async def _run(clients: list[Client], bodies: list[bytes], count: int) -> None:
    turns = iter(range(count))

    async def one(client: Client) -> None:
        for number in turns:
            await client.ask(bodies[number % len(bodies)])

    await asyncio.gather(*(one(client) for client in clients))


def _overhead(admin: int) -> dict[str, float]:
    """Sums of the gateway's own counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    sums = {
        f"sum {stage}": float(value)
        for stage, value in re.findall(r'kvgate_overhead_seconds_sum\{stage="(\w+)"\} (\S+)', text)
    }
    for name in ("predicted", "prompt"):
        sums[name] = sum(
            float(v) for v in re.findall(rf"^kvgate_{name}_tokens_total\{{.*\}} (\S+)", text, re.MULTILINE)
        )
    return sums


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--approximate", action="store_true")
    given = parser.parse_args()
    for name, value in measure(requests=given.requests, approximate=given.approximate).items():
        print(f"{name:26} {value:10.2f}")
